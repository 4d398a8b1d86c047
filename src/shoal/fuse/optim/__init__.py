"""Optimizers of an array: every member's own, run as one."""

from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.optim.traced import TracedStep

__all__ = ["FusedOptimizer", "TracedStep", "fuse_optimizers"]
