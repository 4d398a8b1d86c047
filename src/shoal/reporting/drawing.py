"""Shared parts of the matplotlib drawings: check of the file, lanes of concurrent bars, saving."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "assign_lanes", "check_drawing", "escape_math", "save_figure"]

PICTURES = (".png", ".svg")
"""Suffixes of the files that can be drawn."""


class TimeInterval(Protocol):
    """An interval of time."""

    @property
    def begin(self) -> float:
        """Start in seconds."""

    @property
    def end(self) -> float:
        """End in seconds."""


S = TypeVar("S", bound=TimeInterval)


def check_drawing(path: Path, what: str) -> None:
    """Refuse a file that could not be drawn, before there is anything to draw.

    Args:
        path: File to draw.
        what: Name of the drawing, such as "a plot".

    Raises:
        ShoalError: matplotlib is not installed, the suffix is another one, or the folder cannot be written to.
    """
    if path.suffix.lower() not in PICTURES:
        raise ShoalError(f"{what} is a {' or '.join(PICTURES)} file, got {path}")
    if not os.access(path.parent, os.W_OK):
        raise ShoalError(f"{path} cannot be written: {path.parent} is not a writable folder")
    if find_spec("matplotlib") is None:
        raise ShoalError(f"{what} needs matplotlib. Install it with: pip install matplotlib")


def assign_lanes(intervals: Sequence[S]) -> list[tuple[int, int, S]]:
    """Return a lane of the device's row for each interval, so that none covers another, and the number of lanes."""
    free: list[float] = []
    placed: list[tuple[int, S]] = []
    for stay in sorted(intervals, key=lambda stay: (stay.begin, stay.end)):
        lane = next((lane for lane, until in enumerate(free) if until <= stay.begin), None)
        if lane is None:
            lane = len(free)
            free.append(stay.end)
        else:
            free[lane] = stay.end
        placed.append((lane, stay))
    return [(lane, len(free), stay) for lane, stay in placed]


def escape_math(text: str) -> str:
    """Return the text with characters escaped that matplotlib takes for mathematics."""
    return text.replace("$", r"\$")


def save_figure(figure: "Figure", path: Path, what: str, dots_per_inch: int = 110) -> None:
    """Write a drawing.

    Args:
        figure: Figure to write.
        path: File that `check_drawing` accepts.
        what: Name of the drawing, such as "the plot".
        dots_per_inch: Resolution of a raster image.

    Raises:
        ShoalError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=dots_per_inch)
    except OSError as error:
        raise ShoalError(f"{what} cannot be written: {error}") from error
