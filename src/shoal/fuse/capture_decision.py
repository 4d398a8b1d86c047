"""Decides when the step of an array is recorded or compiled; processes compile one after another, and none waits."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from torch import Tensor
from torch.fx import GraphModule

from shoal.core.demand import Profile
from shoal.fuse.compile_cache import CompileRecord
from shoal.fuse.inductor import compile_ahead, is_compiling
from shoal.plan.cost.capturing import capturing_pays
from shoal.plan.cost.cost import Cost

__all__ = ["RETRY_SECONDS", "CaptureDecision"]

_log = logging.getLogger("shoal.fuse")

RETRY_SECONDS = 1.0
"""Seconds after which an array asks again for a step that another process may have compiled meanwhile."""


class CaptureDecision:
    """Decides whether and when to compile the step of an array, and whether to record it as a CUDA graph.

    A step that this machine has compiled before is compiled if reloading its code pays. Otherwise this process compiles
    it if that pays, and no other process does so now. While another process does, the array takes steps that are not
    compiled, and asks again from time to time. With `ahead`, this process starts that other process.

    Args:
        steps: Number of remaining steps; the caller counts them down.
        later: Number of steps -> expected number of later arrays of this size with as many steps.
        ahead: Whether another process is to compile the step, as with a GPU, whose host has idle cores.
    """

    def __init__(
        self,
        profile: Profile | None,
        members: int,
        steps: int,
        later: Mapping[int, float] = MappingProxyType({}),
        record: CompileRecord | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ahead: bool = False,
    ) -> None:
        self.steps = steps
        self.reloads = False
        """Whether the machine had compiled the step before this process was allowed to."""
        self._profile = profile
        self._members = members
        self._later = later
        self._record = record
        self._clock = clock
        self._ahead = ahead and record is not None
        self._retry_at: float | None = None

    @property
    def waits(self) -> bool:
        """Whether another process compiled the step when it was last asked for."""
        return self._retry_at is not None

    def __call__(self, seconds: float) -> bool:
        """Return whether to compile the step now; call `end` after it.

        Args:
            seconds: Measured seconds of a step that is not compiled.
        """
        self._retry_at = None
        record, pays = self._record, partial(self._pays, seconds)
        self.reloads = record is not None and record.exists
        if record is None or self.reloads:
            return pays(compiled_before=self.reloads)
        if not pays(compiled_before=True):
            return False
        if (self._ahead and is_compiling()) or not record.begin():
            self._retry_at = self._clock() + RETRY_SECONDS
            return False
        self._ahead = self._ahead and record.lock is not None
        if pays(compiled_before=False):
            return True
        record.end(compiled=False)
        return False

    def compile_ahead(self, graph: GraphModule, example: Sequence[Tensor]) -> bool:
        """Start a process that compiles the step, at most once; return whether to ask again later.

        If none can be started, the next answer weighs what it takes to compile the step in this process.

        Args:
            graph: See `compile_graph`, also for `example`.
        """
        lock = None if self._record is None else self._record.lock
        if not self._ahead or lock is None:
            return False
        self._ahead = False
        try:
            compile_ahead(graph, example, lock)
        except Exception as error:  # pickle raises any error
            _log.info("no other process compiles the step: %s", error)
        self._retry_at = self._clock() + RETRY_SECONDS
        return True

    def can_pay(self, records: bool, batches: int = 1) -> bool:
        """Return whether capturing may pay in the steps that remain, by the profile's time of a batch.

        Args:
            records: Whether the device can record the step as a graph.
            batches: Number of batches of a step.
        """
        if self._profile is None:
            return self.steps > 0
        seconds = Cost(self._profile).step_seconds(self._members, batches)
        return (records and self.should_record(seconds)) or self._pays(seconds, compiled_before=True)

    def should_record(self, seconds: float) -> bool:
        """Return whether to record the step as a CUDA graph now, which each process does for itself."""
        return capturing_pays("captured", self._profile, self._members, seconds, self.steps)

    def may_retry(self) -> bool:
        """Return whether to ask again now, since the other process does not compile the step any more."""
        if self._record is None or self._retry_at is None or self._clock() < self._retry_at:
            return False
        self._retry_at = self._clock() + RETRY_SECONDS
        if not self._record.begin():
            return False
        self._record.end(compiled=False)
        return True

    def end(self, compiled: bool) -> None:
        """Let other processes compile the step, or reload its code if it was compiled."""
        if self._record is not None:
            self._record.end(compiled)

    def _pays(self, seconds: float, compiled_before: bool) -> bool:
        known = (self._profile, self._members, seconds, self.steps, self._later)
        return capturing_pays("compiled", *known, compiled_before, self._ahead)
