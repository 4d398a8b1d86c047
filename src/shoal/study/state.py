"""The state of a study, which only its events change."""

from collections import Counter
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from shoal.algorithms.base import Algorithm
from shoal.core.array import FusionKey
from shoal.core.cause import Cause
from shoal.core.command import Step
from shoal.core.device import Cluster, Device
from shoal.core.errors import PolicyError
from shoal.core.job import Job, job_id
from shoal.core.objective import Objective
from shoal.core.trial import Trial
from shoal.cost.costs import Costs
from shoal.cost.history import History
from shoal.planner.cache import PlanCache
from shoal.planner.grouping import Grouping
from shoal.planner.job_tracker import JobTracker
from shoal.planner.plan_input import PlanInput
from shoal.planner.shares import CrowdingMeter
from shoal.schedule.base import Policy
from shoal.study.devices import DeviceTracker
from shoal.study.event import Shutdown
from shoal.study.fleet import Fleet
from shoal.study.retries import RetryPolicy
from shoal.study.signatures import SignatureRegistry
from shoal.study.trials import TrialTable

__all__ = ["MIN_POLL_SECONDS", "CoreConfig", "RunningJobs", "StudyState"]

MIN_POLL_SECONDS = 0.005
"""Shortest time between two polls for events, even if the next plan is due."""


def _no_other(name: str) -> Policy:
    raise PolicyError(f"there is no policy {name!r} in this study; it has only its own")


@dataclass
class CoreConfig:
    """Settings and collaborators of a study's state machine.

    Args:
        study: Values of the study as its journal has them now; read only.
        replan_seconds: Seconds until the next plan, if nothing has changed but the progress of trials.
        key: Function from a trial to its fusion key, if keys are known without building models.
        loss: Reported value that policies take as the loss of a function or command; None if there is none.
        find_policy: Function from a name to a policy; PolicyError if there is none. The default has no policies.
        teams: Whether a job may have several devices, which takes jobs that run at once and receive changes.
        trains: Whether the study trains; else it ends once all signatures and profiles are known, see `MeasureOnly`.
    """

    directory: Path
    study: Mapping[str, Any]
    objectives: Sequence[Objective]
    algorithm: Algorithm
    policy: Policy
    history: History
    devices: DeviceTracker
    retries: int
    grouping: Grouping
    fuse: bool = True
    replan_seconds: float = 1.0
    key: Callable[[Trial], FusionKey] | None = None
    elastic: bool = True
    jobs: int = 0
    loss: str | None = None
    find_policy: Callable[[str], Policy] = _no_other
    limits_shares: Callable[[Device], bool] = lambda device: False
    teams: bool = False
    trains: bool = True


