"""The state of a study, which only its events change."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from shoal.algorithms.base import Algorithm
from shoal.core.array import FusionKey
from shoal.core.command import Step
from shoal.core.device import Cluster, Device
from shoal.core.errors import PolicyError
from shoal.core.hypervolume import REFERENCE_KEY
from shoal.core.rows import ReportRow
from shoal.core.trial import Report, Trial
from shoal.host.fleet import Fleet
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cache import PlanCache
from shoal.plan.cost.costs import Costs
from shoal.plan.cost.history import History
from shoal.plan.job_tracker import JobTracker
from shoal.plan.plan_input import PlanInput
from shoal.plan.schedule.base import Policy
from shoal.plan.shares import CrowdingMeter
from shoal.spec import StudySpec
from shoal.study.checks import Checks
from shoal.study.devices import DeviceTracker
from shoal.study.hypervolume_reference import ReferenceTracker
from shoal.study.improvement import BestTracker, ImprovementTracker
from shoal.study.jobs import RunningJobs
from shoal.study.lifecycle import Lifecycle
from shoal.study.retention import Retention
from shoal.study.retries import RetryPolicy
from shoal.study.signatures import SignatureRegistry
from shoal.study.trials import TrialTable

__all__ = ["MIN_POLL_SECONDS", "CoreConfig", "StudyState"]

MIN_POLL_SECONDS = 0.005
"""Shortest time between two polls for events, even if the next plan is due."""


def _no_other(name: str) -> Policy:
    raise PolicyError(f"there is no policy {name!r} in this study; it has only its own")


@dataclass
class CoreConfig:
    """Settings and collaborators of a study's state machine.

    Args:
        study: Values of the study that change, as its journal has them now; read only.
        jobs: Number of jobs that the study has had.
        seq: Number of its proposals, reports and interventions.
        replan_seconds: Seconds until the next plan, if nothing has changed but the progress of trials.
        key: Function from a trial to its fusion key, if keys are known without building models.
        find_policy: Function from a name to a policy; PolicyError if there is none. The default has no policies.
        teams: Whether a job may have several devices, which takes jobs that run at once and receive changes.
        most_threads: Threads that a training job on a CPU may have at most, with those of idle slots; 0: of its own.
        trains: Whether the study trains; else it ends once all signatures and profiles are known, see `MeasureOnly`.
    """

    directory: Path
    spec: StudySpec
    study: Mapping[str, Any]
    algorithm: Algorithm
    policy: Policy
    history: History
    devices: DeviceTracker
    packer: ArrayPacker
    replan_seconds: float = 1.0
    key: Callable[[Trial], FusionKey] | None = None
    elastic: bool = True
    jobs: int = 0
    seq: int = 0
    find_policy: Callable[[str], Policy] = _no_other
    can_limit_compute: Callable[[Device], bool] = lambda device: False
    teams: bool = False
    most_threads: int = 0
    trains: bool = True


class StudyState:
    """State of a study. Only functions of `shoal.study` change it, and only during a step.

    Attributes:
        step: The step that is being made.
        crowding: Epochs of jobs alone and on shared devices.
        wake: Latest time of the next plan; inf: only after a change.
        last_plan: Inputs of the last plan, if the plan started nothing; otherwise None.
        last_plan_time: Time of the last plan, in seconds.
        requests: Names of the requests whose results are recorded.
        unsaved_jobs: Texts on the jobs that could not save their trials during shutdown.
    """

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.step = Step()
        self.trials = TrialTable(config.spec.objectives, config.spec.bounds, config.spec.of_best)
        self.running = RunningJobs(config.jobs + 1)
        self.lifecycle = Lifecycle(config.study, config.spec.timeout if config.trains else None)
        self.best = BestTracker(config.spec, self.trials)
        self.improvement = ImprovementTracker(config.spec)
        self.checks = Checks()
        self.signatures = SignatureRegistry(self.trials, {device.kind for _, device in self.fleet.found})
        self.costs = Costs(config.history, config.spec.task)
        self.tracker = JobTracker()
        self.cache = PlanCache()
        self.crowding = CrowdingMeter()
        self.retries = RetryPolicy(self.trials, config.spec.retries)
        self.retention = Retention(config.study.get("keep", config.spec.keep), config.study.get("pins", ()))
        self.wake = inf
        self.last_plan: object = None
        self.last_plan_time = 0.0
        self.requests: set[str] = set()
        self.unsaved_jobs: list[str] = []
        self._seq = config.seq
        is_fixed = REFERENCE_KEY in config.study
        self._reference = ReferenceTracker(config.spec.objectives, self.trials, is_fixed=is_fixed)

    @property
    def fleet(self) -> Fleet:
        """Devices of the study."""
        return self.config.devices.fleet

    @property
    def finished(self) -> bool:
        """Whether the algorithm, or a user, has ended the study and no retried trial is open."""
        return (self.config.algorithm.finished or self.lifecycle.ended) and not self.trials.retrying()

    def is_leaving(self, job: str) -> bool:
        """Whether a running job was asked to leave its device, or is to be killed."""
        asked = job in self.tracker.leaving or self.config.devices.has_stopped(job)
        return asked or self.running.killed(job) is not None

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
        config, trials, left = self.config, self.trials, self.lifecycle.time_left
        return PlanInput(
            config.policy if left is None else config.policy.with_deadline(now + left),
            self.costs,
            cluster,
            now,
            history=self.tracker,
            next_job=self.running.next_job,
            packer=config.packer,
            fuse=config.spec.fuse,
            max_concurrent=config.spec.max_concurrent,
            elastic=config.elastic,
            teams=config.teams,
            trained_epochs=self.signatures.trained,
            can_limit_compute=config.can_limit_compute,
            own_job_trials=trials.own_job_trials,
            oom_limits=trials.oom_limits,
            unmeasurable=self.signatures.unmeasurable,
            trial_groups=trials.trial_groups,
            arrived=trials.arrived,
        )

    def next_seq(self) -> int:
        """The next place in the one order of proposals, reports and interventions."""
        self._seq += 1
        return self._seq

    def write_reports(self, job: str, reports: Collection[Report]) -> None:
        """Write new reports of a job; `job` is "" if the study itself fails a trial."""
        for report in reports:
            self.step.write(ReportRow(self.next_seq(), self.step.time, job, report, self.best.after(report.trial)))
        self.step.write(*self._reference.rows({report.trial for report in reports}))

    def write_changes(self) -> None:
        """Write the rows that the step has changed."""
        self.step.write(*self.trials.take_rows(), *self.running.take_rows(), *self.lifecycle.take_rows())
