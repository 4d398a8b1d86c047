"""Request of a dry run: the arguments of a call of `tune`, captured without starting the study."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shoal.algorithms.base import Problem
from shoal.core.device import Cluster
from shoal.core.objective import objectives
from shoal.core.space import Space
from shoal.core.trial import Trial
from shoal.planner.packing.base import Packing

__all__ = ["DryRunRequest", "capture_request", "dry_run_request"]


@dataclass(frozen=True)
class DryRunRequest:
    """The checked arguments of a study that has not begun.

    Args:
        spec: Settings of the study, as the journal would store them.
        task: The task, pickled by cloudpickle.
        cluster: Devices of the study.
        packing: Packing of arrays into jobs.
    """

    spec: Mapping[str, Any]
    task: bytes
    cluster: Cluster
    packing: Packing

    @property
    def space(self) -> Space:
        """Search space of the study."""
        return Space.from_json(self.spec["space"])

    def trials(self, count: int) -> list[Trial]:
        """Return the first trials that `Random` would propose for this study."""
        first, *others = objectives(self.spec["metric"], self.spec["mode"])
        shared = None if self.spec["data_seed"] == "trial" else self.spec["data_seed"]
        problem = Problem(self.space, first.metric, first.mode, self.spec["seed"], shared, tuple(others))
        return problem.random_trials(range(count))


class _RequestCaptured(BaseException):
    """Ends a call of `tune` after its request is captured; no `except Exception` around the call catches it."""


_destinations: list[list[DryRunRequest]] = []
"""Destinations of captured requests, the innermost `dry_run_request` last."""


def dry_run_request(run: Callable[[], None]) -> DryRunRequest | None:
    """Capture the request of the first call of `tune` within a function; the call does not return, and starts nothing.

    Args:
        run: The function.

    Returns:
        The request, or None if there is no such call.
    """
    found: list[DryRunRequest] = []
    _destinations.append(found)
    try:
        with suppress(_RequestCaptured):
            run()
    finally:
        _destinations.pop()
    return found[0] if found else None


def capture_request(study: DryRunRequest) -> None:
    """Store the request and end the call of `tune` if it runs within `dry_run_request`; `tune` calls this function."""
    if _destinations:
        _destinations[-1].append(study)
        raise _RequestCaptured
