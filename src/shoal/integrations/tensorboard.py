"""Tracking of a study in TensorBoard."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.callbacks.base import Callback, EpochReport, StudyInfo, TrialResult
from shoal.core.errors import ShoalError
from shoal.core.plain import plain
from shoal.core.ranking import ranked
from shoal.core.space import flatten
from shoal.core.trial import Config
from shoal.host.paths import absolute
from shoal.integrations.open_runs import OpenRuns, run_name
from shoal.integrations.optional import check_installed
from shoal.journal.view import JournalView

__all__ = ["TensorBoardCallback"]


class TensorBoardCallback(Callback):
    """Write a run of TensorBoard for each trial: its metrics by epoch, and its config for the page HPARAMS.

    Needs `tensorboardX`. Look with: `tensorboard --logdir DIR/tensorboard`. A run is the directory `trial-000012`, to
    which a resumed study adds a file. If the follower was killed, some points are there twice, with equal values.

    Args:
        logdir: Directory of the runs; None: `tensorboard` in the study's directory.
        top_k: Number of ended trials whose runs are kept, the best ones; None: all. The run of a worse trial is removed
            when the trial has ended. TensorBoard is slow from some hundreds of runs.

    Raises:
        ShoalError: `top_k` is not a whole number of at least 1.
    """

    def __init__(self, logdir: Path | str | None = None, top_k: int | None = None) -> None:
        top_k = plain(top_k)
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
            raise ShoalError(f"`top_k` must be a whole number of at least 1, or None for all trials, got {top_k!r}")
        self._logdir = None if logdir is None else absolute(logdir)
        self._top_k = top_k
        self._ended = False  # whether a trial has ended since the last flush

    def on_study_begin(self, study: StudyInfo) -> None:
        """Import the library."""
        check_installed("tensorboardX", "TensorBoardCallback")
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter
        self._study = study
        self._place = self._logdir or study.directory / "tensorboard"
        self._runs: OpenRuns[_TensorBoardRun] = OpenRuns(self._opened, _TensorBoardRun.close)

    def on_report(self, trial: int, config: Config, report: EpochReport) -> None:
        """Write the metrics of an epoch."""
        self._runs.get(trial, config).write(report)

    def on_trial_end(self, trial: int, config: Config, result: TrialResult) -> None:
        """Close the run of a trial."""
        self._runs.close(trial)
        self._ended = True

    def flush(self) -> None:
        """Write what is buffered, and remove the runs of trials that are not among the best."""
        for run in self._runs.each():
            run.flush()
        if self._ended and self._top_k is not None:
            self._prune(self._top_k)
        self._ended = False

    def on_study_end(self, study: StudyInfo) -> None:
        """Close all runs."""
        self._runs.close_all()

    def _opened(self, trial: int, config: Config) -> "_TensorBoardRun":
        return _TensorBoardRun(self._writer(str(self._place / run_name(trial))), flatten(config))

    def _prune(self, most: int) -> None:
        with JournalView.read(self._study.directory) as journal:
            ended = [row for row in journal.trials() if row.state.final]
        best = ranked(ended, self._study.objectives)
        for row in best[most:]:
            shutil.rmtree(self._place / run_name(row.number), ignore_errors=True)


class _TensorBoardRun:
    def __init__(self, writer: Any, parameters: Mapping[str, Any]) -> None:
        self._writer = writer
        self._parameters = {name: _plain(value) for name, value in parameters.items()}
        self._described = False

    def write(self, report: EpochReport) -> None:
        """Write the metrics of an epoch; before the first ones the config, with the names of the metrics."""
        if not self._described:
            self._described = True
            from tensorboardX.summary import hparams

            for summary in hparams(self._parameters, dict(report.metrics)):
                self._writer.file_writer.add_summary(summary)  # into this run: `add_hparams` makes a run of its own
        for name, value in report.metrics.items():
            self._writer.add_scalar(name, value, report.epoch, walltime=report.time)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        """Close the file, and end the thread that writes it."""
        self._writer.close()


def _plain(value: Any) -> Any:
    """A value that a page of TensorBoard can show."""
    return value if isinstance(value, bool | int | float | str) else str(value)
