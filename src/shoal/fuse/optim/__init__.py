"""Fused optimizers: one step updates the parameters of all members of an array."""

from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.optim.traced import TracedStep

__all__ = ["FusedOptimizer", "TracedStep", "fuse_optimizers"]
