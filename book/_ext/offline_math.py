"""Typeset math from files of the site itself, so that a page asks nothing of the network.

The package sphinx-mathjax-offline carries MathJax; of it only the one script that runs and its fonts are copied.
"""

from importlib.metadata import distribution
from pathlib import Path

from sphinx.util.fileutil import copy_asset

NEEDED = ("tex-chtml.js", "output/chtml/fonts/woff-v2")


def copy(app, error):
    if error or app.builder.format != "html":
        return
    source = Path(distribution("sphinx-mathjax-offline").locate_file("sphinx-mathjax-offline")) / "static" / "mathjax"
    for name in NEEDED:
        target = Path(app.outdir, "_static", "mathjax", name)
        copy_asset(source / name, target if (source / name).is_dir() else target.parent)


def setup(app):
    app.connect("config-inited", lambda _, config: setattr(config, "mathjax_path", "mathjax/tex-chtml.js"))
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True}
