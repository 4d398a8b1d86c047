"""Pictures of a study by matplotlib: Optuna's plots of its trials, and the learning curves."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from math import isfinite, nan
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from shoal.algorithms.sampler import directions, varying_domains, without_optuna_info
from shoal.core.errors import ShoalError
from shoal.core.objective import Objective
from shoal.core.ranking import ranked, why_no_best
from shoal.core.rows import TrialRow, values
from shoal.journal.view import JournalView
from shoal.look.budget_values import BudgetValues, budget_values
from shoal.look.importance import importance
from shoal.look.optuna_study import optuna_study, optuna_study_at
from shoal.look.page.views import curves_view

if TYPE_CHECKING:
    import optuna
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "plot"]

_COLOURED = 6
"""Most curves that have a colour and a name, those of the best trials."""
_TITLE, _LABEL = 60, 14
"""Most characters of a line of a title, and of the name of a category."""
_DECADES = 2
"""Values over more decades have a logarithmic axis."""


def plot(directory: Path, kind: str, budget: int | None) -> "Figure":
    """Draw a picture of a study; see `Study.plot`."""
    if not isinstance(kind, str) or kind not in PLOTS:
        raise ShoalError(f"`kind` must be one of {', '.join(PLOTS)}, got {kind!r}")
    if budget is not None and kind not in _AT_A_BUDGET:
        raise ShoalError(f"`budget` is for {', '.join(_AT_A_BUDGET)}; plot {kind!r} shows all epochs, got {budget!r}")
    if find_spec("matplotlib") is None:
        raise ShoalError("a plot needs matplotlib. Install it with: pip install matplotlib")
    import matplotlib.pyplot as plt
    from optuna.exceptions import ExperimentalWarning

    with JournalView.read(directory) as journal:
        rows = journal.configurations()
        if not any(values(row, journal.objectives) for row in rows):
            raise ShoalError(f"no trial of the study in {directory} {why_no_best(rows, journal.objectives)}")
        found = budget_values(journal, budget)
        if kind in _AT_A_BUDGET and not found.values:
            raise ShoalError(
                f"no trial has a value of {found.objective.metric!r} after {found.budget} {found.unit}; give a lower "
                "budget, or none"
            )
        # Optuna's plots set a style for the whole process.
        with warnings.catch_warnings(), plt.rc_context({"figure.constrained_layout.use": True}):
            warnings.simplefilter("ignore", ExperimentalWarning)
            warnings.filterwarnings("ignore", "Attempting to set identical", UserWarning)  # one trial has a parameter
            plt.style.use("ggplot")
            figure = _AT_A_BUDGET[kind](found) if kind in _AT_A_BUDGET else _WHOLE[kind](journal)
    plt.close(figure)  # it is the caller's alone, and a notebook shows it once
    return figure


def _history(journal: JournalView) -> "Figure":
    from optuna.visualization.matplotlib import plot_optimization_history

    goal = journal.objectives[0]
    study = _with_stopped(journal, [goal])
    axes = plot_optimization_history(study, target_name=goal.metric)
    axes.set_title(f"{goal.metric} of each trial, and the best so far")
    axes.legend()
    ended = [row for row in journal.configurations() if row.state.final]
    _bars(axes, enumerate(row.objective for row in ended), _deviations(ended, goal))
    _limit_values(axes, [trial.value for trial in study.trials if trial.value is not None], goal)
    return _figure(axes)


def _curves(journal: JournalView) -> "Figure":
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    goal = journal.objectives[0]
    found = curves_view(journal.directory, goal.metric)["curves"]
    rows = ranked(journal.configurations(), journal.objectives)
    best = [str(row.number) for row in rows if values(row, journal.objectives) is not None][:_COLOURED]
    _, axes = plt.subplots()
    styles: dict[str, dict[str, Any]] = {x: {"color": "0.6", "linewidth": 0.7, "alpha": 0.6} for x in found}
    for place, number in enumerate(best):
        styles.pop(number)  # the best are drawn last, over the others
        styles[number] = {"color": f"C{place}", "label": f"trial {number}"}
    for number, style in styles.items():
        epochs, _, measured = found[number]
        values_or_gaps = [nan if value is None else value for value in measured]
        axes.plot(epochs, values_or_gaps, marker="." if len(epochs) == 1 else "", **style)
    axes.set(title="Learning curves, the best trials in colour", ylabel=goal.metric)
    axes.set_xlabel("epoch" if journal.spec.unit == "epochs" else "step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _limit_values(axes, [value for _, _, measured in found.values() for value in measured if value is not None], goal)
    axes.legend()
    return _figure(axes)


def _front(journal: JournalView) -> "Figure":
    from optuna.visualization.matplotlib import plot_pareto_front

    goals = journal.objectives
    if len(goals) not in (2, 3):
        raise ShoalError(f"plot 'front' needs 2 or 3 metrics; the study compares trials by {len(goals)}")
    axes = plot_pareto_front(_with_stopped(journal, goals), target_names=[goal.metric for goal in goals])
    axes.set_title("Pareto front of the last values")
    return _figure(axes)


def _slice(found: BudgetValues) -> "Figure":
    from optuna.visualization.matplotlib import plot_slice

    drawn = plot_slice(optuna_study_at(found), target_name=found.objective.metric)
    every = list(getattr(drawn, "flat", [drawn]))
    figure = _figure(every[0])
    for axes in every:
        axes.set_title("")
        _limit_values(axes, list(found.values.values()), found.objective)
        axes.tick_params(axis="x", rotation=30)
        _shorten_labels(figure, axes.xaxis)
        points = [(float(x), float(y)) for x, y in axes.collections[0].get_offsets()]
        _bars(axes, points, {found.values[number]: spread for number, spread in found.deviations.items()})
    for colours in figure.axes[len(every) :]:
        colours.set_ylabel("order of the trials")
    figure.suptitle(_title(found), fontsize="medium")
    return figure


def _parallel(found: BudgetValues) -> "Figure":
    from optuna.visualization.matplotlib import plot_parallel_coordinate

    study = optuna_study_at(found)
    axes = plot_parallel_coordinate(study, target_name=found.objective.metric)
    figure = _figure(axes)
    figure.set_figwidth(2.5 + 1.5 * len(varying_domains(found.space)))
    for each in figure.axes:
        each.grid(visible=False)
        if each is not axes:
            _shorten_labels(figure, each.yaxis)
            for label in each.get_yticklabels():
                label.set_bbox({"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1})
    axes.set_title("")
    figure.suptitle(_title(found), fontsize="medium")
    return figure


def _importance(found: BudgetValues) -> "Figure":
    import matplotlib.pyplot as plt

    shown = importance(found, "ped-anova")
    _, axes = plt.subplots(figsize=(6.4, 1.6 + 0.35 * len(shown.shares)))
    bars = axes.barh(list(shown.shares), list(shown.shares.values()))
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel(f"importance for {found.objective.metric} ({shown.method})")
    figure = _figure(axes)
    figure.suptitle(_title(found), fontsize="medium")
    return figure


_WHOLE: dict[str, Callable[[JournalView], "Figure"]] = {"history": _history, "curves": _curves, "front": _front}
_AT_A_BUDGET: dict[str, Callable[[BudgetValues], "Figure"]] = {
    "slice": _slice,
    "parallel": _parallel,
    "importance": _importance,
}
PLOTS = ("history", "curves", "slice", "parallel", "importance", "front")
"""The kinds of pictures."""


def _with_stopped(journal: JournalView, goals: Sequence[Objective]) -> "optuna.Study":
    """The ended trials as an Optuna study in which stopped ones are COMPLETE, as its plots show no others."""
    import optuna

    known = optuna_study(
        ((row, ()) for row in journal.configurations()), journal.space, goals, "plot", None, journal.spec.bounds
    )
    with without_optuna_info():
        study = optuna.create_study(directions=directions(goals))
    for trial in known.trials:
        if trial.values is not None:
            trial.state = optuna.trial.TrialState.COMPLETE
        study.add_trial(trial)
    return study


def _deviations(rows: Iterable[TrialRow], goal: Objective) -> dict[float, float]:
    """Value of each repeated configuration -> its standard deviation."""
    return {
        row.objective: row.deviations[goal.metric]
        for row in rows
        if row.objective is not None and goal.metric in row.deviations
    }


def _bars(axes: "Axes", points: Iterable[tuple[float, float | None]], deviations: Mapping[float, float]) -> None:
    """Draw the standard deviations of repeated configurations through their points."""
    drawn = [(x, y, deviations[y]) for x, y in points if y is not None and y in deviations]
    if drawn:
        places, heights, spreads = zip(*drawn, strict=True)
        axes.errorbar(places, heights, spreads, fmt="none", ecolor="0.5", elinewidth=1, zorder=0)


def _title(found: BudgetValues) -> str:
    return "\n".join([str(found), *wrap(found.selection, _TITLE)])


def _limit_values(axes: "Axes", shown: Sequence[float], goal: Objective) -> None:
    """Scale the axis of the values: a few diverged trials must not make a line of all others."""
    finite = sorted(filter(isfinite, shown))
    if not finite:
        return
    cut = len(finite) // 20
    low, high = (finite[0], finite[len(finite) - 1 - cut]) if goal.mode == "min" else (finite[cut], finite[-1])
    if finite[0] > 0 and high > low * 10**_DECADES:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.2, high * 1.2)
    else:
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)


def _shorten_labels(figure: "Figure", axis: "Axis") -> None:
    """Shorten the names of categories, which are as long as a user made them."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    figure.draw_without_rendering()  # only then do labels have a text
    names = [label.get_text() for label in axis.get_ticklabels()]
    if any(len(name) > _LABEL for name in names if "mathdefault" not in name):
        axis.set_major_locator(FixedLocator(list(axis.get_majorticklocs())))
        axis.set_major_formatter(FixedFormatter([x if len(x) <= _LABEL else f"{x[: _LABEL - 1]}…" for x in names]))


def _figure(axes: Any) -> "Figure":
    figure: Figure = axes.figure
    return figure
