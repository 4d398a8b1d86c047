"""Configuration of an engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from shoal.algorithms.base import Algorithm
from shoal.backends.base import Backend
from shoal.cluster.discover import discover
from shoal.cluster.monitor import Monitor
from shoal.core.array import FusionKey
from shoal.core.device import Cluster
from shoal.core.job import HANG_SECONDS
from shoal.core.objective import loss_metric
from shoal.core.trial import Trial
from shoal.cost.history import History
from shoal.journal.view import JournalView
from shoal.planner.grouping import Grouping
from shoal.schedule.base import Policy
from shoal.schedule.registry import check_losses, make_policy
from shoal.study.devices import DeviceTracker
from shoal.study.fleet import Finder, Fleet
from shoal.study.hangs import HangDetector
from shoal.study.state import CoreConfig

__all__ = ["EngineConfig", "opaque_key"]


@dataclass
class EngineConfig:
    """Settings and collaborators of an engine.

    Args:
        hang_seconds: Seconds without progress after which a job is killed; see `HangDetector`.
        find: Finder of devices that users add while the study runs.
        monitor: Constructor of the device monitor; None: devices are not monitored.
        clock: Monotonic clock, in seconds.
        structure: Key of an opaque training in the profile history; "" if the study trains a `Task`.
        trains: As in `CoreConfig`.
    """

    fleet: Fleet
    policy: Policy
    backend: Backend
    history: History
    retries: int = 2
    grouping: Grouping = field(default_factory=Grouping)
    fuse: bool = True
    hang_seconds: float = HANG_SECONDS
    find: Finder = discover
    monitor: Callable[[Cluster], Monitor] | None = None
    clock: Callable[[], float] = time.monotonic
    structure: str = ""
    trains: bool = True

    def core_config(self, journal: JournalView, algorithm: Algorithm) -> CoreConfig:
        """Settings of the study's state machine."""
        # A back end without concurrency cannot kill a job.
        hang_detector = HangDetector(self.hang_seconds) if self.backend.concurrent else None
        return CoreConfig(
            directory=journal.directory,
            study=journal.study,
            objectives=journal.objectives,
            algorithm=algorithm,
            policy=self.policy,
            history=self.history,
            devices=DeviceTracker(self.fleet, self.find, hang_detector, journal.directory),
            retries=self.retries,
            grouping=self.grouping,
            fuse=self.fuse,
            key=partial(opaque_key, self.structure) if self.structure else None,
            elastic=self.backend.elastic,
            limits_shares=self.backend.limits_shares,
            teams=self.backend.concurrent and self.backend.elastic and not self.structure,
            trains=self.trains,
            jobs=journal.job_count(),
            seq=journal.last_seq(),
            loss=(loss := loss_metric(journal.study.get("loss"), journal.objectives)),
            find_policy=partial(self._find_policy, journal.study.get("objective", "makespan"), loss),
        )

    def _find_policy(self, objective: str, loss: str | None, name: str) -> Policy:
        policy = make_policy(name, objective)
        if self.structure:
            check_losses(policy, loss, begun=True)
        return policy


def opaque_key(structure: str, trial: Trial) -> FusionKey:
    """Fusion key of a trial that a user's program trains, which is known without building a model."""
    return FusionKey(structure, "", 1, opaque=True)
