"""Speed up PyTorch hyper-parameter search by training many models as one.

A `Task` says how one configuration is trained, in plain PyTorch; `tune` searches a space with it. `fuse` and
`fuse_optimizers` train models of one structure as one without any search. Names are imported when they are first used,
so that commands which only read a study do not wait for torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.core.version import VERSION

if sys.platform == "win32":
    raise ImportError("Shoal needs Linux or macOS, since it locks files with `flock`; on Windows, install it in WSL 2")

if TYPE_CHECKING:
    from shoal.algorithms.asha import ASHA
    from shoal.algorithms.bohb import BOHB, SyncBOHB
    from shoal.algorithms.grid import Grid
    from shoal.algorithms.hyperband import Hyperband
    from shoal.algorithms.loss_trend import LossTrend
    from shoal.algorithms.median import Median
    from shoal.algorithms.optuna_search import OptunaSearch
    from shoal.algorithms.pbt import PBT
    from shoal.algorithms.random import Random
    from shoal.algorithms.rules import NoImprovement, Patience, Percentile, Threshold
    from shoal.algorithms.successive_halving import SuccessiveHalving
    from shoal.api import resume, tune
    from shoal.callbacks.base import Callback
    from shoal.core.errors import ShoalError, StudyFailedError, StudyInterrupted
    from shoal.core.reference import ref
    from shoal.core.space import (
        Space,
        choice,
        grid,
        lognormal,
        logrange,
        loguniform,
        normal,
        ordinal,
        qloguniform,
        quniform,
        randint,
        uniform,
    )
    from shoal.fuse.api import concat, fuse, stack
    from shoal.fuse.array import ModelArray
    from shoal.fuse.grads import clip_grad_norm_, clip_grad_value_
    from shoal.fuse.optim import FusedOptimizer, fuse_optimizers
    from shoal.fuse.scaler import GradScaler
    from shoal.fuse.step import TrainingStep
    from shoal.fuse.token_log_probs import token_log_probs, token_statistics
    from shoal.programs.trainable import checkpoint, report, step
    from shoal.reproduce import randomness, sample_order, sample_randomness
    from shoal.results import Study
    from shoal.task import Task

_HOMES = {
    "shoal.algorithms.asha": ("ASHA",),
    "shoal.algorithms.bohb": ("BOHB", "SyncBOHB"),
    "shoal.algorithms.grid": ("Grid",),
    "shoal.algorithms.hyperband": ("Hyperband",),
    "shoal.algorithms.loss_trend": ("LossTrend",),
    "shoal.algorithms.median": ("Median",),
    "shoal.algorithms.optuna_search": ("OptunaSearch",),
    "shoal.algorithms.pbt": ("PBT",),
    "shoal.algorithms.random": ("Random",),
    "shoal.algorithms.rules": ("NoImprovement", "Patience", "Percentile", "Threshold"),
    "shoal.algorithms.successive_halving": ("SuccessiveHalving",),
    "shoal.api": ("resume", "tune"),
    "shoal.callbacks.base": ("Callback",),
    "shoal.core.errors": ("ShoalError", "StudyFailedError", "StudyInterrupted"),
    "shoal.fuse": (
        *("FusedOptimizer", "GradScaler", "ModelArray", "TrainingStep", "clip_grad_norm_", "clip_grad_value_"),
        *("concat", "fuse_optimizers", "stack", "token_log_probs", "token_statistics"),
    ),
    "shoal.reproduce": ("randomness", "sample_order", "sample_randomness"),
    "shoal.core.reference": ("ref",),
    "shoal.core.space": (
        *("Space", "choice", "grid", "lognormal", "logrange", "loguniform", "normal", "ordinal", "qloguniform"),
        *("quniform", "randint", "uniform"),
    ),
    "shoal.results": ("Study",),
    "shoal.task": ("Task",),
    "shoal.programs.trainable": ("checkpoint", "report", "step"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

_PACKAGES = ("algorithms", "callbacks", "fuse", "integrations", "pack", "plan", "reproduce", "run", "testing")
"""Packages that are imported at their first use as an attribute: `shoal.plan.schedule.POLICIES`."""

__version__ = VERSION
__all__ = [
    "ASHA",
    "BOHB",
    "PBT",
    "Callback",
    "FusedOptimizer",
    "GradScaler",
    "Grid",
    "Hyperband",
    "LossTrend",
    "Median",
    "ModelArray",
    "NoImprovement",
    "OptunaSearch",
    "Patience",
    "Percentile",
    "Random",
    "ShoalError",
    "Space",
    "Study",
    "StudyFailedError",
    "StudyInterrupted",
    "SuccessiveHalving",
    "SyncBOHB",
    "Task",
    "Threshold",
    "TrainingStep",
    "checkpoint",
    "choice",
    "clip_grad_norm_",
    "clip_grad_value_",
    "concat",
    "fuse",
    "fuse_optimizers",
    "grid",
    "lognormal",
    "logrange",
    "loguniform",
    "normal",
    "ordinal",
    "qloguniform",
    "quniform",
    "randint",
    "randomness",
    "ref",
    "report",
    "resume",
    "sample_order",
    "sample_randomness",
    "stack",
    "step",
    "token_log_probs",
    "token_statistics",
    "tune",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"shoal.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
