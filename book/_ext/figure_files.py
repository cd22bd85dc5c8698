"""Serve _build/figures/<id>.{svg,png,csv,json} at figures/<id>.*: the stable address of a figure."""

import shutil
from pathlib import Path


def copy(app, error):
    source, target = Path(app.srcdir).parent / "_build" / "figures", Path(app.outdir) / "figures"
    if not error and app.builder.format == "html" and source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


def setup(app):
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True}
