"""What an engine is configured with."""

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
from shoal.core.trial import Trial
from shoal.cost.history import History
from shoal.journal.view import JournalView
from shoal.planner.grouping import Grouping
from shoal.schedule.base import Policy
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.schedule.registry import make_policy
from shoal.study.devices import DeviceTracker
from shoal.study.fleet import Finder, Fleet
from shoal.study.hangs import HANG_SECONDS, HangDetector
from shoal.study.state import Given

__all__ = ["EngineConfig", "opaque_key"]


@dataclass
class EngineConfig:
    """What an engine works with.

    Args:
        cluster: the devices.
        policy: decides which job runs where.
        backend: runs them.
        history: what is known of jobs, across studies.
        retries: how often a trial whose job failed is tried again.
        tuner: finds how many times the compute of the devices may be promised, from what jobs report; by default it
            leaves all of them as they are.
        grouping: decides which arrays share a process.
        fuse: whether trials may share an array.
        hang_seconds: a job that shows no progress for so long is killed; see `HangDetector`.
        fleet: the devices, if its user has changed them since the study was begun.
        find: finds devices that are added while it runs.
        monitor: makes what looks at the devices; None: nobody does.
        clock: seconds, never going back.
        structure: of an opaque training, as the job history knows it; "" of a task.
    """

    cluster: Cluster
    policy: Policy
    backend: Backend
    history: History
    retries: int = 2
    tuner: OversubscriptionTuner = field(default_factory=lambda: OversubscriptionTuner(kinds=()))
    grouping: Grouping = field(default_factory=Grouping)
    fuse: bool = True
    hang_seconds: float = HANG_SECONDS
    fleet: Fleet | None = None
    find: Finder = discover
    monitor: Callable[[Cluster], Monitor] | None = None
    clock: Callable[[], float] = time.monotonic
    structure: str = ""

    def given(self, journal: JournalView, algorithm: Algorithm) -> Given:
        """What the state machine of a study is given.

        Args:
            journal: of the study.
            algorithm: of the study.
        """
        hang_detector = (
            HangDetector(self.hang_seconds) if self.backend.concurrent else None
        )  # else nobody could kill a job
        fleet = self.fleet or Fleet(self.cluster)
        return Given(
            directory=journal.directory,
            study=journal.study,
            objectives=journal.objectives,
            algorithm=algorithm,
            policy=self.policy,
            history=self.history,
            devices=DeviceTracker(fleet, self.find, hang_detector, journal.directory),
            retries=self.retries,
            tuner=self.tuner,
            grouping=self.grouping,
            fuse=self.fuse,
            key=partial(opaque_key, self.structure) if self.structure else None,
            elastic=self.backend.elastic,
            jobs=len(journal.jobs()),
            find_policy=make_policy,
        )


def opaque_key(structure: str, trial: Trial) -> FusionKey:
    """Of a trial that a program of the user's trains: nobody else's, and there is nothing to be looked at."""
    return FusionKey(structure, "", 1, order=trial.number, opaque=True)
