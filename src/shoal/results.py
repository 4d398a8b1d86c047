"""A study in its directory: its trials, the best of them and their models, while it runs or after."""

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError
from shoal.core.trial import Config, TrialState
from shoal.journal.check import check_study
from shoal.journal.rows import TrialRow
from shoal.journal.view import JournalView
from shoal.paths import absolute, check_path
from shoal.reporting.data_frame import dataframe
from shoal.reporting.grid import StudyGrid, study_grid
from shoal.reporting.optuna_mirror import mirror
from shoal.reporting.optuna_study import optuna_study
from shoal.reporting.ranking import front, nobody, ranked
from shoal.reporting.rerun import Rerun, to_rerun
from shoal.sources import edits
from shoal.study import requests
from shoal.worker.files import kept

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from torch import nn


__all__ = ["Study"]

_log = logging.getLogger("shoal.study")


class Study:
    """A study in a directory, running or ended. Every look reads its journal anew.

    Args:
        directory: of the study.

    Raises:
        JournalError: there is none.
        ShoalError: it is no path; or it is relative, and the working directory was removed.
    """

    def __init__(self, directory: Path | str) -> None:
        check_path(directory)
        self.directory = absolute(directory)
        with self._journal() as journal:
            self.objectives = journal.objectives
        names, modes = zip(*((goal.metric, goal.mode) for goal in self.objectives), strict=True)
        self.metric: str | tuple[str, ...] = names if len(names) > 1 else names[0]
        self.mode: str | tuple[str, ...] = modes if len(names) > 1 else modes[0]

    @property
    def trials(self) -> list[TrialRow]:
        """All trials, by number."""
        with self._journal() as journal:
            return journal.trials()

    @property
    def best_trial(self) -> TrialRow:
        """The trial with the best last value of the metric.

        Raises:
            ShoalError: no trial has one, or there are several metrics.
        """
        if len(self.objectives) > 1:
            raise ShoalError(
                f"the study in {self.directory} compares trials by {len(self.objectives)} metrics, so no single one is "
                "the best; `best_trials` are those that no other dominates"
            )
        for best in self.best_trials:
            return best
        raise ShoalError(f"no trial of the study in {self.directory} {nobody(self.trials, self.objectives)}")

    @property
    def best_trials(self) -> list[TrialRow]:
        """The Pareto front: the trials that no other dominates by the last values of the metrics, by the first metric.

        One dominates another if it is at least as good in all metrics and better in one. With one metric these are the
        best trial and its equals, the oldest first.
        """
        trials = self.trials
        best = front(trials, self.objectives)
        return [row for row in ranked(trials, self.objectives, best) if row.number in best]

    def dataframe(self) -> "pd.DataFrame":
        """One row a trial: its state, config, metrics (last and best), epochs, seconds, device, array and reason.

        What was running when the process of the study was killed is "interrupted" until somebody resumes it.
        """
        with self._journal() as journal:
            runs = journal.writer() is not None
            return dataframe(journal.trials(), runs=runs)

    def grid(self) -> StudyGrid:
        """The trials by the values of the parameters that are searched: `grid().project("lr", "width").cells`."""
        with self._journal() as journal:
            return study_grid(journal.space, journal.trials(), self.objectives[0])

    def to_optuna(
        self, storage: "str | optuna.storages.BaseStorage | None" = None, name: str | None = None
    ) -> "optuna.Study":
        """The trials that have ended as a new study of Optuna's, for its plots and dashboard; see `optuna_study`.

        Args:
            storage: where it is kept: an address such as "sqlite:///optuna.db", the path of a file for Optuna's
                JournalStorage, or one of Optuna's storages; None: in memory.
            name: of the new study; by default that of this study's directory.

        Raises:
            ShoalError: the storage cannot be used.
            optuna.exceptions.DuplicatedStudyError: it has a study of that name.
        """
        with self._journal() as journal:
            trials = [(row, journal.curve(row.number)) for row in journal.trials()]
            space = journal.space
        return optuna_study(trials, space, self.objectives, name or self.directory.resolve().name, storage)

    def mirror_to_optuna(
        self, storage: "str | optuna.storages.BaseStorage", name: str | None = None, interval: float = 1.0
    ) -> "optuna.Study":
        """Keep a study of Optuna's up to date with this one until nobody runs it any more; see `mirror`.

        To be called while the study runs, from another process or thread: `optuna-dashboard` and Optuna's plots then
        show it live. Called again, as after `resume`, it goes on in the same study of Optuna's. There a trial that has
        failed stays so, also when it is tried again.

        Args:
            storage: where it is kept: an address such as "sqlite:///optuna.db", the path of a file for Optuna's
                JournalStorage, or one of Optuna's storages.
            name: of the study there; by default that of this study's directory.
            interval: seconds between two looks.

        Raises:
            ShoalError: the storage cannot be used, or has another study of that name.
        """
        return mirror(self.directory, storage, name, interval)

    def best_model(self) -> "nn.Module":
        """The best trial's model with its trained weights, on the CPU and in evaluation mode.

        The task's `model` is called: as the study was given it, or as its module has it now if that can be imported.
        In a process that did not begin the study this runs code that the study's directory holds. Files of the task
        that were edited since the study last ran are logged as a warning.

        Raises:
            ShoalError: no trial has a value of the metric, there are several metrics, or no `Task` was trained.
            CheckpointError: its checkpoint is gone or damaged.
        """
        best = self.best_trial.trial
        with self._journal() as journal:
            if journal.study["opaque"]:
                raise ShoalError(
                    f"the study in {self.directory} trained a program of yours, which knows what its model is; what it "
                    f"kept of trial {best.number} is in {kept(self.directory, best.number)}"
                )
            if changed := edits(journal.study.get("sources", {})):
                names = ", ".join(edit.path for edit in changed)
                _log.warning("the best model may not be what was trained, as the task was edited since: %s", names)
            from shoal.worker.restore import trained_model  # torch, which a look at a table does not need

            return trained_model(journal.blob("task"), best, self.directory)

    def retry(self, numbers: int | Iterable[int] | None = None) -> list[int]:
        """Have trials that failed tried again: by the process that runs the study, or else once it is resumed.

        Such a trial goes on from its newest checkpoint, or begins anew, and trains up to the budget at which it failed.
        Its failures are counted from zero. What it reports counts in tables and for the best trial. The algorithm is
        not told: it has decided without that trial, and a replay is to give the same study.

        Args:
            numbers: of the trials, one or several; None: of all that have failed.

        Returns:
            Their numbers.

        Raises:
            ShoalError: a number is no trial's, or of one that has not failed; or none has failed.
            JournalError: nothing can be asked of the study, as its directory cannot be written.
        """
        return requests.retry(self.directory, numbers)

    def pause(self, numbers: int | Iterable[int]) -> list[int]:
        """Have trials wait until they are resumed: by the process that runs the study, or else once it is resumed.

        A trial that is being trained leaves its job at the next step, with a checkpoint. Trials that can only be
        compared with it wait for it. It stays paused when the study is stopped or killed and goes on.

        Args:
            numbers: of the trials; one, or several.

        Returns:
            Their numbers.

        Raises:
            ShoalError: a number is no trial's, or of one that is over or paused already; or there is none.
            JournalError: nothing can be asked of the study, as its directory cannot be written.
        """
        return requests.pause(self.directory, numbers)

    def resume(self, numbers: int | Iterable[int]) -> list[int]:
        """Let trials go on that were paused, where they left off.

        Args:
            numbers: of the trials; one, or several.

        Returns:
            Their numbers.

        Raises:
            ShoalError: a number is no trial's, or of one that is over or not paused; or there is none.
            JournalError: as of `pause`.
        """
        return requests.resume(self.directory, numbers)

    def stop(self, numbers: int | Iterable[int]) -> list[int]:
        """End trials for good: by the process that runs the study, or else once it is resumed.

        They are STOPPED, and what they have reported counts. The algorithm goes on as if they had failed: no rung waits
        for them.

        Args:
            numbers: of the trials; one, or several.

        Returns:
            Their numbers.

        Raises:
            ShoalError: a number is no trial's, or of one that is over; or there is none.
            JournalError: as of `pause`.
        """
        return requests.stop(self.directory, numbers)

    def policy(self, name: str) -> None:
        """Have another policy decide which job runs where, in the process that runs the study and when it is resumed.

        Args:
            name: one of `shoal.schedule.POLICIES`.

        Raises:
            PolicyError: there is none of that name.
            JournalError: as of `pause`.
        """
        requests.policy(self.directory, name)

    def add(self, config: Config, epochs: int, *, outside: bool = False) -> Config:
        """Have a trial of your own trained: by the process that runs the study, or else once it is resumed.

        Its number is 1000000 or above. What it reports counts in tables and for the best trial. The algorithm is not
        told, and does not decide about it: it is COMPLETE when it has trained so far.

        Args:
            config: of the trial; constants of the space need not be given.
            epochs: that it is trained.
            outside: whether the config may be none of the space; `shoal status` and the journal say what is outside.

        Returns:
            Its whole config.

        Raises:
            ShoalError: the config is none of the space, and that is not allowed, or cannot be kept; or `epochs` is no
                number of epochs.
            JournalError: as of `pause`.
        """
        return requests.add(self.directory, config, epochs, outside=outside)

    def clone(
        self,
        numbers: int | Iterable[int],
        changes: Mapping[str, Any] | None = None,
        *,
        epochs: int | None = None,
        anew: bool = False,
        outside: bool = False,
    ) -> list[Config]:
        """Have a trial trained that is as another one but for some changes, as of `add`; or one for each of several.

        It begins with what the other had learnt at the end of its newest epoch that is saved, its optimizer's state
        included, as far as that fits.

        Args:
            numbers: of the other, or others.
            changes: name of a parameter, with dots where it is nested -> its value.
            epochs: up to which it is trained, those of the other included; None: as far as the other.
            anew: whether it begins with weights of its own instead.
            outside: as of `add`.

        Returns:
            Its whole config, or those of all, by the others' numbers.

        Raises:
            ShoalError: there is no such trial; no end of an epoch of it is saved; no epochs are left to be trained; or
                as of `add`.
            JournalError: as of `pause`.
        """
        return requests.clone(self.directory, numbers, changes or {}, epochs=epochs, anew=anew, outside=outside)

    def add_devices(self, names: str | Sequence[str], patience: float = 60.0) -> list[str]:
        """Let the study use more devices, also such as were removed from it before: at once, or once it is resumed.

        Args:
            names: of the devices, or of one: "cuda:1", ["cuda:0", "cuda:1"].
            patience: seconds to wait at most for the process that runs the study; 0: not at all, as code that this
                process calls, such as a back end's, would wait for itself.

        Returns:
            Names of the devices that the study has then; where nobody runs it or is waited for, that it will have.

        Raises:
            DeviceError: one is named twice, used already, or not there; or the process that runs the study has not come
                to it in time, and is still asked to.
            JournalError: as of `pause`.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        return requests.change_devices(self.directory, "add devices", wanted, patience=patience)

    def remove_devices(self, names: str | Sequence[str], patience: float = 60.0) -> list[str]:
        """Take devices from the study: at once, or once it is resumed.

        Jobs on them save their trials and stop; the trials go on elsewhere.

        Args:
            names: of the devices, or of one.
            patience: as of `add_devices`.

        Returns:
            As of `add_devices`.

        Raises:
            DeviceError: one is named twice or none of the study's; or as of `add_devices`.
            JournalError: as of `pause`.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        return requests.change_devices(self.directory, "remove devices", wanted, patience=patience)

    def pause_study(self) -> None:
        """Have all jobs save their trials and end, and nothing start until `resume_study`; the process goes on.

        It stays paused when it is stopped or killed and goes on.

        Raises:
            ShoalError: it is paused already, or has ended.
            JournalError: as of `pause`.
        """
        requests.pause_study(self.directory)

    def resume_study(self) -> None:
        """Let the study go on after `pause_study`.

        Raises:
            ShoalError: it is not paused, or has ended.
            JournalError: as of `pause`.
        """
        requests.resume_study(self.directory)

    def end_study(self) -> None:
        """Have all jobs save their trials and end, and the study with them; open trials are STOPPED where they are.

        The algorithm is asked for nothing more, then or later.

        Raises:
            ShoalError: it has ended, or is to end already.
            JournalError: as of `pause`.
        """
        requests.end_study(self.directory)

    def rerun(self, number: int, devices: str | Sequence[str] | None = None) -> Rerun:
        """Train a trial again, alone, in this process, and compare its metrics with those recorded.

        It is trained from its start for as many epochs as it has reported, with its own seed, order of samples and
        random numbers. Nothing in the study's directory is changed. In a process that did not begin the study this runs
        code that the directory holds.

        Args:
            number: of the trial.
            devices: as of `tune`; the first one is used. By default the study's own.

        Returns:
            Its `differences` by metric, the `largest` of them, and both curves. In float64 they differ by rounding,
            unless training is chaotic; see docs/fusion.md. Files of the task that were edited since the study last ran
            are in `changed`, those that it went on with after the trial was proposed in `edits`.

        Raises:
            ShoalError: there is no such trial; a program of the user's trained it; it began with another trial's
                weights; it failed; or it has reported nothing.
            Exception: whatever the task's methods raise.
        """
        with self._journal() as journal:
            check_study(journal)
            row, device = to_rerun(journal, number, devices)
            spec, task = journal.study, journal.blob("task")
            # how a trial failed that was tried again is no report of an epoch
            recorded = [report for report in journal.curve(number) if report.state is not TrialState.FAILED]
        sys.path.extend(path for path in spec["paths"] if path not in sys.path)
        from shoal.worker.rerun import trained_again  # torch, which a look at a table does not need

        return Rerun.of(
            row.trial, device.name, recorded, trained_again(task, row.trial, recorded[-1].epoch, device), spec
        )

    def __repr__(self) -> str:
        return f"Study({str(self.directory)!r})"

    def _journal(self) -> JournalView:
        return JournalView.read(self.directory)
