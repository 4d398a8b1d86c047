"""Back ends: they start jobs in processes and return the events of the jobs."""

from shoal.run.base import (
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
from shoal.run.inline import Inline
from shoal.run.local import Local
from shoal.run.registry import BACKENDS, backend_class

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
    "backend_class",
]
