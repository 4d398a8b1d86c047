"""The class `Study`: results of a study in its directory, and requests to it, while it runs or afterwards."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.algorithms.base import check_integer
from shoal.core.errors import CheckpointError, ShoalError
from shoal.core.hypervolume import Hypervolume
from shoal.core.plain import plain
from shoal.core.ranking import front, front_volume, ranked, why_no_best
from shoal.core.rows import CheckRow, TrialRow, values
from shoal.core.space import config_text
from shoal.core.trial import Config, TrialState
from shoal.host.paths import absolute, check_path, extend_module_path
from shoal.host.process_settings import applied
from shoal.host.remedy import command
from shoal.host.sources import edits
from shoal.journal.check import check_study, named_trials
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.look.budget_values import budget_values
from shoal.look.frame import dataframe, history_frame
from shoal.look.grid import StudyGrid, journal_grid
from shoal.look.importance import Importance, importance
from shoal.look.optuna_study import journal_optuna_study
from shoal.look.overview import notebook_html, overview
from shoal.look.plots import plot
from shoal.look.rerun import Rerun, find_rerun
from shoal.look.snapshot import how_ended, trial_verdicts
from shoal.study_requests import StudyRequests
from shoal.train.checkpoint_paths import is_exportable, program_directory

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn

    from shoal.train.checkpoint import Weights

__all__ = ["Study"]

_log = logging.getLogger("shoal.study")


class Study(StudyRequests):
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
        """The trial with the best value of the metric, at its best epoch or its last (`rank_by`), of those that keep
        the constraints; with `repeats` or `folds`, the best configuration, under the number of its median trial.

        Raises:
            ShoalError: no trial has a value, none is feasible (it says by how much), or there are several metrics.
        """
        if len(self.objectives) > 1:
            raise ShoalError(
                f"the study in {self.directory} compares trials by {len(self.objectives)} metrics, so no single one is "
                "the best; `pareto` are those that no other dominates"
            )
        for best in self.pareto:
            return best
        why = why_no_best(self.configurations, self.objectives)
        raise ShoalError(f"no trial of the study in {self.directory} {why}")

    @property
    def pareto(self) -> list[TrialRow]:
        """The Pareto front by the metrics at the epochs that rank trials; empty while no trial with values is feasible.

        A trial is on it if it keeps the constraints, and no other such trial is at least as good in all metrics and
        better in one. The first is the best by the first metric, each next one the farthest from those before.
        """
        rows = self.configurations
        best = front(rows, self.objectives)
        return ranked([row for row in rows if row.number in best], self.objectives)

    def top(self, k: int) -> list[Config]:
        """The configurations of the `k` best trials with values, the best first, for `tune(initial=...)`.

        They are ranked as in tables: feasible ones first; with several metrics the front before the others.
        With `repeats` or `folds`, configurations are ranked. Equal configurations are one. There may be fewer than `k`.

        Raises:
            AlgorithmError: `k` is not an integer of at least 1.
        """
        k = plain(k)
        check_integer("k", k)
        rows = [row for row in ranked(self.configurations, self.objectives) if values(row, self.objectives)]
        configs = {config_text(row.config): row.config for row in rows}
        return list(configs.values())[:k]

    def hypervolume(self, reference: Sequence[float] | None = None) -> Hypervolume | None:
        """The volume between the front and a reference point; None while a metric has no finite value.

        Args:
            reference: A value of each metric, in their order, beyond which trials add nothing. None: the greater of
                1.1 w and 0.9 w, for the worst loss w of the first ten trials with values, so that it stays the same.

        Raises:
            AlgorithmError: there are not two or three metrics, or the reference is not a finite value of each.
        """
        with JournalView.read(self.directory) as journal:
            return front_volume(journal.configurations(), self.objectives, journal.study, reference)

    def dataframe(self) -> "pd.DataFrame":
        """Return one row per trial: its state in the words of `shoal trials`, config, metrics (last and best), epochs,
        seconds, device, array, proof and reason; with constraints also its `violation`, with `repeats` or `folds` the
        number of its configuration.

        `proof` says whether the trial trains fused or plain, and what was proven of it; see the method `proof`.

        After a kill of the study's process its running trials are "interrupted" until the study is resumed.
        """
        with JournalView.read(self.directory) as journal:
            runs, proof, spec = journal.writer() is not None, trial_verdicts(journal), journal.spec
            found = dataframe(journal.trials(), runs=runs, proof=proof, constrained=bool(spec.constraints))
            if spec.repetition.size > 1:
                found.insert(1, "configuration", found["trial"].map(spec.repetition.configuration))
            return found

    def history(self, number: int | None = None) -> "pd.DataFrame":
        """Return a row for each report of a trial, in order, or of all trials by their numbers.

        Columns: `trial` if there is no `number`, `epoch` (of a function or command `step`), each metric by its name
        (NaN where a report has none), `seconds` that the trial trained since its report before, and `time`, at which
        the report was recorded, in UTC. A metric with the name of another column is called `metric.<name>`.

        Args:
            number: Number of the trial; None: all trials.

        Raises:
            ShoalError: there is no such trial, or pandas is not installed.
        """
        with JournalView.read(self.directory) as journal:
            return history_frame(journal, number)

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
            named_trials(journal, [number])
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
            kind: "history": the value that ranks each trial, and the best so far; "curves": the learning curves;
                "slice": the value by each parameter; "parallel": parallel coordinates; "importance": see `importance`;
                "front": the Pareto front of two or three metrics. All but "front" show the first metric. All but
                "curves" and "importance" are Optuna's plots.
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
            return journal_optuna_study(journal, name or self.directory.resolve().name, storage)

    def best_model(self, which: Literal["best", "last"] = "best") -> "nn.Module":
        """The best trial's model with its trained weights: `model` of `best_trial`.

        Raises:
            ShoalError: no trial has a value of the metric, there are several metrics, or no `Task` was trained.
            CheckpointError: the checkpoint is missing or damaged.
        """
        return self.model(self.best_trial.number, which)

    def model(self, number: int, which: Literal["best", "last"] = "best") -> "nn.Module":
        """A trial's model with the weights of its best epoch or its newest checkpoint, on the CPU in evaluation mode.

        With `Task.ema` the averaged parameters take the place of the trained ones. The method calls the task's
        `model`: that of its module now if the module can be imported, else the recorded one. In a process that did not
        begin the study, this runs code from the study's directory. A warning names files of the task that were edited
        since the study last ran, or the weights that are returned while those of the best epoch are not on the disk.

        Args:
            number: Number of the trial.
            which: "best" for the weights of the row's `best_epoch`, if it has one; "last" for the newest.

        Raises:
            ShoalError: there is no such trial, `which` is unknown, or no `Task` was trained.
            CheckpointError: the trial has no intact checkpoint, has saved none yet, or it was deleted by the rule
                `keep` of the study.
        """
        with JournalView.read(self.directory) as journal:
            (row,) = named_trials(journal, [number])
            best = _best_epoch(row, which)
            _check_weights(journal, row)
            if journal.spec.opaque:
                raise ShoalError(
                    f"the study in {self.directory} trained a program of yours, whose model Shoal cannot build; what "
                    f"the program kept of trial {number} is in {program_directory(self.directory, number, best)}"
                )
            return _trained(journal, row, best)[0]

    def export(
        self,
        number: int,
        directory: Path | str | None = None,
        *,
        which: Literal["best", "last"] = "best",
        adapter: bool = False,
        merged: bool = False,
    ) -> Path:
        """Write a folder with a trial's trained model, from which another person loads it without this study.

        It holds the weights (model.safetensors, or model.pt without safetensors; a model of transformers or peft writes
        what `from_pretrained` reads), load.py with a function `load(device="cpu")`, the source files of the task as the
        study recorded them, trial.json (config, seeds, epoch, metrics, rank, versions), and README.md, a model card.
        Where the weights are a state dict, `load` builds the model by the task, so that it needs Shoal. Of a function
        or command the folder holds the files that it kept, and no load.py. Like `model`, this runs the task's code.

        Args:
            number: Number of the trial.
            directory: The folder, which is empty or does not exist; None: `export/<number>` in the study's directory.
            which: As in `model`.
            adapter: Whether to write the adapter of peft alone.
            merged: Whether to merge the adapter of peft into the weights of its base.

        Returns:
            The folder.

        Raises:
            ShoalError: the folder is not empty or cannot be written, there is no such trial or adapter, `adapter` and
                `merged` are both given, or the program has kept no files.
            CheckpointError: as in `model`.
        """
        if adapter and merged:
            raise ShoalError("`adapter` is the adapter alone, `merged` a model without one; give one of them")
        if directory is not None:
            check_path(directory)
        folder = self.directory / "export" / str(number) if directory is None else absolute(directory)
        with JournalView.read(self.directory) as journal:
            (row,) = named_trials(journal, [number])
            best = _best_epoch(row, which)
            _check_weights(journal, row)
            from shoal.integrations.model_folder import check_new_folder, export_model, export_program  # imports torch

            check_new_folder(folder)
            if journal.spec.opaque:
                if adapter or merged:
                    raise ShoalError("a program's files are exported as they are, without an adapter")
                return export_program(journal, row, folder, best)
            model, weights = _trained(journal, row, best)
            return export_model(journal, row, model, weights, folder, adapter=adapter, merged=merged)

    def rerun(self, number: int, devices: str | Sequence[str] | None = None) -> Rerun:
        """Train a trial again, alone, in this process, and compare its metrics with those recorded.

        The trial trains from its start for as many epochs as it has reported, with its own seed, order of samples and
        random numbers. The study's directory does not change. In a process that did not begin the study, this runs code
        from the directory.

        Args:
            number: Number of the trial.
            devices: Devices as in `tune`, of which the first is used; the default are the study's own.

        Returns:
            The `differences` by metric, the `largest` of them, `by_epoch`, and both curves. Where they differ by more
            than the rounding of a step, the trial is trained up to three times more: equally, to find metrics that are
            `irreproducible`, and from initial weights that are changed by a few roundings, in a second way if the first
            explains too little, to measure how far rounding alone carries the others; `unexplained` is their first
            difference that is larger, or None. See docs/fusion.md. `changed` holds files of the task that were edited
            since the study last ran, `edits` the edits with which it was resumed after the trial was proposed; either
            leaves nothing to tell.

        Raises:
            ShoalError: the trial does not exist, failed, has no reports, or began with another trial's weights; or a
                user's program trained it.
            Exception: any error of the task's methods.
        """
        with JournalView.read(self.directory) as journal:
            check_study(journal)
            row, device = find_rerun(journal, number, devices)
            spec, task, study = journal.spec, journal.blob("task"), journal.study
            proof = trial_verdicts(journal, number).get(number)
            continued = StudyStatistics(journal).continued_epochs(number)
            # a FAILED report of a retried trial is not a report of an epoch
            recorded = [report for report in journal.curve(number) if report.state is not TrialState.FAILED]
        extend_module_path(spec.paths)
        from shoal.train.run import retrain  # imports torch, which tables do not need

        epochs = recorded[-1].epoch
        again = retrain(task, row.trial, epochs, device, spec.settings)
        rounding = again.tolerance, again.perturbation
        found = Rerun.of(row.trial, device.name, recorded, again.reports, *rounding, study, proof, continued)
        for perturbed in (None, 0, 1):
            if found.expected is False:
                again = retrain(task, row.trial, epochs, device, spec.settings, perturbed)
                found = found.with_further(again.reports)
        return found

    def __repr__(self) -> str:
        return f"Study({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """Return the study for a notebook: its state, the best value over time, and the best trials."""
        with JournalView.read(self.directory) as journal:
            return notebook_html(overview(journal, time.time()))


def _best_epoch(row: TrialRow, which: str) -> int | None:
    """Return the epoch with whose weights a model is wanted; None for the newest."""
    if which not in ("best", "last"):
        raise ShoalError(f'`which` must be "best" or "last", got {which!r}')
    return row.best_epoch if which == "best" else None


def _trained(journal: JournalView, row: TrialRow, best: int | None) -> "tuple[nn.Module, Weights]":
    """Return a trial's model and the checkpoint of its weights; warn if the task was edited since."""
    if changed := edits(journal.study.get("sources", {})):
        names = ", ".join(edit.path for edit in changed)
        _log.warning("the model may not be what was trained, as the task was edited since: %s", names)
    extend_module_path(journal.spec.paths)
    from shoal.train.trained_model import trained_model  # imports torch, which tables do not need

    with applied(journal.spec.settings):
        return trained_model(journal.blob("task"), row.trial, journal.directory, best)


def _check_weights(journal: JournalView, row: TrialRow) -> None:
    """Raise a CheckpointError if the weights of a trial were deleted, or are not saved yet."""
    number = row.number
    if not StudyStatistics(journal).deleted().get(number):
        if journal.spec.opaque or row.state.final or is_exportable(journal.directory, number):
            return
        raise CheckpointError(
            f"trial {number} of the study in {journal.directory} has not ended, and has saved no checkpoint yet; "
            f"{command('status', journal.directory)} says how far it is"
        )
    repetition, rows = journal.spec.repetition, ranked(journal.configurations(), journal.objectives)
    configuration = repetition.configuration(number)
    rank = next(i for i, row in enumerate(rows, 1) if repetition.configuration(row.number) == configuration)
    keep, place = journal.keep, journal.directory
    raise CheckpointError(
        f"the weights of trial {number}, which ranks {rank} of {len(rows)}, were deleted by the rule of the study in "
        f"{place}, now keep={keep!r}. A trial that is pinned before keeps them: {command('pin', place, str(number))}. "
        f"Train this one again with: {command('rerun', place, str(number))}; with another seed, and weights, with: "
        f"{command('trial clone', place, str(number), '--anew')}"
    )
