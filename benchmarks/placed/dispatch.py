"""Time of deciding and dispatching between two jobs of a slot: hundreds of jobs that do nothing.

Each is a trial of its own, on two CPU slots, with the journal on. A job that has ended frees its slot; the engine notes
its end, asks the algorithm, plans with all that still wait, notes the start, and sends the next job to the worker,
which reads it and calls the runner.
"""

import time
from collections.abc import Iterator
from contextlib import closing
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
from shoal.run.base import Event, JobControl, Profiled, Reported, SignaturesFound, WorkerContext
from shoal.run.local import Local
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig
from shoal.study.engine import Engine

__all__ = ["gaps", "run"]

KEY = FusionKey("nothing", "data", 32)
PROFILE = Profile({1: 1e-3}, 1, 0, 0, 1, compute=1.0, cores=1.0)


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Report when the first line of the runner ran."""
    began = time.time()
    match job.purpose:
        case Purpose.SIGNATURE:
            yield SignaturesFound(job.id, {member.trial.number: KEY for member in job.members})
        case Purpose.PROFILE:
            yield Profiled(job.id, job.arrays[0].key, PROFILE)
        case Purpose.TRAIN:
            (member,) = job.members
            metrics = {"loss": member.trial.config["x"], "began": began}
            yield Reported(job.id, (Report(member.trial.number, 1, metrics, 0.0, TrialState.PAUSED),))


def gaps(starts: int, policy: str, folder: Path) -> list[float]:
    """Return the seconds from when the engine noted the end of a job to the first line of the next one of its slot."""
    cluster = discover("cpu:2")
    algorithm = Random(starts + len(list(cluster)), epochs=1)
    algorithm.bind(Space({"x": uniform(0.0, 1.0)}), metric="loss", mode="min", seed=0, data_seed=0)
    worker_context = WorkerContext(folder / "study", b"", runner="placed.dispatch:run")
    spec = StudySpec(metric="loss", mode="min", fuse=False)
    with closing(Journal.create(worker_context.directory, spec, task=b"", algorithm=b"")) as log:
        with closing(Local(worker_context)) as backend:
            history = History(folder / "history.sqlite")
            config = EngineConfig(Fleet(cluster), make_policy(policy), history, ArrayPacker(make_packing("none")))
            engine = Engine(log, algorithm, backend, config)
            engine.begin()
            engine.run()
        return _read(log)


def _read(journal: JournalView) -> list[float]:
    began = {row.job: row.metrics["began"] for row in journal.trials()}
    ended: dict[str, float] = {}
    found = []
    for job in journal.jobs():
        if job.purpose is Purpose.TRAIN and job.ended is not None:
            if job.device in ended:
                found.append(began[job.id] - ended[job.device])
            ended[job.device] = job.ended
    return found
