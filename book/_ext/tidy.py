"""Put right what the tools of the book get wrong on every page.

The scripts of sphinx-thebe name another host and fail, though it is switched off. The entries of the bibliography stand
in a list and are marked as something else, which those who hear the page do not hear as a list.
"""


def tidy(app, pagename, templatename, context, doctree):
    scripts = context["script_files"]
    scripts[:] = [s for s in scripts if "thebe" not in f"{s.filename} {s.attributes.get('body')}"]
    if "body" in context:
        context["body"] = context["body"].replace('role="doc-biblioentry"', 'role="listitem"')


def setup(app):
    app.connect("html-page-context", tidy, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
