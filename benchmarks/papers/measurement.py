"""A measurement: one command of this repository, whose last line is one JSON object with its figures and "missed"."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["CORE", "Measurement"]

CORE = ("torch", "numpy", "cloudpickle", "msgspec", "psutil", "rich")
"""Modules that every measurement imports."""

_BENCHMARKS = sorted(
    each.name for each in Path(__file__).parents[1].iterdir() if each.name not in ("papers", "__pycache__")
)
CODE = ("src/shoal", "examples", "scenarios", *(f"benchmarks/{name}" for name in _BENCHMARKS))
"""What a measurement runs. The lists of experiments say what was asked and why it is missed, and change no figure."""

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
    code: tuple[str, ...] = CODE
    needs: tuple[str, ...] = CORE

    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [PACKAGES.get(module, module) for module in self.needs if find_spec(module) is None]
