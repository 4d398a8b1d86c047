"""Model fusion: models of equal structure run and train as one model with a leading axis B.

The package has the name of its main function and can be called like it: `shoal.fuse(models)`.
"""

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from shoal.fuse.api import concat, fuse, stack
from shoal.fuse.array import ModelArray
from shoal.fuse.grads import clip_grad_norm_, clip_grad_value_
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.rules.base import Layout, Rule
from shoal.fuse.rules.table import register_rule
from shoal.fuse.scaler import GradScaler
from shoal.fuse.step import TrainingStep
from shoal.fuse.token_log_probs import TokenStatistics, token_log_probs, token_statistics

__all__ = [
    "FusedOptimizer",
    "GradScaler",
    "Layout",
    "ModelArray",
    "Rule",
    "TokenStatistics",
    "TrainingStep",
    "clip_grad_norm_",
    "clip_grad_value_",
    "concat",
    "fuse",
    "fuse_optimizers",
    "register_rule",
    "stack",
    "token_log_probs",
    "token_statistics",
]


class _Fuse(ModuleType):
    def __call__(
        self, models: Iterable[nn.Module], seeds: Sequence[int] | None = None, strict: bool = True
    ) -> ModelArray:
        return fuse(models, seeds, strict)

    def __reduce__(self) -> tuple[Any, ...]:  # cloudpickle can pickle plain modules only
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Fuse
