"""What lies between the end of a job and the first line of the next one: five hundred jobs that do nothing.

Each is a trial of its own, on two CPU slots, with the journal on: a job of which the engine hears that it has ended
frees its slot; the engine notes it, asks the algorithm, plans with all that still wait, notes the start, and sends the
next job to the worker, which reads it and calls the runner. Clocks of all processes are the same monotonic one.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from shoal.algorithms.random import Random
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.core.space import Space, uniform
from shoal.core.trial import Report, TrialState
from shoal.host.discover import discover
from shoal.host.fleet import Fleet
from shoal.journal.view import JournalView
from shoal.journal.writer import Journal
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.packing.registry import make_packing
from shoal.plan.schedule.registry import make_policy
from shoal.run.base import Ended, Event, JobControl, Profiled, Reported, SignaturesFound, WorkerContext
from shoal.run.local import Local
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig
from shoal.study.engine import Engine

__all__ = ["Gap", "gaps", "run"]

KEY = FusionKey("nothing", "data", 32)
PROFILE = Profile({1: 1e-3}, 1, 0, 0, 1, compute=1.0, cores=1.0)


@dataclass(frozen=True)
class Gap:
    """Between two jobs of a slot.

    Args:
        heard: seconds from the first one's last line to when the engine heard of its end.
        decided: from then to when the back end was told to start the other.
        begun: from then to its first line.
    """

    heard: float
    decided: float
    begun: float

    @property
    def overhead(self) -> float:
        """Seconds of deciding and dispatching."""
        return self.decided + self.begun


@dataclass
class _Times:
    """When the engine heard and told, by job."""

    heard: dict[str, float] = field(default_factory=dict)
    told: dict[str, float] = field(default_factory=dict)


class _Timed(Local):
    """The local back end, with a clock at the engine's side of it."""

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context)
        self.times = _Times()

    def start(self, job: Job, device: Device) -> None:
        self.times.told[job.id] = time.monotonic()
        super().start(job, device)

    def poll(self, timeout: float) -> list[Event]:
        events = super().poll(timeout)
        now = time.monotonic()
        self.times.heard |= {event.job: now for event in events if isinstance(event, Ended)}
        return events


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """A runner whose first and last lines tell the time."""
    began = time.monotonic()
    match job.purpose:
        case Purpose.SIGNATURE:
            yield SignaturesFound(job.id, {member.trial.number: KEY for member in job.members})
        case Purpose.PROFILE:
            yield Profiled(job.id, job.arrays[0].key, PROFILE)
        case Purpose.TRAIN:
            (member,) = job.members
            metrics = {"loss": member.trial.config["x"], "began": began, "ended": time.monotonic()}
            yield Reported(job.id, (Report(member.trial.number, 1, metrics, 0.0, TrialState.PAUSED),))


def gaps(starts: int, policy: str, folder: Path) -> list[Gap]:
    """Of so many starts, each after a job on the same slot."""
    cluster = discover("cpu:2")
    slots = len(list(cluster))
    algorithm = Random(starts + slots, epochs=1)
    algorithm.bind(Space({"x": uniform(0.0, 1.0)}), metric="loss", mode="min", seed=0, data_seed=0)
    worker_context = WorkerContext(folder / "study", b"", runner="placed.dispatch:run")
    spec = StudySpec(metric="loss", mode="min", fuse=False)
    with closing(Journal.create(worker_context.directory, spec, task=b"", algorithm=b"")) as log:
        with closing(_Timed(worker_context)) as backend:
            history = History(folder / "history.sqlite")
            config = EngineConfig(Fleet(cluster), make_policy(policy), history, ArrayPacker(make_packing("none")))
            engine = Engine(log, algorithm, backend, config)
            engine.begin()
            engine.run()
        return _read(log, backend.times)


def _read(journal: JournalView, times: _Times) -> list[Gap]:
    said = {row.job: row.metrics for row in journal.trials()}
    before: dict[str, str] = {}
    found = []
    for job in journal.jobs():
        if job.purpose is not Purpose.TRAIN:
            continue
        if job.device in before:
            last = before[job.device]
            found.append(
                Gap(
                    times.heard[last] - said[last]["ended"],
                    times.told[job.id] - times.heard[last],
                    said[job.id]["began"] - times.told[job.id],
                )
            )
        before[job.device] = job.id
    return found
