"""The class `Study`: results of a study in its directory, and requests to it, while it runs or afterwards."""

import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError
from shoal.core.repeats import ConfigurationRow
from shoal.core.rows import CheckRow, TrialRow
from shoal.core.trial import Config, TrialState
from shoal.host.paths import absolute, check_path
from shoal.host.process_settings import applied
from shoal.host.sources import edits
from shoal.journal import client
from shoal.journal.check import check_study
from shoal.journal.view import JournalView
from shoal.look.budget_values import budget_values
from shoal.look.grid import StudyGrid, journal_grid
from shoal.look.importance import Importance, importance
from shoal.look.optuna_study import optuna_study
from shoal.look.overview import notebook_html, overview
from shoal.look.plots import plot
from shoal.look.ranking import front, ranked, why_no_best
from shoal.look.rerun import Rerun, find_rerun
from shoal.look.snapshot import how_ended, trial_verdicts
from shoal.look.table import dataframe
from shoal.train.checkpoint_paths import program_directory

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn


__all__ = ["Study"]

_log = logging.getLogger("shoal.study")


class Study:
    """A study in a directory, running or ended. Every call reads its journal anew.

    Args:
        directory: Directory of the study.

    Raises:
        JournalError: there is no study.
        ShoalError: the directory is not a path; or it is relative, and the working directory was removed.
    """

    def __init__(self, directory: Path | str) -> None:
        check_path(directory)
        self.directory = absolute(directory)
        with JournalView.read(self.directory) as journal:
            self.objectives = journal.objectives
        names, modes = zip(*((goal.metric, goal.mode) for goal in self.objectives), strict=True)
        self.metric: str | tuple[str, ...] = names if len(names) > 1 else names[0]
        self.mode: str | tuple[str, ...] = modes if len(names) > 1 else modes[0]

    @property
    def trials(self) -> list[TrialRow]:
        """All trials, by number."""
        with JournalView.read(self.directory) as journal:
            return journal.trials()

    @property
    def configurations(self) -> list[TrialRow]:
        """A row for each configuration: that of its trial; with `repeats` or `folds` a `ConfigurationRow` of all."""
        with JournalView.read(self.directory) as journal:
            return journal.configurations()

    @property
    def ended(self) -> str:
        """How the study has ended: "finished", "timeout", or which trial or user has ended it; "" while it is open."""
        with JournalView.read(self.directory) as journal:
            return how_ended(journal)

    @property
    def best_trial(self) -> TrialRow:
        """The trial with the best last value of the metric; with `repeats` or `folds`, the best configuration, under
        the number of its median trial.

        Raises:
            ShoalError: no trial has a value, or there are several metrics.
        """
        if len(self.objectives) > 1:
            raise ShoalError(
                f"the study in {self.directory} compares trials by {len(self.objectives)} metrics, so no single one is "
                "the best; `best_trials` are those that no other dominates"
            )
        for best in self.best_trials:
            return best
        raise ShoalError(f"no trial of the study in {self.directory} {why_no_best(self.trials, self.objectives)}")

    @property
    def best_trials(self) -> list[TrialRow]:
        """The Pareto front by the last values of the metrics, sorted by the first metric.

        A trial is on the front if no other trial is at least as good in all metrics and better in one. With one metric
        these are the best trial and its equals, the oldest first.
        """
        rows = self.configurations
        best = front(rows, self.objectives)
        return [row for row in ranked(rows, self.objectives, best) if row.number in best]

    def dataframe(self) -> "pd.DataFrame":
        """Return one row per trial: its state, config, metrics (last and best), epochs, seconds, device, array, proof
        and reason; with `repeats` or `folds`, also the number of its configuration.

        `proof` says whether the trial trains fused or plain, and what was proven of it; see the method `proof`.

        After a kill of the study's process its running trials are "interrupted" until the study is resumed.
        """
        with JournalView.read(self.directory) as journal:
            runs = journal.writer() is not None
            found = dataframe(journal.trials(), runs=runs, proof=trial_verdicts(journal))
            if journal.spec.repetition.size > 1:
                found.insert(1, "configuration", found["trial"].map(journal.spec.repetition.configuration))
            return found

    def proof(self, number: int) -> list[CheckRow]:
        """Return the comparisons of a trial in an array with the same trial in plain PyTorch, in order.

        Copies of some trials train in plain PyTorch beside an array, see "Proven while it trains" in docs/fusion.md. So
        a trial may have none although others of its structure have; `shoal status` says what was proven of a structure.

        Args:
            number: Number of the trial.

        Returns:
            A row for each comparison: `epoch` (epochs finished before), `step` (steps of the epoch taken), `what`
            ("step, eager", with the step mode, or "validation"), and `difference`, the largest relative one,
            which rounding explains. If the trial was found to train in plain PyTorch, a row says so by its `reason`.

        Raises:
            ShoalError: there is no such trial.
        """
        with JournalView.read(self.directory) as journal:
            _row(journal, number)
            return [row for row in journal.checks(number) if row.what]

    def grid(self) -> StudyGrid:
        """Return the trials by the values of the searched parameters: `grid().project("lr", "width").cells`."""
        with JournalView.read(self.directory) as journal:
            return journal_grid(journal)

    def importance(self, method: str = "ped-anova", budget: int | None = None) -> Importance:
        """How much each searched parameter matters for the metric, of several the first.

        Trials are compared after the same number of epochs, whether they trained further, ended or still train. Beyond
        the first rung of an algorithm that stops trials only survivors remain, so that what stopped the others matters
        less there; the result says so.

        Args:
            method: "ped-anova": for reaching the best tenth, by Optuna, conditional parameters included. "fanova": part
                of the variance of a random forest, by Optuna and scikit-learn, of the parameters that all trials have.
                "eta2": part of the variance of the trials' ranks that a parameter explains alone, as `shoal status`
                and the page show it. The first two name parameters by their paths, as `to_optuna` does; "eta2" names
                them as `grid` does.
            budget: Epochs, or the step of a program's reports; None: the highest budget at which at least ten trials,
                and two for each parameter, have values.

        Raises:
            ShoalError: the method does not exist or needs a package, too few trials have values, or all are equal.
        """
        with JournalView.read(self.directory) as journal:
            return importance(budget_values(journal, budget), method)

    def plot(self, kind: str, budget: int | None = None) -> "Figure":
        """Draw the study with matplotlib; in a script: `study.plot("curves").savefig("curves.png")`.

        Args:
            kind: "history": the last value of each trial, and the best so far; "curves": the learning curves; "slice":
                the value by each parameter; "parallel": parallel coordinates; "importance": see `importance`; "front":
                the Pareto front of two or three metrics. All but "front" show the first metric. All but "curves" and
                "importance" are Optuna's plots.
            budget: As in `importance`, for "slice", "parallel" and "importance", which compare trials at one budget.

        Raises:
            ShoalError: there is no such kind, no matplotlib or no trial with a value; or as in `importance`.
        """
        return plot(self.directory, kind, budget)

    def to_optuna(
        self, storage: "str | optuna.storages.BaseStorage | None" = None, name: str | None = None
    ) -> "optuna.Study":
        """Return a new Optuna study of the ended trials, for Optuna's plots and dashboard; see `optuna_study`.

        Args:
            storage: Storage of the new study: an address such as "sqlite:///optuna.db", the path of a file for Optuna's
                JournalStorage, or a storage object of Optuna; None: in memory.
            name: Name of the new study; the default is the name of this study's directory.

        Raises:
            ShoalError: the storage cannot be used.
            optuna.exceptions.DuplicatedStudyError: the storage has a study of this name.
        """
        with JournalView.read(self.directory) as journal:
            repetition = journal.spec.repetition
            trials = [
                (row, repetition.curve([journal.curve(each.number) for each in row.repeats], self.objectives))
                if isinstance(row, ConfigurationRow)
                else (row, journal.curve(row.number))
                for row in journal.configurations()
            ]
            space = journal.space
        return optuna_study(trials, space, self.objectives, name or self.directory.resolve().name, storage)

    def best_model(self) -> "nn.Module":
        """The best trial's model with its trained weights: `model` of `best_trial`.

        Raises:
            ShoalError: no trial has a value of the metric, there are several metrics, or no `Task` was trained.
            CheckpointError: the checkpoint is missing or damaged.
        """
        return self.model(self.best_trial.number)

    def model(self, number: int) -> "nn.Module":
        """A trial's model with the weights of its newest checkpoint, on the CPU and in evaluation mode.

        With `Task.ema` the averaged parameters take the place of the trained ones. The method calls the task's
        `model`: that of its module now if the module can be imported, else the recorded one. In a process that did not
        begin the study, this runs code from the study's directory. A warning names files of the task that were edited
        since the study last ran.

        Args:
            number: Number of the trial.

        Raises:
            ShoalError: there is no such trial, or no `Task` was trained.
            CheckpointError: the trial has no intact checkpoint.
        """
        with JournalView.read(self.directory) as journal:
            row = _row(journal, number)
            if journal.spec.opaque:
                raise ShoalError(
                    f"the study in {self.directory} trained a program of yours, whose model Shoal cannot build; what "
                    f"the program kept of trial {number} is in {program_directory(self.directory, number)}"
                )
            if changed := edits(journal.study.get("sources", {})):
                names = ", ".join(edit.path for edit in changed)
                _log.warning("the model may not be what was trained, as the task was edited since: %s", names)
            from shoal.train.trial_runtime import trained_model  # imports torch, which tables do not need

            with applied(journal.spec.settings):
                return trained_model(journal.blob("task"), row.trial, self.directory)

    def retry(self, numbers: int | Iterable[int] | None = None) -> list[int]:
        """Retry failed trials: in the process that runs the study, or else once it is resumed.

        Such a trial goes on from its newest checkpoint, or begins anew, and trains up to the budget at which it failed.
        Its failures are counted from zero. Its reports count in tables and for the best trial. The algorithm does not
        observe them: it has decided without the trial, and a replay must give the same study.

        Args:
            numbers: Numbers of the trials, one or several; None: all failed trials.

        Returns:
            Numbers of the trials.

        Raises:
            ShoalError: a trial does not exist or has not failed; or no trial has failed.
            JournalError: the directory of the study cannot be written.
        """
        return client.retry(self.directory, numbers)

    def pause(self, numbers: int | Iterable[int]) -> list[int]:
        """Pause trials: in the process that runs the study, or else once it is resumed.

        A running trial leaves its job at the next step, with a checkpoint. Trials that must be compared with it wait.
        It stays paused after a stop or kill of the study.

        Args:
            numbers: Numbers of the trials, one or several.

        Returns:
            Numbers of the trials.

        Raises:
            ShoalError: a trial does not exist, has ended or is paused already; or no trial is named.
            JournalError: the directory of the study cannot be written.
        """
        return client.pause(self.directory, numbers)

    def resume(self, numbers: int | Iterable[int]) -> list[int]:
        """Resume paused trials at the step at which they were paused.

        Args:
            numbers: Numbers of the trials, one or several.

        Returns:
            Numbers of the trials.

        Raises:
            ShoalError: a trial does not exist, has ended or is not paused; or no trial is named.
            JournalError: as in `pause`.
        """
        return client.resume(self.directory, numbers)

    def stop(self, numbers: int | Iterable[int]) -> list[int]:
        """Stop trials for good: in the process that runs the study, or else once it is resumed.

        They become STOPPED, and their reports count. The algorithm observes a failure of each, so that no rung waits.

        Args:
            numbers: Numbers of the trials, one or several.

        Returns:
            Numbers of the trials.

        Raises:
            ShoalError: a trial does not exist, has ended or is to be stopped already; or no trial is named.
            JournalError: as in `pause`.
        """
        return client.stop(self.directory, numbers)

    def policy(self, name: str) -> None:
        """Change the policy: in the process that runs the study, and whenever it is resumed.

        Args:
            name: One of `shoal.plan.schedule.POLICIES`.

        Raises:
            PolicyError: the policy does not exist.
            JournalError: as in `pause`.
        """
        client.policy(self.directory, name)

    def add(self, config: Config, epochs: int, *, outside: bool = False) -> Config:
        """Add a trial of your own: in the process that runs the study, or else once it is resumed.

        Its number is 1000000 or above. Its reports count in tables and for the best trial. The algorithm does not
        observe it or decide about it: the trial is COMPLETE after its epochs.

        Args:
            config: Config of the trial; missing constants of the space are filled in.
            epochs: Number of epochs to train.
            outside: Whether the config may lie outside the space; `shoal status` and the journal name what does.

        Returns:
            The whole config.

        Raises:
            ShoalError: the config lies outside the space though `outside` is false, or cannot be stored in the journal;
                or `epochs` is not a positive integer.
            JournalError: as in `pause`.
        """
        return client.add(self.directory, config, epochs, outside=outside)

    def clone(
        self,
        numbers: int | Iterable[int],
        changes: Mapping[str, Any] | None = None,
        *,
        epochs: int | None = None,
        anew: bool = False,
        outside: bool = False,
    ) -> list[Config]:
        """Add clones of trials with some values changed, as in `add`.

        A clone begins with the original's newest checkpoint of the end of an epoch, with the optimizer's state as far
        as it fits.

        Args:
            numbers: Numbers of the trials to clone, one or several.
            changes: Name of a parameter, with dots where it is nested -> its value.
            epochs: Budget of each clone, epochs of the original included; None: the budget of the original.
            anew: Whether clones begin with new weights instead.
            outside: As in `add`.

        Returns:
            The whole config of each clone, by the originals' numbers.

        Raises:
            ShoalError: a trial does not exist or has no checkpoint of the end of an epoch; no epochs are left to train;
                or as in `add`.
            JournalError: as in `pause`.
        """
        return client.clone(self.directory, numbers, changes or {}, epochs=epochs, anew=anew, outside=outside)

    def add_devices(self, names: str | Sequence[str], patience: float = 60.0) -> list[str]:
        """Add devices to the study, new or removed ones: at once, or once it is resumed.

        Args:
            names: Names of the devices, or one name: "cuda:1", ["cuda:0", "cuda:1"].
            patience: Longest wait in seconds for the process that runs the study; 0: no wait, for code that runs in
                that process, such as a back end, and would wait for itself.

        Returns:
            Names of the study's devices afterwards; without a running process or a wait, those that it will have.

        Raises:
            DeviceError: a device is named twice, in use already, or not there; or the request is not carried out in
                time, and stays pending.
            JournalError: as in `pause`.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        return client.change_devices(self.directory, "add devices", wanted, patience=patience)

    def remove_devices(self, names: str | Sequence[str], patience: float = 60.0) -> list[str]:
        """Remove devices from the study: at once, or once it is resumed.

        Jobs on them stop after a checkpoint; their trials go on elsewhere.

        Args:
            names: Names of the devices, or one name.
            patience: As in `add_devices`.

        Returns:
            As in `add_devices`.

        Raises:
            DeviceError: a device is named twice, or the study does not have it; or as in `add_devices`.
            JournalError: as in `pause`.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        return client.change_devices(self.directory, "remove devices", wanted, patience=patience)

    def pause_study(self) -> None:
        """Stop all jobs after a checkpoint, and start none until `resume_study`; the study's process goes on.

        The study stays paused after a stop or kill.

        Raises:
            ShoalError: the study is paused already, or has ended.
            JournalError: as in `pause`.
        """
        client.pause_study(self.directory)

    def resume_study(self) -> None:
        """Resume the study after `pause_study`.

        Raises:
            ShoalError: the study is not paused, or has ended.
            JournalError: as in `pause`.
        """
        client.resume_study(self.directory)

    def end_study(self) -> None:
        """End the study: all jobs stop after a checkpoint, and open trials become STOPPED.

        The algorithm is asked for no further trials.

        Raises:
            ShoalError: the study has ended, or is to end already.
            JournalError: as in `pause`.
        """
        client.end_study(self.directory)

    def rerun(self, number: int, devices: str | Sequence[str] | None = None) -> Rerun:
        """Train a trial again, alone, in this process, and compare its metrics with those recorded.

        The trial trains from its start for as many epochs as it has reported, with its own seed, order of samples and
        random numbers. The study's directory does not change. In a process that did not begin the study, this runs code
        from the directory.

        Args:
            number: Number of the trial.
            devices: Devices as in `tune`, of which the first is used; the default are the study's own.

        Returns:
            The `differences` by metric, the `largest` of them, and both curves. In float64 they differ by rounding,
            unless training is chaotic; see docs/fusion.md. `changed` holds files of the task that were edited since the
            study last ran, `edits` the edits with which it was resumed after the trial was proposed.

        Raises:
            ShoalError: the trial does not exist, failed, has no reports, or began with another trial's weights; or a
                user's program trained it.
            Exception: any error of the task's methods.
        """
        with JournalView.read(self.directory) as journal:
            check_study(journal)
            row, device = find_rerun(journal, number, devices)
            spec, task, study = journal.spec, journal.blob("task"), journal.study
            # a FAILED report of a retried trial is not a report of an epoch
            recorded = [report for report in journal.curve(number) if report.state is not TrialState.FAILED]
        sys.path.extend(path for path in spec.paths if path not in sys.path)
        from shoal.train.run import retrain  # imports torch, which tables do not need

        found = retrain(task, row.trial, recorded[-1].epoch, device, spec.settings)
        return Rerun.of(row.trial, device.name, recorded, found, study)

    def __repr__(self) -> str:
        return f"Study({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """Return the study for a notebook: its state, the best value over time, and the best trials."""
        with JournalView.read(self.directory) as journal:
            return notebook_html(overview(journal, time.time()))


def _row(journal: JournalView, number: int) -> TrialRow:
    rows = {row.number: row for row in journal.trials()}
    if number not in rows:
        raise ShoalError(f"the study in {journal.directory} has no trial {number}; it has {len(rows)} trials, from 0")
    return rows[number]
