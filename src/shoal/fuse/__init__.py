"""Fusion: models of one structure, trained as one.

The package has the name of its main function, so it can be called as that function: `shoal.fuse(models)`.
"""

import sys
from collections.abc import Sequence
from types import ModuleType

from torch import nn

from shoal.fuse.array import ModelArray, concat, fuse
from shoal.fuse.clip import clip_grad_norm_
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers

__all__ = ["FusedOptimizer", "ModelArray", "clip_grad_norm_", "concat", "fuse", "fuse_optimizers"]


class _Fuse(ModuleType):
    def __call__(self, models: Sequence[nn.Module], seeds: Sequence[int] | None = None) -> ModelArray:
        return fuse(models, seeds)


sys.modules[__name__].__class__ = _Fuse
