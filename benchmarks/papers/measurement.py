"""A measurement: one command of this repository, whose last line is one JSON object with its figures and "missed"."""

from dataclasses import dataclass
from importlib.util import find_spec

__all__ = ["CORE", "Measurement"]

CORE = ("torch", "numpy", "cloudpickle", "msgspec", "psutil", "rich")
"""Modules that every measurement imports."""

PACKAGES = {"pynvml": "nvidia-ml-py", "PIL": "pillow", "syne_tune": "syne-tune", "sklearn": "scikit-learn"}
"""Module -> package, where their names differ."""


@dataclass(frozen=True)
class Measurement:
    """Something to measure.

    Args:
        name: Of the file of its result.
        title: In tables.
        least: Seconds, with less than which it is not begun.
        most: Seconds, after which it is killed.
        command: Arguments of Python; "{seconds}" stands for 0.9 of its limit. Its exit status is 1 if something asked
            for was missed.
        quick: Arguments of Python for a run at toy size.
        code: Files and folders of the tree that it depends on.
        needs: Modules.
    """

    name: str
    title: str
    least: int
    most: int
    command: tuple[str, ...]
    quick: tuple[str, ...]
    code: tuple[str, ...] = ("src/shoal", "benchmarks", "examples", "scenarios")
    needs: tuple[str, ...] = CORE

    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [PACKAGES.get(module, module) for module in self.needs if find_spec(module) is None]
