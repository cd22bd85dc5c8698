"""The whole book as one PDF, printed by a headless Chromium: ``python -m specdec.study.pdf PAGE OUTPUT``.

Without arguments it only looks for the browser, so that a missing one is named before the book is built.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)

# Chapters begin on a new page; nothing scrolls on paper; the theme would print the title twice and no other heading.
STYLE = """
@page { size: A4; margin: 18mm 16mm; }
html { font-size: 12px; }
#jb-print-docs-body, .bd-sidebar-primary, .bd-sidebar-secondary, .headerlink, .toctree-wrapper > p.caption {
  display: none !important;
}
.bd-main .bd-content { margin-left: 0 !important; }
.bd-main .bd-content .bd-article-container { max-width: none !important; }
.bd-main .bd-content .bd-article h1:first-of-type { display: block !important; }
.toctree-wrapper section > h1 { break-before: page; }
.bd-article table { display: table !important; font-size: 80%; }
.bd-article table th, .bd-article table td { padding: 2px 4px; }
figure, img { break-inside: avoid; }
pre, code { white-space: pre-wrap !important; overflow-wrap: anywhere; }
"""


class NoBrowser(RuntimeError):
    """No Chromium on this machine."""


def browser() -> str:
    """Path of Chromium or Chrome.

    Raises:
        NoBrowser: there is none.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise NoBrowser(
            "the PDF is printed by Chromium, and none was found. Install it (Debian, Ubuntu: apt install chromium; "
            "macOS: Google Chrome will do), then run the same command again"
        )
    return found


def printable(html: str) -> str:
    """The page as it is printed: our style, and no links to files that a PDF does not carry with it."""
    html = html.replace("</head>", f"<style>{STYLE}</style></head>", 1)
    html = re.sub(r'(<a\b[^>]*?\shref=")[^"#:]*#', r"\1#", html)
    return re.sub(r'(<a\b[^>]*?)\shref="(?!#|[a-z]+:)[^"]*"', r"\1", html)


def write(page: Path, output: Path) -> None:
    """Print ``page``, the book as a single HTML file, to ``output``.

    Raises:
        NoBrowser: there is no Chromium.
        subprocess.CalledProcessError: it failed.
    """
    copy = page.with_name("print.html")
    copy.write_text(printable(page.read_text(encoding="utf-8")), encoding="utf-8")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        made = Path(scratch, "book.pdf")
        options = [
            "--headless",
            "--no-sandbox",  # in a container there is often none to be had; the page is our own
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing from the network, so that two prints agree
            f"--user-data-dir={Path(scratch, 'profile')}",
            "--virtual-time-budget=120000",  # until the mathematics is typeset
            "--no-pdf-header-footer",
            "--generate-pdf-document-outline",
            f"--print-to-pdf={made}",
        ]
        subprocess.run([browser(), *options, copy.resolve().as_uri()], check=True, capture_output=True, text=True)
        shutil.move(made, output)


def main(arguments: list[str]) -> int:
    try:
        if arguments:
            write(*map(Path, arguments))
        else:
            browser()
    except NoBrowser as error:
        print(f"No PDF: {error}.", file=sys.stderr)
        return 1
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(f"No PDF: {error}\n{getattr(error, 'stderr', '') or ''}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
