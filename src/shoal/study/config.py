"""Configuration of an engine."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from shoal.algorithms.base import Algorithm
from shoal.core.array import FusionKey
from shoal.core.device import Cluster
from shoal.core.trial import Trial
from shoal.host.discover import discover
from shoal.host.fleet import Finder, Fleet
from shoal.host.machine import threads
from shoal.host.monitor import Monitor
from shoal.host.process_settings import thread_limit
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.schedule.base import Policy
from shoal.plan.schedule.registry import check_losses, make_policy
from shoal.run.base import Backend
from shoal.spec import StudySpec
from shoal.study.devices import DeviceTracker
from shoal.study.hangs import HangDetector
from shoal.study.state import CoreConfig

__all__ = ["EngineConfig", "opaque_key"]


@dataclass
class EngineConfig:
    """Collaborators of the engine of one run, beside the specification of the study.

    Args:
        find: Finder of devices that users add while the study runs.
        monitor: Constructor of the device monitor; None: devices are not monitored.
        clock: Monotonic clock, in seconds.
        trains: As in `CoreConfig`.
    """

    fleet: Fleet
    policy: Policy
    history: History
    packer: ArrayPacker = field(default_factory=ArrayPacker)
    find: Finder = discover
    monitor: Callable[[Cluster], Monitor] | None = None
    clock: Callable[[], float] = time.monotonic
    trains: bool = True

    def core_config(self, journal: JournalView, algorithm: Algorithm, backend: Backend) -> CoreConfig:
        """Settings of the study's state machine."""
        spec = journal.spec
        # A back end without concurrency cannot kill a job.
        changeable = backend.concurrent and backend.elastic and not spec.opaque
        hang_detector = HangDetector(spec.hang_seconds) if backend.concurrent else None
        return CoreConfig(
            directory=journal.directory,
            spec=spec,
            study=journal.study,
            algorithm=algorithm,
            policy=self.policy,
            history=self.history,
            devices=DeviceTracker(self.fleet, self.find, hang_detector, journal.directory),
            packer=self.packer,
            key=partial(opaque_key, spec.opaque) if spec.opaque else None,
            elastic=backend.elastic,
            can_limit_compute=backend.can_limit_compute,
            teams=changeable,
            most_threads=min(threads(sys.maxsize), thread_limit(spec.settings)) if changeable else 0,
            trains=self.trains,
            jobs=StudyStatistics(journal).jobs(),
            seq=journal.last_seq(),
            find_policy=partial(_find_policy, spec),
        )


def _find_policy(spec: StudySpec, name: str) -> Policy:
    policy = make_policy(name, spec.objective)
    if spec.opaque:
        check_losses(policy, spec.loss_metric, begun=True)
    return policy


def opaque_key(structure: str, trial: Trial) -> FusionKey:
    """Fusion key of a trial that a user's program trains, which is known without building a model."""
    return FusionKey(structure, "", 1, opaque=True)
