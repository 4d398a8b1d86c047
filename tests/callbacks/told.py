"""A callback that writes each call as a line of a file when it is flushed, and callbacks with faults."""

import json
import os
from pathlib import Path
from typing import Any

import shoal
from shoal.callbacks import EpochReport, StudyInfo, TrialResult
from shoal.core.trial import Config
from shoal.integrations.optional import check_installed


class Told(shoal.Callback):
    """Args:
    file: to append to.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[list[Any]] = []

    def on_study_begin(self, study: StudyInfo) -> None:
        self.lines.append(["study begins", study.resumed])

    def on_trial_begin(self, trial: int, config: Config) -> None:
        self.lines.append(["begins", trial, config["x"]])

    def on_report(self, trial: int, config: Config, report: EpochReport) -> None:
        self.lines.append(["report", trial, report.epoch, report.metrics["loss"]])

    def on_trial_end(self, trial: int, config: Config, result: TrialResult) -> None:
        self.lines.append(["ends", trial, str(result.state), result.epoch])

    def flush(self) -> None:
        with self.file.open("a") as file:
            file.writelines(f"{json.dumps([*line, os.getpid()])}\n" for line in self.lines)
        self.lines.clear()

    def on_study_end(self, study: StudyInfo) -> None:
        self.lines.append(["study ends", study.finished])
        self.flush()


class Absent(shoal.Callback):
    """A tracker whose library is on no machine."""

    def on_study_begin(self, study: StudyInfo) -> None:
        check_installed("no_such_library", "Absent")


class Raises(shoal.Callback):
    """Raises at the second report of a study, until a file is there."""

    def __init__(self, mended: Path, file: Path) -> None:
        self.mended, self.told, self.seen = mended, Told(file), 0

    def on_report(self, trial: int, config: Config, report: EpochReport) -> None:
        self.seen += 1
        if self.seen == 2 and not self.mended.exists():
            raise ZeroDivisionError("planted in a callback")
        self.told.on_report(trial, config, report)

    def flush(self) -> None:
        self.told.flush()


def read(file: Path) -> list[list[Any]]:
    """The calls, without the process."""
    return [json.loads(line)[:-1] for line in file.read_text().splitlines()] if file.exists() else []


def processes(file: Path) -> list[int]:
    """Ids of the processes that called, in order."""
    return list(dict.fromkeys(json.loads(line)[-1] for line in file.read_text().splitlines()))


def train(config: Config) -> None:
    """Six reports; the fourth waits for another process to open the FIFO $GATE, if there is one."""
    for step in range(shoal.step(), 6):
        if step == 3 and os.path.exists(gate := os.environ.get("GATE", "")):
            open(gate).close()
        shoal.report({"loss": config["x"] / (step + 1)}, step=step + 1)


def run(directory: str, file: str, backend: str) -> None:
    """The study of the tests."""
    shoal.tune(
        train,
        {"x": shoal.grid([1.0, 2.0, 3.0, 4.0])},
        metric="loss",
        mode="min",
        algorithm=shoal.SuccessiveHalving(4, min_epochs=2, max_epochs=6, eta=2),
        directory=directory,
        devices="cpu:2",
        backend=backend,
        callbacks=[Told(Path(file))],
        show_progress=False,
    )
