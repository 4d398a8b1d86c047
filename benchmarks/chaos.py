"""A study whose processes are killed at random moments ends like one that was left alone.

There are studies of a task, of a function that reports and of a command that prints. Each round starts or resumes one
and, somewhere between its first instant and the middle of training, kills with signal 9 its engine, a worker, the
server that forks workers, or the function's or command's own process. When a study has ended, its trials (config,
state, epochs, every metric at every epoch) are held against those of an undisturbed run, every epoch of every trial has
to be there, and the next study begins. At each kill the age of the newest checkpoint of every trial of a task in
training is looked at: that is what the trial has to do again.

    python benchmarks/chaos.py [--rounds 20] [--kinds task function command] [--quick] [--seed 0]
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import shoal
from shoal.core.errors import JournalError
from shoal.core.job import Purpose
from shoal.core.trial import Report, TrialState
from shoal.journal.view import JournalView
from shoal.programs.opaque import Command

CHECKPOINT_SECONDS = 0.2
SLACK_SECONDS = 2.0
"""A step, an epoch's end and the writing of a checkpoint, on a machine that is busy with other things."""
TOLERANCE = 1e-9
PATIENCE_SECONDS = 120.0


def descent(config):
    """In a process of its own, so it imports what it needs."""
    import json
    import time

    import shoal

    kept = shoal.checkpoint() / "state.json"
    x, speed = json.loads(kept.read_text()) if kept.exists() else (10.0, 0.0)
    for step in range(shoal.step() + 1, 10):
        time.sleep(0.15)
        speed = config["momentum"] * speed - config["lr"] * 2 * x
        x += speed
        kept.write_text(json.dumps((x, speed)))
        shoal.report({"loss": x * x}, step=step)


PROGRAM = Path(__file__).with_name("chaos_command.py")


def training(kind):
    """What is searched, the metric of it, and the algorithm; only an engine of tasks imports torch."""
    if kind == "task":
        from chaos_task import Spiral

        return Spiral(), "valid_loss", shoal.Hyperband(9, eta=3)
    if kind == "function":
        return descent, "loss", shoal.SuccessiveHalving(9, 9, eta=3)
    line = (sys.executable, str(PROGRAM), "{lr}", "{momentum}", "{directory}")
    return Command(line, ("loss",), PROGRAM.parent), "loss", shoal.SuccessiveHalving(9, 9, eta=3)


TARGETS = {
    "task": {"engine": 5, "worker": 4, "server": 1},
    "function": {"engine": 4, "worker": 3, "server": 2, "program": 3},
    "command": {"engine": 4, "worker": 3, "server": 2, "program": 3},
}
"""What is killed, and how often relative to the others."""


def engine(directory: Path) -> None:
    """Begin the study or go on with it, whatever was done before the last kill; its name says what it searches."""
    trained, metric, algorithm = training(directory.name.partition("-")[0])
    try:
        shoal.resume(directory, show_progress=False)
    except JournalError:
        shoal.tune(
            trained,
            {"lr": shoal.loguniform(1e-3, 1.0), "momentum": shoal.uniform(0.0, 0.9)},
            metric=metric,
            mode="min",
            algorithm=algorithm,
            devices="cpu:2",
            directory=directory,
            retries=50,
            checkpoint_seconds=CHECKPOINT_SECONDS,
            show_progress=False,
        )


@dataclass
class Figures:
    """What came of studies that were disturbed.

    Args:
        kills: how often each target was killed.
        studies: how many were begun.
        differences: from the undisturbed one.
        unsaved_seconds: the most that a trial of a task had not saved at a kill.
    """

    kills: Counter[str]
    studies: int
    differences: list[str]
    unsaved_seconds: float


