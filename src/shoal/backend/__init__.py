"""What carries jobs to processes and their reports back."""

from shoal.backend.base import (
    Backend,
    Ended,
    Event,
    Outcome,
    Profiled,
    Reported,
    Runner,
    SignaturesFound,
    WorkerContext,
)
from shoal.backend.inline import Inline
from shoal.backend.local import Local
from shoal.backend.registry import BACKENDS, make_backend

__all__ = [
    "BACKENDS",
    "Backend",
    "Ended",
    "Event",
    "Inline",
    "Local",
    "Outcome",
    "Profiled",
    "Reported",
    "Runner",
    "SignaturesFound",
    "WorkerContext",
    "make_backend",
]
