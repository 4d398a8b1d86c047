"""Studies for the tests of the page."""

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

from support.recorded import RecordedJournal
from timeline_samples import GB, Clock, machines, training

from shoal.algorithms.base import Totals
from shoal.core.activity import Activity
from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Demand
from shoal.core.event import Proven
from shoal.core.job import Job
from shoal.core.rows import Intervention
from shoal.core.space import Space, choice, loguniform
from shoal.core.trial import Budget, Check, Report, Trial, TrialGroup, TrialState
from shoal.spec import StudySpec

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u2028"


def nasty_study(directory: Path) -> None:
    """A study whose values, reasons, logs and errors are markup."""
    clock = Clock()
    space = Space({"lr": choice([NASTY, "b"]), NASTY: choice([NASTY, "b"]), f"constant {NASTY}": NASTY}).to_json()
    study = StudySpec(metric=NASTY, mode="max", space=space)
    with RecordedJournal.create(
        directory, study, {"note": NASTY}, task=b"\x80", algorithm=b"\x80", clock=clock
    ) as journal:
        journal.record_devices(machines(1, NASTY))
        trials = tuple(Trial(number, {"lr": NASTY, NASTY: NASTY, "x": float("nan")}, number, 0) for number in range(2))
        journal.record_proposal(2, [TrialGroup(trials, Budget(3), NASTY)])
        journal.record_pause([1], NASTY)
        journal.record_waiting_reasons({1: NASTY})
        clock.now += 1
        journal.record_job_start(training("job-00001", [0]), "cuda:0")
        journal.record_reports("job-00001", [Report(0, 1, {NASTY: 0.5, f"other {NASTY}": float("inf")}, 1.0)])
        clock.now += 1
        journal.record_job_end("job-00001", "raised", f"Traceback\nValueError: {NASTY}", failed=True)
        journal.record_reports("", [Report(0, 1, state=TrialState.FAILED, reason=f"ValueError: {NASTY}")])
    (directory / "logs").mkdir()
    (directory / "logs" / "job-00001.log").write_text(f"printed {NASTY}\n")


def lively_study(
    directory: Path, trials: int = 48, epochs: int = 24, *, running: bool = True, seed: int = 3
) -> RecordedJournal:
    """The journal, open, of a study with curves, several devices, waiting and failed trials, and a user's requests.

    Args:
        directory: of the study.
        trials: so many, in arrays of eight.
        epochs: budget of each.
        running: whether the last jobs have not ended.
        seed: of all that is random.
    """
    chance, clock = random.Random(seed), Clock()
    clock.now = time.time() - 260.0
    space = Space({"lr": loguniform(1e-4, 1.0), "width": choice([64, 128, 256]), "batch_size": choice([32, 64])})
    totals = Totals(trials + 8, (trials + 8) * epochs, (trials + 8) * epochs)
    study = StudySpec(metric="accuracy", mode="max", space=space.to_json(), totals=totals)
    journal = RecordedJournal.create(directory, study, task=b"", algorithm=b"", clock=clock)
    with journal.transaction():
        journal.record_devices(machines(4, "NVIDIA H100"))
        configs = [
            {"lr": 10 ** chance.uniform(-4, 0), "width": chance.choice([64, 128, 256]), "batch_size": 32}
            for _ in range(trials)
        ]
        proposed = tuple(Trial(number, config, number, 0) for number, config in enumerate(configs))
        journal.record_proposal(trials, [TrialGroup(proposed, Budget(epochs))])
        starts = range(0, trials, 8)
        for turn, first in enumerate(starts):
            clock.now += 3.0 if turn % 4 else 40.0
            members = proposed[first : first + 8]
            last = running and first + 32 > trials
            if running and first + 8 >= trials:
                reasons = ["waits for a free device: cuda:0 is busy"] * 5
                reasons += [f"needs {size} GB, cuda:1 has 4.2 GB free" for size in (9.1, 9.3, 11.0)]
                journal.record_waiting_reasons({x.number: why for x, why in zip(members, reasons, strict=True)})
                break
            _train(
                journal,
                clock,
                chance,
                f"job-{turn + 1:05d}",
                members,
                f"cuda:{turn % 4}",
                epochs // 2 if last else epochs,
                last,
            )
        if running:
            journal.record_intervention(Intervention("0001-ab-anna", "pause", (3,), (), "", ()))
            journal.record_intervention(Intervention("0002-ab-ben", "stop", (), (), "", ("trial 2 is complete",)))
    return journal


HALVING_ENDS = {0: TrialState.COMPLETE, 1: TrialState.RUNNING, 2: TrialState.PAUSED}