class Run:
    """An engine's process and the processes below it.

    Args:
        directory: of the study.
        program: runs the engine when it is called with `--study` and the directory.
    """

    def __init__(self, directory: Path, program: Path = Path(__file__)) -> None:
        self.directory = directory
        self.began = time.time()
        self.log = directory.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, program, "--study", directory], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def ended(self) -> bool:
        """Whether the study has; a fault of the engine is one of the benchmark."""
        status = self.process.poll()
        if status not in (None, 0):
            raise SystemExit(f"the engine exited with status {status}:\n{self.log.read_text()[-3000:]}")
        return status == 0

    def kill(self, target: str) -> bool:
        """Kill the engine, its server, one of its workers, or what one of those has started; False if there is none."""
        if target == "engine":
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            return True
        with suppress(psutil.NoSuchProcess, IndexError):
            server = psutil.Process(self.process.pid).children()[0]
            victim = server if target == "server" else random.choice(server.children())
            if target == "program":
                victim = random.choice(victim.children())
            victim.kill()
            return True
        return False

    def until_training(self) -> None:
        """Wait until a job trains, or the study has ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.ended() and not self.training():
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing trains after {PATIENCE_SECONDS:.0f} s:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def training(self) -> dict[int, float]:
        """Trials that train now, and when their jobs began; not those that a killed engine left so."""
        with suppress(JournalError), JournalView.read(self.directory) as journal:
            running = {row.number for row in journal.trials() if row.state is TrialState.RUNNING}
            jobs = [job for job in journal.jobs() if job.purpose is Purpose.TRAIN and job.ended is None]
            started = [job for job in jobs if job.started > self.began]
            return {number: job.started for job in started for number in job.trials if number in running}
        return {}

    def unsaved_seconds(self) -> float:
        """Age of the newest checkpoint, the worst of all trials in training that were saved since their jobs began."""
        now, ages = time.time(), [0.0]
        for number, began in self.training().items():
            with suppress(FileNotFoundError):  # the older ones are dropped meanwhile
                files = list((self.directory / "checkpoints" / f"{number:06d}").glob("*.pt"))
                newest = max((file.stat().st_mtime for file in files), default=0.0)
                if newest > began:
                    ages.append(now - newest)
        return max(ages)


def outcome(directory: Path) -> dict[str, object]:
    """All that a kill must not change: what became of each trial, and each of its reports."""
    with JournalView.read(directory) as journal:
        found: dict[str, object] = {
            f"trial {row.number}": [dict(row.config), str(row.state), row.epoch, row.target] for row in journal.trials()
        }
        for event in journal.events():
            if isinstance(event, Report):
                found[f"trial {event.trial} at epoch {event.epoch}"] = dict(sorted(event.metrics.items()))
    return found


def missing(directory: Path) -> list[str]:
    """Epochs that a trial has behind it and did not report."""
    with JournalView.read(directory) as journal:
        return [
            f"trial {row.number} has no report of epoch {epoch}"
            for row in journal.trials()
            for epoch in sorted(set(range(1, row.epoch + 1)) - {report.epoch for report in journal.curve(row.number)})
        ]


def differences(one: dict[str, object], other: dict[str, object]) -> list[str]:
    return [
        f"{what}: {other.get(what)}, not {one.get(what)}"
        for what in sorted(one.keys() | other.keys())
        if not _alike(one.get(what), other.get(what))
    ]


def _alike(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    return one == other


def disturbed(folder: Path, kind: str, rounds: int, wanted: dict[str, object]) -> Figures:
    """Kill `rounds` times, over as many studies of a kind as that takes; prints a line a round."""
    targets = TARGETS[kind]
    kills: Counter[str] = Counter()
    wrong: list[str] = []
    worst = 0.0
    studies = 1
    run = Run(folder / f"{kind}-1")
    while sum(kills.values()) < rounds:
        early = random.random() < 0.2
        if not early:
            run.until_training()
        time.sleep(random.uniform(0.0, 2.0))
        if run.ended():
            wrong += [*differences(wanted, outcome(run.directory)), *missing(run.directory)]
            studies += 1
            run = Run(folder / f"{kind}-{studies}")
            continue
        (target,) = random.choices(list(targets), list(targets.values()))
        trains, unsaved = len(run.training()), run.unsaved_seconds()
        if run.kill(target):
            kills[target] += 1
            worst = max(worst, unsaved)
            print(
                f"{sum(kills.values()):>6}  {run.directory.name:>10}  {target:8}  {trains:>14}  {unsaved:>14.2f}",
                flush=True,
            )
        if target == "engine":
            run = Run(run.directory)
    while not run.ended():
        time.sleep(0.05)
    wrong += [*differences(wanted, outcome(run.directory)), *missing(run.directory)]
    return Figures(kills, studies, [f"{kind}: {each}" for each in wrong], worst)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="how many kills, over all kinds of studies")
    parser.add_argument("--kinds", nargs="+", choices=TARGETS, default=list(TARGETS), help="of studies")
    parser.add_argument("--quick", action="store_true", help="four rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and targets")
    parser.add_argument("--study", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.study is not None:
        engine(options.study)
        return 0
    warnings.simplefilter("ignore")
    random.seed(options.seed)
    folder = Path(tempfile.mkdtemp())
    os.environ["SHOAL_CACHE"] = str(folder / "cache")
    undisturbed = {kind: Run(folder / f"{kind}-undisturbed") for kind in options.kinds}
    while not all(run.ended() for run in undisturbed.values()):
        time.sleep(0.05)
    print(f"{'round':>6}  {'study':>10}  {'killed':8}  {'trials running':>14}  {'unsaved (s)':>14}")
    rounds = 4 if options.quick else options.rounds
    found = {
        kind: disturbed(folder, kind, len(range(place, rounds, len(undisturbed))), outcome(run.directory))
        for place, (kind, run) in enumerate(undisturbed.items())
    }
    wrong = [f"{kind}: {each}" for kind, run in undisturbed.items() for each in missing(run.directory)]
    wrong += [each for figures in found.values() for each in figures.differences]
    worst = max(figures.unsaved_seconds for figures in found.values())
    shutil.rmtree(folder)
    missed = ["differences"] if wrong else []
    if worst > CHECKPOINT_SECONDS + SLACK_SECONDS:
        missed.append("unsaved_seconds")
    figures = {
        "kills": {kind: dict(each.kills) for kind, each in found.items()},
        "studies": {kind: each.studies for kind, each in found.items()},
        "differences": wrong,
        "unsaved_seconds": round(worst, 3),
        "missed": missed,
    }
    print(json.dumps(figures))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
