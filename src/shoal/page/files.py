"""The files of the page in a browser, read once: a request never names a file of the disk."""

from collections.abc import Mapping
from importlib.resources import files

__all__ = ["MODULES", "page_files"]

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
    folder = files("shoal.page").joinpath("static")
    return {name: (folder.joinpath(name).read_bytes(), kind) for name, kind in _KINDS.items()}
