"""Serve _build/figures/<id>.{svg,png,csv,json} at figures/<id>.*: the stable address of a figure, named under it."""

import shutil
from pathlib import Path

from docutils import nodes
from sphinx.transforms import SphinxTransform


def folder(app):
    return Path(app.srcdir).parent / "_build" / "figures"


class Downloads(SphinxTransform):
    """Under each figure that has files: its id and links to them.

    Not shown by the notebook: every output of a figure's cell becomes a figure with that caption.
    """

    default_priority = 500

    def apply(self):
        up = "../" * self.env.docname.count("/")
        for figure in self.document.findall(nodes.figure):
            for name in (name.removeprefix("fig-") for name in figure["names"]):
                if not (folder(self.app) / f"{name}.svg").exists():
                    continue
                line = nodes.paragraph("", "Figure ", nodes.literal("", name))
                for kind, before in {"svg": ": ", "png": " · ", "csv": " · ", "json": " · "}.items():
                    line += nodes.Text(before)
                    line += nodes.reference("", kind.upper(), internal=True, refuri=f"{up}figures/{name}.{kind}")
                figure += nodes.legend("", line)


def copy(app, error):
    source, target = folder(app), Path(app.outdir) / "figures"
    if not error and app.builder.format == "html" and source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


def setup(app):
    app.add_transform(Downloads)
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True}
