"""Tests of every path that only an NVIDIA GPU takes; `make gpu` runs them, and without a GPU all are skipped."""

import sys
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).parents[1] / name) for name in ("run", "fuse", "train")]

from quiet import no_autotuning  # noqa: E402

__all__ = ["no_autotuning"]
