"""A drawing of what an epoch of some configurations takes: apart, packed, fused, and as Shoal would have them."""

from pathlib import Path

from shoal.dry_run.parts import Parts, percent, saved
from shoal.dry_run.result import Rehearsal
from shoal.report.drawing import literal, save
from shoal.report.rehearsal_table import TOTALS, seconds_text, verdict

__all__ = ["draw_rehearsal"]

_KINDS = {"steps": "#4477aa", "preprocessing": "#ee8866", "switching": "#bbbbbb"}
"""Colours that people with any eyesight tell apart (Paul Tol's bright and light schemes)."""


def draw_rehearsal(rehearsal: Rehearsal, path: Path, title: str) -> None:
    """Draw a block of bars for each data set: what an epoch of each of its trials takes, by what it is spent on.

    Args:
        rehearsal: what was measured, of one array at least.
        path: a file that `check_drawing` accepts.
        title: over all.

    Raises:
        ShoalError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    streams = rehearsal.streams
    figure = Figure(figsize=(10, 1.6 + 1.5 * len(streams)), layout="constrained")
    axes = figure.subplots()
    longest = max(getattr(stream, name).seconds for stream in streams for name in TOTALS)
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1000.0)
    places: list[float] = []
    labels: list[str] = []
    for block, stream in enumerate(streams):
        top = block * (len(TOTALS) + 1.2)
        if len(streams) > 1:
            arrays = ", ".join(str(index + 1) for index in stream.arrays)
            axes.text(
                0.004 * scale * longest,
                top - 0.6,
                f"array{'s' * (len(stream.arrays) > 1)} {arrays}",
                fontsize=9,
                fontweight="bold",
            )
        for row, (name, label) in enumerate(TOTALS.items()):
            parts: Parts = getattr(stream, name)
            left = 0.0
            for kind, colour in _KINDS.items():
                width = scale * getattr(parts, kind)
                first = block == row == 0
                axes.barh(top + row, width, 0.75, left, color=colour, label=kind if first else None)
                left += width
            told = "" if name == "apart" else f", IMPV {percent(saved(stream.apart, parts))}"
            axes.text(
                left + 0.008 * scale * longest,
                top + row,
                f"{seconds_text(parts.seconds)}{told}",
                va="center",
                fontsize=9,
            )
            places.append(top + row)
            labels.append(label)
    axes.set_yticks(places, labels, fontsize=9)
    axes.set_ylim(max(places) + 0.7, -1.1 if len(streams) > 1 else -0.7)
    axes.set_xlim(0, 1.22 * scale * longest)
    axes.set_xlabel(f"{unit} for one epoch of each trial")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=len(_KINDS), fontsize=9, frameon=False)
    figure.suptitle(literal(f"{title}\n{verdict(rehearsal)}"), fontsize=10, x=0.01, ha="left", wrap=True)
    save(figure, path, "the plot")
