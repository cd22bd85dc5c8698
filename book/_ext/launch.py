"""Directive ``launch``: notebooks with links that open them on Binder and Colab; a line a notebook, ``path: what``.

There are links only where ``repository`` in ``_config.yml`` names a public one, and the page says so where not.
"""

from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

BINDER = "https://mybinder.org/v2/gh/{slug}/{branch}?labpath={path}"
COLAB = "https://colab.research.google.com/github/{slug}/blob/{branch}/{path}"


class Launch(SphinxDirective):
    has_content = True

    def run(self):
        options = self.config.html_theme_options
        slug = "/".join(options["repository_url"].rstrip("/").split("/")[-2:])
        lines = []
        for path, _, what in (line.partition(": ") for line in self.content if line.strip()):
            if not (Path(self.env.srcdir).parent / path).is_file():
                raise self.error(f"there is no {path}")
            where = {"slug": slug, "branch": options["repository_branch"], "path": path}
            links = f" [Binder]({BINDER.format(**where)}), [Colab]({COLAB.format(**where)})." if slug else ""
            lines.append(f"- `{path}`: {what}{links}")
        if not slug:
            lines += ["", "This copy of the book names no public repository, so there is nothing to launch from yet."]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, self.get_source_info()[0]), self.content_offset, node)
        return node.children


def setup(app):
    app.add_directive("launch", Launch)
    return {"parallel_read_safe": True}
