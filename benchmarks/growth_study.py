"""Made-up studies for `growth.py`: journals as studies of functions leave them, written by the journal's own writer."""

import pickle
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from shoal.algorithms.base import Algorithm
from shoal.algorithms.random import Random
from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.event import Outcome
from shoal.core.job import Job
from shoal.core.space import Space, choice, loguniform
from shoal.core.trial import Report, Trial, TrialState
from shoal.spec import StudySpec

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.recorded import RecordedJournal

EPOCHS = 4
STRUCTURE = "opaque train 0123456789abcdef"
SPACE = Space({"lr": loguniform(1e-5, 1e-1), "width": choice([64, 128, 256]), "optimizer": choice(["sgd", "adam"])})
TRACEBACK = "Traceback (most recent call last):\n" + '  File "train.py", line 12, in f\n' * 12 + "ValueError: trial {}"
BEGAN = 1.7e9
"""Seconds since 1970."""


def cluster_of(devices: int) -> Cluster:
    """Nodes of eight GPUs."""
    found = [Device(f"gpu:{number}", "gpu", 80 * 10**9, cores=8) for number in range(devices)]
    nodes = (Node(f"node-{first // 8}", 64, tuple(found[first : first + 8])) for first in range(0, devices, 8))
    return Cluster(tuple(nodes))


def study_spec() -> StudySpec:
    """The specification of a study of a function."""
    return StudySpec(
        task="train", opaque=STRUCTURE, space=SPACE.to_json(), metric="loss", mode="min", hang_seconds=60.0
    )


def bound(algorithm: Algorithm) -> Algorithm:
    """Return an algorithm bound to the problem of the study."""
    algorithm.bind(SPACE, metric="loss", mode="min", seed=0, data_seed=0)
    return algorithm


def make_study(directory: Path, trials: int, devices: int = 8, epochs: int = EPOCHS) -> None:
    """Write the journal of a study whose engine was killed: half of the trials have ended, one in fifty of them failed.

    Each trial has a job of its own. As many trials run as there are devices, but not more than a tenth of all.
    """
    moments = count(1)
    algorithm = bound(Random(trials, epochs))
    with RecordedJournal.create(
        directory,
        study_spec(),
        task=b"",
        algorithm=pickle.dumps(Random(trials, epochs)),
        clock=lambda: BEGAN + next(moments) / 100,
    ) as journal:
        groups = algorithm.next_groups(devices)
        proposed = [trial for group in groups for trial in group.trials]
        names = [device.name for _, device in cluster_of(devices)]
        begun = (trials + 1) // 2
        with journal.transaction():
            journal.record_devices(cluster_of(devices))
            journal.record_proposal(devices, groups)
            for place, trial in enumerate(proposed[:begun]):
                running = begun - place <= min(devices, trials // 10)
                _train(journal, algorithm, trial, names[place % devices], epochs, running)
            waiting = {trial.number: "all devices are busy" for trial in proposed[begun:]}
            journal.record_waiting_reasons(waiting)


def _train(
    journal: RecordedJournal, algorithm: Algorithm, trial: Trial, device: str, epochs: int, running: bool
) -> None:
    job = Job(
        f"job-{trial.number:06d}",
        (Array(FusionKey(STRUCTURE, "", 1, order=trial.number, opaque=True), (Member(trial, 0, epochs),)),),
        demand=Demand(1.0, 10**9, 1.0, 1.0),
    )
    journal.record_job_start(job, device)
    if trial.number % 50 == 49:
        reason = TRACEBACK.format(trial.number)
        reports = [Report(trial.number, 0, state=TrialState.FAILED, reason=reason)]
    else:
        reports = list(reports_of(trial, epochs - running))
    decisions = []
    for report in journal.record_reports(job.id, reports):
        decisions += algorithm.observe(report)
    journal.record_decisions(decisions)
    if not running:
        failed = reports[-1].state is TrialState.FAILED
        outcome, message = (Outcome.CRASHED, reports[-1].reason) if failed else (Outcome.FINISHED, "")
        journal.record_job_end(job.id, outcome, message, failed=failed)


def reports_of(trial: Trial, epochs: int, target: int = EPOCHS) -> Iterator[Report]:
    """The reports of the first epochs of a trial; it is PAUSED at its target."""
    for epoch in range(1, epochs + 1):
        state = TrialState.PAUSED if epoch == target else TrialState.RUNNING
        yield Report(trial.number, epoch, _metrics(trial, epoch), 0.1, state, checkpoint=f"{epoch:06d}")


def _metrics(trial: Trial, epoch: int) -> Mapping[str, float]:
    loss = abs(trial.config["lr"] - 0.01) + 1 / (epoch + 1) + trial.number % 977 / 977
    return {"loss": loss, "accuracy": 1 / (1 + loss)}
