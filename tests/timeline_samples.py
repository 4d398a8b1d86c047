"""Studies that look as if they had been run, for reports."""

import random
from collections.abc import Sequence
from pathlib import Path

from support.recorded import RecordedJournal

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Job, Purpose
from shoal.core.space import Space, loguniform
from shoal.core.trial import Budget, Report, Trial, TrialGroup, TrialState
from shoal.spec import StudySpec

GB = 10**9


class Clock:
    """Time that somebody else sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def machines(devices: int, kind: str = "NVIDIA H200") -> Cluster:
    names = [f"cuda:{index}" for index in range(devices)]
    return Cluster((Node("one", 4 * devices, tuple(Device(name, kind, 100 * GB, cores=4) for name in names)),))


def training(
    name: str, numbers: Sequence[int], structures: Sequence[str] = ("a",), demand: Demand | None = None
) -> Job:
    """A job whose first structures have a trial each, and whose last has the rest."""
    *first, last = range(len(structures))
    shares = [*([numbers[place]] for place in first), numbers[last:]]
    arrays = [
        Array(FusionKey(structure, "d", 32), tuple(Member(trial(number), 0, 3) for number in share))
        for structure, share in zip(structures, shares, strict=True)
    ]
    return Job(name, tuple(arrays), demand=demand)


def trial(number: int) -> Trial:
    return Trial(number, {"lr": 0.1 / (number + 1)}, number, 0)


def pretend(
    directory: Path,
    *,
    devices: int,
    jobs: int,
    side_by_side: int = 1,
    structures: int = 3,
    failing: float = 0.0,
    running: bool = False,
    seed: int = 0,
) -> RecordedJournal:
    """The journal, open, of a study with so many jobs of random lengths.

    Args:
        directory: of the study.
        devices: so many.
        jobs: that train, beside a signature job and a measurement on each device.
        side_by_side: jobs that a device takes at once.
        structures: among which each job has one, or two.
        failing: part of the jobs that fail.
        running: whether the last ones have not ended.
        seed: of lengths and failures.
    """
    chance, clock = random.Random(seed), Clock()
    names = [f"{chance.getrandbits(64):016x}" for _ in range(structures)]
    events: list[tuple[float, int, str, object]] = []
    free = [(1000.0, f"cuda:{index % devices}") for index in range(devices * side_by_side)]
    order = 0
    for index in range(2 * devices + jobs):
        begin, device = min(free)
        free.remove((begin, device))
        purpose = Purpose.SIGNATURE if index < devices else Purpose.PROFILE if index < 2 * devices else Purpose.TRAIN
        length = chance.uniform(1, 4) if purpose is not Purpose.TRAIN else chance.lognormvariate(2.5, 1.0)
        first = 8 * index
        demand = Demand(min(1.0, chance.uniform(0.3, 1.1) / side_by_side), 90 * GB // side_by_side, 1.0, length)
        some = chance.sample(names, min(structures, 1 + (chance.random() < 0.2)))
        job = training(f"job-{index + 1:05d}", range(first, first + chance.randrange(len(some), 9)), some, demand)
        if purpose is not Purpose.TRAIN:
            job = Job(job.id, job.arrays[:1], purpose)
        fails = purpose is Purpose.TRAIN and chance.random() < failing
        events += [(begin, order, "start", (job, device)), (begin + length, order + 1, "end", (job, fails))]
        order += 2
        free.append((begin + length + 0.05, device))
    space = Space({"lr": loguniform(1e-6, 1.0)}).to_json()
    study = StudySpec(metric="accuracy", mode="max", space=space)
    journal = RecordedJournal.create(directory, study, task=b"", algorithm=b"", clock=clock)
    stop = max(time for time, *_ in events) * 0.8 + 200 if running else float("inf")
    with journal.transaction():
        journal.record_devices(machines(devices))
        for time, _, what, given in sorted(events, key=lambda event: event[:2]):
            if time > stop:
                break
            clock.now = time
            if what == "start":
                job, device = given
                journal.record_proposal(9, [TrialGroup(tuple(member.trial for member in job.members), Budget(3))])
                journal.record_job_start(job, device)
            else:
                job, fails = given
                _end(journal, job, fails, chance)
    return journal


def _end(journal: RecordedJournal, job: Job, fails: bool, chance: random.Random) -> None:
    if fails:
        outcome = chance.choice(["out of memory", "crashed", "raised"])
        told = {
            "crashed": "the process was killed by SIGKILL",
            "raised": "Traceback ...\nValueError: <no> such & thing",
        }
        journal.record_job_end(job.id, outcome, f"{told.get(outcome, 'too much')}\nLog: logs/{job.id}.log", failed=True)
        return
    if job.purpose is Purpose.TRAIN:
        good = 1 - 1 / (3 + chance.random() * (1 + job.members[0].trial.number) ** 0.5)
        journal.record_reports(
            job.id, [Report(m.trial.number, 3, {"accuracy": good}, 1.0, TrialState.COMPLETE) for m in job.members]
        )
    journal.record_job_end(job.id, "finished", failed=False)
