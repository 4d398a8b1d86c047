"""The input of a plan, and its result."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from shoal.core.array import Array, FusionKey
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device
from shoal.core.job import Job
from shoal.core.trial import TrialGroup
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.costs import Costs
from shoal.plan.job_tracker import JobTracker, PreemptionRequest
from shoal.plan.schedule.base import Policy
from shoal.plan.waiting import OutOfMemoryLimit, WaitingClass

__all__ = ["Placement", "PlanInput"]


@dataclass(frozen=True)
class PlanInput:
    """All that a plan follows from.

    Mappings, sets and costs may be those of the running study, which changes them after the plan.

    Args:
        policy: Places the jobs.
        costs: What trials of a key cost on a kind of device. A plan uses what was cached for its `version` only.
        cluster: All devices; only healthy ones get jobs.
        now: Time in seconds, for the policy.
        waiting: Classes of waiting trials, first in the queue first, without those of suspended jobs.
        running: All jobs that hold devices, oldest first, with their present members.
        history: History of all jobs; its suspended jobs have their present members.
        next_job: Number of the next job that starts.
        packer: Packs arrays into jobs.
        fuse: Whether an array may have several members.
        max_concurrent: Most trials that train at a time; None: as many as the devices take.
        elastic: Whether the members of a running array can change, and can be at different epochs.
        teams: Whether a job may have several devices.
        trained_epochs: Epochs that trials of a key have trained.
        can_limit_compute: Whether the processes of jobs on a device can be limited to parts of its compute.
        own_job_trials: Numbers of trials, also of running ones, that failed together with others.
        oom_limits: Number of a trial, also of a running one, that ran out of memory -> its limit.
        unmeasurable: Pairs of key and kind of device whose profile job failed; it is not repeated.
        trial_groups: Number of a trial -> its TrialGroup.
        arrived: Number of a waiting trial -> time at which it began to wait, in seconds.
    """

    policy: Policy
    costs: Costs
    cluster: Cluster
    now: float = 0.0
    waiting: Sequence[WaitingClass] = ()
    running: Sequence[tuple[Job, Device]] = ()
    history: JobTracker = field(default_factory=JobTracker)
    next_job: int = 1
    packer: ArrayPacker = field(default_factory=ArrayPacker)
    fuse: bool = True
    max_concurrent: int | None = None
    elastic: bool = True
    teams: bool = False
    trained_epochs: Callable[[FusionKey], int] = lambda key: 0
    can_limit_compute: Callable[[Device], bool] = lambda device: False
    own_job_trials: AbstractSet[int] = frozenset()
    oom_limits: Mapping[int, OutOfMemoryLimit] = field(default_factory=dict)
    unmeasurable: AbstractSet[tuple[FusionKey, str]] = frozenset()
    trial_groups: Mapping[int, TrialGroup] = field(default_factory=dict)
    arrived: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """The result of a plan: the jobs to start and to change, and the reasons why other trials wait.

    Args:
        starts: Jobs to start, with their devices; helpers follow their leaders. Trials of a profile job still wait.
        refusals: Number of the trial -> reason, for waiting trials that are in no training job of `starts` and join no
            running job. Trials behind these have none; see `CutArrays`.
        joins: Id of a running job -> arrays whose members join it.
        preemptions: Id of a running job -> request that it leaves its device.
        reservations: Id of a running job -> its new reservation, where that changes, as by another share.
        history: History of all jobs once this is carried out.
        next_job: Number of the next job that starts after these.
        wake: Latest time of the next plan, in seconds; inf: only after a change.
        held_back: Whether trials wait because `max_concurrent` trials train.
    """

    starts: tuple[tuple[Job, Device], ...]
    refusals: Mapping[int, str]
    joins: Mapping[str, tuple[Array, ...]]
    preemptions: Mapping[str, PreemptionRequest]
    reservations: Mapping[str, Demand]
    history: JobTracker
    next_job: int
    wake: float
    held_back: bool = False
