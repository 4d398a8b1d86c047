"""An experiment of a paper: what the paper reports, and which figure of which measurement stands beside it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from papers.measurement import Measurement

__all__ = ["Experiment", "Figures", "missed_of"]

Figures = Mapping[str, Any]
"""The JSON object that a measurement prints."""


@dataclass(frozen=True)
class Experiment:
    """A row of the index.

    Args:
        title: What is compared, in a few words.
        place: Table, figure or section of the paper.
        reported: What the paper reports, with its hardware, in words.
        setting: What is measured here, and at which scale.
        measurement: That measures it; several experiments may share one.
        figure: Finds the value among the figures of the measurement; `KeyError`, `ValueError` or
            `ZeroDivisionError` if it was not measured.
        asked: Value that is aimed at.
        better: Whether the value is to be "at least" or "at most" what is asked.
        unit: Of the value: "x" for times as fast, "s", "ms", "%" and so on.
        published: Value of the paper in the same unit, for the ratio; None where the paper has none that compares.
        noise: Relative difference between two days that is noise.
        why: Why what is asked is missed, in words; shown only while it is.
    """

    title: str
    place: str
    reported: str
    setting: str
    measurement: Measurement
    figure: Callable[[Figures], float]
    asked: float
    better: Literal["at least", "at most"] = "at least"
    unit: str = "x"
    published: float | None = None
    noise: float = 0.15
    why: str = ""

    def reached(self, value: float) -> bool:
        """Whether a value is as good as asked."""
        return value >= self.asked if self.better == "at least" else value <= self.asked


def missed_of(experiments: Iterable[Experiment], measurement: Measurement | None, figures: Figures) -> list[str]:
    """Describe the experiments of a measurement that miss what is asked, or whose figure is not there.

    Without a measurement, as where any parts of a program have run, those that miss it of all whose figure is there.
    """
    missed = []
    for each in experiments:
        if measurement in (None, each.measurement):
            try:
                value = each.figure(figures)
            except (KeyError, ValueError, ZeroDivisionError):
                missed += [f"not measured: {each.title}"] if measurement else []
            else:
                if not each.reached(value):
                    missed.append(f"{each.title}: {value:.3g} {each.unit}, asked {each.better} {each.asked:g}")
    return missed
