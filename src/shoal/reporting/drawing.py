"""What all drawings share: the check of their file, bars that lie side by side, and saving."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "check_drawing", "lanes", "literal", "save"]

PICTURES = (".png", ".svg")
"""Endings of the files that can be drawn."""


class TimeInterval(Protocol):
    """Something that lasts."""

    @property
    def begin(self) -> float:
        """Seconds."""

    @property
    def end(self) -> float:
        """Seconds."""


S = TypeVar("S", bound=TimeInterval)


def check_drawing(path: Path, what: str, extra: str, endings: Sequence[str] = PICTURES) -> None:
    """Refuse a file that could not be drawn, before there is anything to draw.

    Args:
        path: the file.
        what: is drawn: "a plot".
        extra: of Shoal's, that brings matplotlib.
        endings: of files that it can be.

    Raises:
        ShoalError: matplotlib is not installed, the file is of another kind, or its folder cannot be written to.
    """
    if path.suffix.lower() not in endings:
        raise ShoalError(f"{what} is a {' or '.join(endings)} file, got {path}")
    if not os.access(path.parent, os.W_OK):
        raise ShoalError(f"{path} cannot be written: there is no folder {path.parent} that one may write to")
    if find_spec("matplotlib") is None:
        raise ShoalError(f"{what} needs matplotlib. Install it with: pip install 'shoal[{extra}]'")


def lanes(stays: Sequence[S]) -> list[tuple[int, int, S]]:
    """A lane of the device's row for every stay, so that none covers another, and how many lanes there are."""
    free: list[float] = []
    placed: list[tuple[int, S]] = []
    for stay in sorted(stays, key=lambda stay: (stay.begin, stay.end)):
        lane = next((lane for lane, until in enumerate(free) if until <= stay.begin), None)
        if lane is None:
            lane = len(free)
            free.append(stay.end)
        else:
            free[lane] = stay.end
        placed.append((lane, stay))
    return [(lane, len(free), stay) for lane, stay in placed]


def literal(text: str) -> str:
    """A text that is drawn as it is, though it may hold what matplotlib takes for mathematics."""
    return text.replace("$", r"\$")


def save(figure: "Figure", path: Path, what: str, dots_per_inch: int = 110) -> None:
    """Write a drawing.

    Args:
        figure: it.
        path: a file that `check_drawing` accepts.
        what: it is: "the plot".
        dots_per_inch: of a picture made of dots.

    Raises:
        ShoalError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=dots_per_inch)
    except OSError as error:
        raise ShoalError(f"{what} cannot be written: {error}") from error
