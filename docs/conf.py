"""Configuration of the documentation site: `make docs` builds it with Sphinx into build/docs.

All pages are in this folder, except CONTRIBUTING.md and CHANGELOG.md, which are at the root of the repository and are
included. Links are written for readers of the repository, and are rewritten when a page is read.
"""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from shoal.core.version import VERSION  # noqa: E402

project = "Shoal"
author = "the authors of Shoal"
release = version = VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["cards.css"]
html_title = f"Shoal {VERSION}"
html_show_copyright = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
default_role = "code"  # docstrings mark names by single backticks
nitpicky = False  # annotations name types of torch and pandas, whose inventories are not on this machine

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras's own default is not installed

autoclass_content = "class"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

_PAGES = {
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "CHANGELOG.md": "changelog.md",
}
"""Files outside of this folder -> the pages that include them."""
_LINK = re.compile(r"\]\(([^)#\s:]+)")


def site_links(text: str, folder: Path, page_folder: Path) -> str:
    """Return the text with relative links that lead to the same files from a page.

    Args:
        text: Markdown.
        folder: Folder of its file, to which its links are relative.
        page_folder: Folder of the page that contains or includes it.
    """

    def moved(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if not target.exists():
            return link[0]
        page = _PAGES.get(target)
        return f"]({os.path.relpath(target if page is None else ROOT / 'docs' / page, page_folder)}"

    return _LINK.sub(moved, text)


def _read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    folder = Path(app.env.doc2path(docname)).parent
    source[0] = site_links(source[0], folder, folder)


def _read_included(app: Sphinx, relative_path: Path, docname: str, source: list[str]) -> None:
    included = (Path(app.srcdir) / relative_path).resolve()
    source[0] = site_links(source[0], included.parent, Path(app.env.doc2path(docname)).parent)


def setup(app: Sphinx) -> None:
    """Rewrite the links of each page when it is read."""
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_included)
