"""What a call of `tune` asks for, for who only wants to know that."""

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

__all__ = ["DryRunRequest", "dry_run_request", "hand_over"]


@dataclass(frozen=True)
class DryRunRequest:
    """A study that was asked for, its arguments checked, and that has not begun.

    Args:
        spec: its settings, as the journal would keep them.
        task: pickled by cloudpickle.
        cluster: its devices.
        packing: decides which of its arrays share a process.
    """

    spec: Mapping[str, Any]
    task: bytes
    cluster: Cluster
    packing: Packing

    @property
    def space(self) -> Space:
        """What it searches."""
        return Space.from_json(self.spec["space"])

    def trials(self, count: int) -> list[Trial]:
        """The first trials that `Random` would try in its place."""
        first, *others = objectives(self.spec["metric"], self.spec["mode"])
        shared = None if self.spec["data_seed"] == "trial" else self.spec["data_seed"]
        problem = Problem(self.space, first.metric, first.mode, self.spec["seed"], shared, tuple(others))
        return problem.random_trials(range(count))


class _HandedOver(BaseException):
    """Ends a call of `tune` that was to say what it asks for; no `except Exception` around the call stops it."""


_wanted: list[list[DryRunRequest]] = []
"""Where what is asked for goes, the innermost `dry_run_request` last."""


def dry_run_request(run: Callable[[], None]) -> DryRunRequest | None:
    """What the first call of `tune` within a function asks for; the call does not return, and begins nothing.

    Args:
        run: the function.

    Returns:
        None if there is no such call.
    """
    found: list[DryRunRequest] = []
    _wanted.append(found)
    try:
        with suppress(_HandedOver):
            run()
    finally:
        _wanted.pop()
    return found[0] if found else None


def hand_over(study: DryRunRequest) -> None:
    """Called by `tune` when all is checked: where that is all that is wanted, it goes no further."""
    if _wanted:
        _wanted[-1].append(study)
        raise _HandedOver
