"""Where a study stands: all that its events change."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.algorithms.base import Algorithm
from shoal.core.array import FusionKey
from shoal.core.cause import Cause
from shoal.core.command import Step
from shoal.core.device import Device
from shoal.core.errors import PolicyError
from shoal.core.job import Job
from shoal.core.objective import Objective
from shoal.core.trial import Trial
from shoal.cost.history import History
from shoal.cost.store import ProfileStore
from shoal.planner.grouping import Grouping
from shoal.planner.job_tracker import JobTracker
from shoal.planner.planner import Planner
from shoal.schedule.base import Policy
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.study.devices import DeviceTracker
from shoal.study.event import WindUp
from shoal.study.fleet import Fleet
from shoal.study.interference import InterferenceTracker
from shoal.study.retries import RetryPolicy
from shoal.study.signatures import SignatureRegistry
from shoal.study.trials import TrialTable

__all__ = ["HORIZON", "Given", "RunningJobs", "StudyState"]

HORIZON = 10_000
"""For so many trials is planned in a turn at least: the first that wait, which are all but in large studies."""


def _no_other(name: str) -> Policy:
    raise PolicyError(f"there is no policy {name!r} in this study; it has only its own")


@dataclass
class Given:
    """What the state machine of a study is given.

    Args:
        directory: of the study; users are told of it.
        study: what the study is, as its journal has it now; read only.
        objectives: what trials are compared by.
        algorithm: says what to try.
        policy: decides which job runs where.
        history: profiles of jobs, across studies.
        devices: those that there are.
        retries: how often a trial whose job failed is tried again.
        tuner: finds how many times the compute of devices may be promised.
        grouping: decides which arrays share a process.
        fuse: whether trials may share an array.
        replan_seconds: where nothing has changed but how far trials are, the planner is asked again after these.
        key: what trials agree on that can share an array, where that is known without a look at their models.
        elastic: whether the members of a running job can change.
        jobs: that the study has started so far.
        find_policy: the policy of a name; PolicyError if there is none. By default there is no other than `policy`.
    """

    directory: Path
    study: Mapping[str, Any]
    objectives: Sequence[Objective]
    algorithm: Algorithm
    policy: Policy
    history: History
    devices: DeviceTracker
    retries: int
    tuner: OversubscriptionTuner
    grouping: Grouping
    fuse: bool = True
    replan_seconds: float = 1.0
    key: Callable[[Trial], FusionKey] | None = None
    elastic: bool = True
    jobs: int = 0
    find_policy: Callable[[str], Policy] = _no_other


class RunningJobs(Mapping[str, tuple[Job, Device]]):
    """Id of each job that holds a device -> the job and the device, oldest first."""

    def __init__(self) -> None:
        self.changes = 0
        """How often a job has begun or ended."""
        self._all: dict[str, tuple[Job, Device]] = {}
        self._on: Counter[str] = Counter()

    def __getitem__(self, job: str) -> tuple[Job, Device]:
        return self._all[job]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, job: Job, device: Device) -> None:
        """A job holds a device from now on."""
        self._all[job.id] = (job, device)
        self._on.update((device.name, *job.helpers))
        self.changes += 1

    def change(self, job: Job) -> None:
        """A job has other arrays now, or is promised something else."""
        self._all[job.id] = (job, self._all[job.id][1])

    def end(self, job: str) -> tuple[Job, Device]:
        """A job holds its device no more."""
        ended = self._all.pop(job)
        self._on.subtract((ended[1].name, *ended[0].helpers))
        self.changes += 1
        return ended

    def on(self, device: str) -> int:
        """How many jobs a device holds, those of which it is a helper included."""
        return self._on[device]


class StudyState:
    """Where a study stands. Only the functions of this room change it, and only while a step is taken.

    Args:
        given: what it works with.

    Attributes:
        step: what the event that is happening leads to.
        trials: where they stand.
        running: id of each job that holds a device -> the job and the device.
        signatures: which trials are of one structure.
        profiles: what is known of costs.
        tracker: what jobs have been through.
        planner: places what waits.
        interference: how jobs that share a device slow each other down.
        retries: judges failures.
        horizon: for so many trials is planned in a turn at least, of those that wait the first ones.
        placed: what the last plan depended on, if nothing came of it.
        placed_at: when that was.
        paused: whether a user has paused the study: nothing is asked for or placed.
        freed: whether a paused study has let go of its devices.
        ended: whether a user has ended the study; it is not over before its jobs have saved their trials.
        over: whether that is done.
        ending: how the study is wound up; None while it goes on.
        stopped: what its first trials have failed of, all alike; None while it goes on.
        requests: names of those of users that were carried out or refused.
        unsaved: jobs that could not save their trials while the study was wound up, in words.
    """

    def __init__(self, given: Given) -> None:
        self.given = given
        self.step = Step()
        self.trials = TrialTable()
        self.running = RunningJobs()
        self.signatures = SignatureRegistry({device.kind for _, device in self.fleet.given})
        self.profiles = ProfileStore(given.history, given.study.get("task", ""))
        self.tracker = JobTracker(self.profiles.estimate)
        self.planner = self.make_planner(self.new_id, self.tracker)
        self.interference = InterferenceTracker(given.tuner)
        self.retries = RetryPolicy(self.trials, given.retries)
        self.horizon = HORIZON
        self.placed: object = None
        self.placed_at = 0.0
        self.paused = self.freed = self.ended = self.over = False
        self.ending: WindUp | None = None
        self.stopped: Cause | None = None
        self.requests: set[str] = set()
        self.unsaved: list[str] = []
        self._jobs = given.jobs

    @property
    def fleet(self) -> Fleet:
        """The devices."""
        return self.given.devices.fleet

    @property
    def finished(self) -> bool:
        """Whether all is decided."""
        return (self.given.algorithm.finished or self.over) and not self.trials.retrying()

    @property
    def rests(self) -> bool:
        """Whether nothing is to run, as a user wants it."""
        return self.paused or (self.ended and not self.over)

    def idle(self) -> list[Device]:
        """Devices that hold no job and may have one."""
        return [device for _, device in self.fleet.cluster if device.healthy and not self.running.on(device.name)]

    def make_planner(self, new_id: Callable[[], str], tracker: JobTracker | None = None) -> Planner:
        """A planner that knows what this study knows of costs."""
        mine, known, done = self.given, self.profiles.estimate, self.signatures.trained
        return Planner(mine.policy, known, new_id, mine.elastic, mine.grouping, mine.fuse, done, tracker)

    def new_id(self) -> str:
        """Of a job; no other job of the study has it."""
        self._jobs += 1
        return f"job-{self._jobs:05d}"
