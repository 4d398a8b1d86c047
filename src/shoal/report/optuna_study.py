"""The trials of a study as a study of Optuna's, for its dashboard and its plots."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.algorithms.sampler import directions, quiet
from shoal.domain import Choice
from shoal.journal.rows import TrialRow
from shoal.objective import Objective
from shoal.report.ranking import values
from shoal.space import Space
from shoal.trial import Report, TrialState

if TYPE_CHECKING:
    import optuna

__all__ = ["attributes", "curve", "frozen", "metrics", "optuna_study", "state"]


def optuna_study(
    trials: Iterable[tuple[TrialRow, Iterable[Report]]],
    space: Space,
    objectives: Sequence[Objective],
    name: str,
    storage: "str | optuna.storages.BaseStorage | None" = None,
) -> "optuna.Study":
    """A new study of Optuna's with all trials that have ended, in the order of their numbers; see `frozen`.

    What has not ended is left out.

    Args:
        trials: each with its reports.
        space: that they come from.
        objectives: to be compared by; their metrics are an attribute of the new study.
        name: of the new study.
        storage: a database's address or one of Optuna's storages; None: in memory.

    Raises:
        optuna.exceptions.DuplicatedStudyError: the storage has a study of that name.
    """
    import optuna

    with quiet():
        study = optuna.create_study(study_name=name, storage=storage, directions=directions(objectives))
    study.set_user_attr("metric", metrics(objectives))
    for row, reports in trials:
        if row.state.final:
            study.add_trial(frozen(row, reports, space, objectives))
    return study


def metrics(objectives: Sequence[Objective]) -> str | list[str]:
    """Their names as an attribute of a study."""
    names = [objective.metric for objective in objectives]
    return names if len(names) > 1 else names[0]


def state(row: TrialRow, objectives: Sequence[Objective]) -> "optuna.trial.TrialState":
    """Where a trial stands, in Optuna's words.

    One that was stopped is PRUNED, one that failed, or whose last value is NaN, is FAIL. One that has begun and not
    ended is RUNNING, also while it is paused or waits to go on: Optuna has no other word that it can come back from.
    One that has not begun is WAITING.
    """
    from optuna.trial import TrialState as There

    if row.state.final and values(row, objectives) is None:
        return There.FAIL
    if row.state is TrialState.PENDING and not row.epoch:
        return There.WAITING
    return {TrialState.COMPLETE: There.COMPLETE, TrialState.STOPPED: There.PRUNED}.get(row.state, There.RUNNING)


def curve(reports: Iterable[Report], objectives: Sequence[Objective]) -> dict[int, float]:
    """The metric at the end of each epoch; empty for several metrics, of which Optuna knows no curves."""
    if len(objectives) > 1:
        return {}
    metric = objectives[0].metric
    return {report.epoch: report.metrics[metric] for report in reports if metric in report.metrics}


def attributes(row: TrialRow) -> Mapping[str, Any]:
    """What else there is to say of a trial: user attributes there."""
    return {
        "number": row.number,
        "state": str(row.state),
        "epochs": row.epoch,
        "reason": row.reason,
        "seconds": row.seconds,
    }


def frozen(
    row: TrialRow, reports: Iterable[Report], space: Space, objectives: Sequence[Objective]
) -> "optuna.trial.FrozenTrial":
    """A trial as Optuna has it.

    Its values at the end of each epoch are intermediate values; parameters are called by their paths, and a choice
    whose options are no plain values is the position of one.

    Args:
        row: the trial.
        reports: of it.
        space: that it comes from.
        objectives: of the study.
    """
    import optuna

    parameters = space.parameters(row.config)
    there = state(row, objectives)
    shown = values(row, objectives) if there.is_finished() else None
    return optuna.trial.create_trial(
        state=there,
        values=None if shown is None else list(shown),
        params={
            path: domain.shown(value) if isinstance(domain, Choice) else value
            for path, (domain, value) in parameters.items()
        },
        distributions={path: domain.to_optuna() for path, (domain, _) in parameters.items()},
        intermediate_values=curve(reports, objectives),
        user_attrs=dict(attributes(row)),
    )
