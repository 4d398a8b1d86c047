"""An experiment of a paper: what the paper reports, and which figure of which measurement stands beside it."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
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
        figure: Finds the value among the figures of the measurement; `KeyError` if it was not measured.
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


def missed_of(experiments: Iterable[Experiment], measurement: Measurement, figures: Figures) -> list[str]:
    """Describe the experiments of a measurement whose figures were measured and miss what is asked."""
    missed = []
    for each in experiments:
        if each.measurement == measurement:
            with suppress(KeyError):
                if not each.reached(value := each.figure(figures)):
                    missed.append(f"{each.title}: {value:.3g} {each.unit}, asked {each.better} {each.asked:g}")
    return missed
