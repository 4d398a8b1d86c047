"""The files of the page in a browser, read once; and the page of a study as one file that needs no server.

A request never names a file of the disk.
"""

import re
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.look.page.feed import StudyFeed
from shoal.look.page.views import curves_view, json_text, overview_view, space_view

__all__ = ["MODULES", "check_page_file", "frozen_page", "page_files", "write_frozen_page", "write_page"]

MODULES = (
    "text.js",
    "source.js",
    "study.js",
    "parts.js",
    "chart.js",
    "timeline.js",
    "forms.js",
    "space.js",
    "trial.js",
    "views.js",
    "trials.js",
    "main.js",
)
"""Modules of the page; each imports only from those before it."""

_KINDS: Mapping[str, str] = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uPlot.min.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(MODULES, "text/javascript; charset=utf-8"),
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return name -> content and media type of each file of the page."""
    folder = files("shoal.look.page").joinpath("static")
    return {name: (folder.joinpath(name).read_bytes(), kind) for name, kind in _KINDS.items()}


_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The file may load nothing, and send nothing."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_MAX_METRICS = 12
"""Most metrics whose curves are in the file: those of the study first."""


def check_page_file(path: Path) -> None:
    """Refuse a name that a browser would not open as a page, and a folder that does not exist."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ShoalError(f"--html writes a page for a browser, whose name ends in .html, got {path}")
    if not path.parent.is_dir():
        raise ShoalError(f"the report cannot be written: {path.parent} is not a directory; make it, or name another")


def write_frozen_page(directory: Path, path: Path) -> None:
    """Write the page of a study."""
    write_page(path, frozen_page(directory, time.time()))


def write_page(path: Path, text: str) -> None:
    """Write the text of `frozen_page`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShoalError(f"the report cannot be written: {error}") from error


def frozen_page(directory: Path, now: float) -> str:
    """The HTML of `write_frozen_page`; `now` is in seconds since 1970."""
    overview, space = json_text(overview_view(directory, now)), json_text(space_view(directory))
    feed = StudyFeed(directory.resolve().name, directory, lambda: now)
    feed.look()
    curves = ",".join(
        f"{json_text(name)}:{json_text(curves_view(directory, name))}" for name in feed.metrics()[:_MAX_METRICS]
    )
    data = f'{{"time":{now},"state":{feed.state()},"overview":{overview},"space":{space},"curves":{{{curves}}}}}'
    files = {name: content.decode() for name, (content, kind) in page_files().items()}
    modules = "\n".join(_EXPORT.sub("", _IMPORT.sub("", files[name])) for name in MODULES)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<style>{files['uPlot.min.css']}\n{files['style.css']}</style>\n"
    )
    scripts = (
        f'<script type="application/json" id="frozen">{_inert(data)}</script>\n'
        f"<script>{files['uPlot.iife.min.js']}</script>\n"
        f'<script type="module">{modules}</script>\n'
    )
    before, rest = files["index.html"].split("<!-- files -->\n")
    _, after = rest.split("<!-- end of files -->\n")
    return before + head + after.replace("</body>", f"{scripts}</body>")


def _inert(json: str) -> str:
    """Return JSON text that cannot end the element that holds it; no character of it is markup."""
    return json.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