def halving_study(directory: Path, metric: str = "valid_loss") -> None:
    """A study of 24 trials that an algorithm stopped after 1, 3 or 9 epochs; `lr` alone explains their losses.

    The losses of trial 23 are a hundred thousand times as high as those of the others; `momentum` and `optimizer` have
    one value. Trial 1 is paused by a user, and trial 2 waits for others at epoch 3.
    """
    clock = Clock()
    space = Space({"optimizer": "sgd", "momentum": choice([0.9]), "seed": choice([0, 1]), "lr": loguniform(1e-4, 1.0)})
    study = StudySpec(metric=metric, mode="min", space=space.to_json())
    with RecordedJournal.create(directory, study, task=b"", algorithm=b"", clock=clock) as journal:
        journal.record_devices(machines(1, "cpu"))
        configs = [
            {"optimizer": "sgd", "momentum": 0.9, "seed": number // 2 % 2, "lr": 10 ** (-number / 6)}
            for number in range(24)
        ]
        trials = tuple(Trial(number, config, number, 0) for number, config in enumerate(configs))
        journal.record_proposal(24, [TrialGroup(trials, Budget(9))])
        journal.record_job_start(training("job-00001", range(24)), "cuda:0")
        for number in range(24):
            scale, last = 1e5 if number == 23 else 1.0, 9 if number < 2 else 3 if number < 8 else 1
            for epoch in range(1, last + 1):
                clock.now += 1
                loss = scale * (0.1 * (number + 1) + 0.5 / epoch)
                state = TrialState.RUNNING if epoch < last else HALVING_ENDS.get(number, TrialState.STOPPED)
                reason = f"rank {number} of 24 at epoch {epoch}; only the best third continues" * (
                    state is TrialState.STOPPED
                )
                journal.record_reports("job-00001", [Report(number, epoch, {metric: loss}, 1.0, state, reason)])
        clock.now += 8
        spent = {Activity.START: 6.0, Activity.STEPS: 38.0, Activity.VALIDATION: 8.0}
        journal.record_job_end("job-00001", "finished", failed=False, activities=spent)
        journal.record_intervention(Intervention("0001-ab-anna", "pause", (1,), (), "", ()))
        journal.record_pause([1], "anna")


def _prove(journal: RecordedJournal, name: str, arrays: Sequence[Array]) -> None:
    """What a job says of its arrays: that they are equal to plain PyTorch, and why those of one structure are not."""
    for array in arrays:
        numbers = [member.trial.number for member in array.members]
        checks = tuple(Check(numbers[0], 0, step, "step, compiled", 3e-16 / step) for step in (1, 2, 3))
        refusal = (
            "gradient of `block.0.weight` has norm 0 in the array, and 0.48 alone "
            "(trial 2, step 1 of epoch 1, eager, net.py:42)"
        )
        refused = array.members[0].trial.config["width"] == 256
        journal.record_checks(
            Proven(name, array.key, dict.fromkeys(numbers, 0), () if refused else checks, refusal if refused else "")
        )


def _train(
    journal: RecordedJournal,
    clock: Clock,
    chance: random.Random,
    name: str,
    members: tuple[Trial, ...],
    device: str,
    epochs: int,
    last: bool,
) -> None:
    """One job of an array; its second trial fails in the third job."""
    keys = [(f"{0xA1B2C3D4E5F60718 + x.config['width']:016x}", x) for x in members]
    arrays = {}
    for key, trial in keys:
        arrays.setdefault(key, []).append(Member(trial, 0, epochs))
    made = tuple(Array(FusionKey(key, "d", 32), tuple(some)) for key, some in arrays.items())
    journal.record_job_start(Job(name, made, demand=Demand(0.8, 40 * GB, 1.0, 60.0)), device)
    begin = clock.now
    _prove(journal, name, made)
    good = {
        x.number: 0.98 - 0.1 * abs(math.log10(x.config["lr"]) + 2) ** 1.5 - chance.uniform(0, 0.05) for x in members
    }
    fails = name == "job-00003"
    for epoch in range(1, epochs + 1):
        clock.now = begin + 2.5 * epoch
        if device != "cuda:3":
            journal.record_telemetry({device: (chance.randint(40, 95), (30 + epoch) * GB)})
        done = epoch == epochs and not last
        reports = []
        for x in members:
            value = max(0.1, good[x.number] * (1 - math.exp(-epoch / 5)) + chance.gauss(0, 0.006))
            state = TrialState.COMPLETE if done and not (fails and x is members[1]) else TrialState.RUNNING
            reports.append(
                Report(x.number, epoch, {"accuracy": value, "valid_loss": 2.4 * (1 - value) + 0.02}, 0.3, state)
            )
        journal.record_reports(name, reports)
    if not last:
        message = (
            'Traceback (most recent call last):\n  File "task.py", line 12, in loss\nValueError: the loss is not finite'
        )
        journal.record_job_end(
            name, "raised" if fails else "finished", f"{message}\nLog: logs/{name}.log" if fails else "", failed=fails
        )
        if fails:
            journal.record_reports("", [Report(members[1].number, epochs, state=TrialState.FAILED, reason=message)])
    clock.now = begin
