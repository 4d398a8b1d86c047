"""Journals of a search by halving: conditional parameters, constants, failed trials, NaN, one metric or two."""

import math
from pathlib import Path

from support.recorded import RecordedJournal
from timeline_samples import Clock, machines, training

from shoal.core.space import Space, choice, loguniform, uniform
from shoal.core.trial import Budget, Report, Trial, TrialGroup, TrialState
from shoal.spec import StudySpec

SPACE = Space(
    {
        "lr": loguniform(1e-5, 1.0),
        "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 0.99)}, {"name": "adam"}]),
        "act": ["relu", "gelu", "a very long name of an activation"],
        "classes": 10,
        "only": choice([3]),
    }
)


def loss_of(config, epoch):
    """Best at a learning rate of 0.01; above 0.5 it diverges to NaN after two epochs."""
    if config["lr"] > 0.5 and epoch > 2:
        return math.nan
    far = abs(math.log10(config["lr"]) + 2)
    return 0.05 + 0.3 * far + 0.2 * (config["optimizer"]["name"] == "adam") + 1.5 * math.exp(-epoch / 3)


def halving_study(
    directory: Path, trials=48, rungs=(1, 3, 9), metric="loss", mode="min", space=SPACE, loss=loss_of, **spec
) -> Path:
    """A third of the trials is promoted at each rung; trial 1 fails after the first, and the last two trials wait."""
    clock = Clock()
    study = StudySpec(metric=metric, mode=mode, space=space.to_json(), **spec)
    with RecordedJournal.create(directory, study, task=b"", algorithm=b"", clock=clock) as journal:
        journal.record_devices(machines(1, "cpu"))
        repeats = study.repetition
        configs = [repeats.config(space.sample(repeats.configuration(x)), x) for x in range(trials)]
        proposed = [Trial(number, config, number, 0) for number, config in enumerate(configs)]
        journal.record_proposal(trials, [TrialGroup(tuple(proposed), Budget(rungs[-1]))])
        kept, before = proposed[: trials - 2], 0
        for place, rung in enumerate(rungs):
            job = f"job-{place + 1:05d}"
            journal.record_job_start(training(job, [x.number for x in kept]), "cuda:0")
            order = sorted(kept, key=lambda x: _rank(loss(x.config, rung)))
            survivors = {x.number for x in order[: len(order) // 3 // repeats.size * repeats.size]} - {1}
            for epoch in range(before + 1, rung + 1):
                clock.now += 1
                for trial in kept:
                    at_end = epoch == rung
                    state = TrialState.RUNNING
                    if at_end and rung == rungs[-1]:
                        state = TrialState.COMPLETE
                    elif at_end and trial.number not in survivors | {1}:
                        state = TrialState.STOPPED
                    value = loss(trial.config, epoch) + 0.1 * (trial.number % repeats.size)
                    metrics = {"loss": value, "seconds": 1 + 10 * trial.config["lr"] ** 0.2}
                    journal.record_reports(job, [Report(trial.number, epoch, metrics, 0.1, state)])
            journal.record_job_end(job, "finished", "", failed=False)
            if place == 0 and any(x.number == 1 for x in kept):
                journal.record_reports("", [Report(1, rung, state=TrialState.FAILED, reason="ValueError: no")])
            kept, before = [x for x in kept if x.number in survivors], rung
    return directory


def _rank(value):
    return math.inf if math.isnan(value) else value