class RunningJobs(Mapping[str, tuple[Job, Device]]):
    """Id of each job that holds a device -> the job and the device, oldest first.

    A job on several devices is a leader on the first one, and a helper (`Purpose.ASSIST`) on each of the others.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.helpers: dict[str, set[str]] = {}
        """Id of a job, which may have ended -> ids of the running jobs that assist it."""
        self._all: dict[str, tuple[Job, Device]] = {}
        self._on: Counter[str] = Counter()

    def __getitem__(self, job: str) -> tuple[Job, Device]:
        return self._all[job]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> ValuesView[tuple[Job, Device]]:
        """The jobs with their devices, without a look-up of each."""
        return self._all.values()

    def items(self) -> ItemsView[str, tuple[Job, Device]]:
        """As `values`, with the ids."""
        return self._all.items()

    def begin(self, job: Job, device: Device) -> None:
        """Add a job that starts on a device."""
        self._all[job.id] = (job, device)
        self._on[device.name] += 1
        if job.assists:
            self.helpers.setdefault(job.assists, set()).add(job.id)
        self.changes += 1

    def change(self, job: Job) -> None:
        """Update a job whose arrays or reservation have changed."""
        self._all[job.id] = (job, self._all[job.id][1])

    def end(self, job: str) -> tuple[Job, Device]:
        """Remove a job that has left its device."""
        ended, device = self._all.pop(job)
        self._on[device.name] -= 1
        if ended.assists:
            self.helpers[ended.assists].remove(job)
            if not self.helpers[ended.assists]:
                del self.helpers[ended.assists]
        self.changes += 1
        return ended, device

    def on(self, device: str) -> int:
        """Number of jobs that hold a device."""
        return self._on[device]


class StudyState:
    """State of a study. Only functions of `shoal.study` change it, and only during a step.

    Attributes:
        crowding: Epochs of jobs alone and on shared devices.
        wake: Latest time of the next plan; inf: only after a change.
        last_plan: Inputs of the last plan, if the plan started nothing; otherwise None.
        last_plan_time: Time of the last plan, in seconds.
        paused: Whether a user has paused the study, so that no trials are requested or placed.
        devices_released: Whether a paused study has released its devices.
        end_requested: Whether a user or a trial has ended the study; its jobs may still be running.
        ended: Whether a study that a user or a trial has ended has no job any more.
        ended_because: Why a trial has ended the study; "" if none has.
        shutdown: The event that shuts down the study; None before.
        teams: Id of each job on several devices -> ids of the helpers that it was told to train with.
        dismissed: Ids of the running helpers that were asked to stop.
        stopped: Common cause of failure of the first trials, which ends the study; None before.
        unsaved_jobs: Texts on the jobs that could not save their trials during shutdown.
    """

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.step = Step()
        self.trials = TrialTable()
        self.running = RunningJobs()
        self.signatures = SignatureRegistry(self.trials, {device.kind for _, device in self.fleet.found})
        self.costs = Costs(config.history, config.study.get("task", ""))
        self.tracker = JobTracker()
        self.cache = PlanCache()
        self.crowding = CrowdingMeter()
        self.retries = RetryPolicy(self.trials, config.retries)
        self.wake = inf
        self.last_plan: object = None
        self.last_plan_time = 0.0
        self.paused = self.devices_released = self.end_requested = self.ended = False
        self.ended_because = ""
        self.shutdown: Shutdown | None = None
        self.stopped: Cause | None = None
        self.teams: dict[str, frozenset[str]] = {}
        self.dismissed: set[str] = set()
        self.requests: set[str] = set()
        self.unsaved_jobs: list[str] = []
        self.next_job = config.jobs + 1

    @property
    def fleet(self) -> Fleet:
        """Devices of the study."""
        return self.config.devices.fleet

    @property
    def finished(self) -> bool:
        """Whether the algorithm, or a user, has ended the study and no retried trial is open."""
        return (self.config.algorithm.finished or self.ended) and not self.trials.retrying()

    @property
    def on_hold(self) -> bool:
        """Whether no job may run because of a user's request."""
        return self.paused or (self.end_requested and not self.ended)

    def is_leaving(self, job: str) -> bool:
        """Whether a running job was asked to leave its device, or is to be killed."""
        return job in self.tracker.leaving or job in self.config.devices.ending

    def idle(self) -> list[Device]:
        """Healthy devices without a job."""
        return [device for _, device in self.fleet.cluster if device.healthy and not self.running.on(device.name)]

    @property
    def has_wake_time(self) -> bool:
        """Whether the next plan is due at a time, and not only after an event."""
        return self.wake < inf

    def wait_seconds(self, now: float, max_seconds: float) -> float:
        """Return the seconds to wait for events, at most `max_seconds`."""
        return min(max_seconds, max(MIN_POLL_SECONDS, self.wake - now))

    def plan_input(self, cluster: Cluster, now: float) -> PlanInput:
        """Input of a plan of this study, with nothing that waits or runs."""
        config, trials = self.config, self.trials
        return PlanInput(
            config.policy,
            self.costs,
            cluster,
            now,
            history=self.tracker,
            next_job=self.next_job,
            grouping=config.grouping,
            fuse=config.fuse,
            elastic=config.elastic,
            teams=config.teams,
            trained_epochs=self.signatures.trained,
            limits_shares=config.limits_shares,
            alone=trials.train_alone,
            limits=trials.limits,
            unmeasurable=self.signatures.unmeasurable,
            groups=trials.groups,
            arrived=trials.arrived,
        )

    def new_id(self) -> str:
        """A new id of a job, unique in the study."""
        self.next_job += 1
        return job_id(self.next_job - 1)
