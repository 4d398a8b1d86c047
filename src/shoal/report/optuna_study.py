"""The trials of a study as a study of Optuna's, for its dashboard and its plots."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shoal.domain import Choice
from shoal.journal.rows import TrialRow
from shoal.space import Space
from shoal.trial import Report, TrialState

if TYPE_CHECKING:
    import optuna

__all__ = ["optuna_study"]


def optuna_study(
    trials: Iterable[tuple[TrialRow, Iterable[Report]]],
    space: Space,
    metric: str,
    mode: str,
    name: str,
    storage: "str | optuna.storages.BaseStorage | None" = None,
) -> "optuna.Study":
    """A new study of Optuna's with all trials that have ended, in the order of their numbers.

    A trial that was stopped is PRUNED there, one that failed, or whose last value is NaN, is FAIL. Its values at the
    end of each epoch are intermediate values; parameters are called by their paths, and a choice whose options are no
    plain values is the position of one. What has not ended is left out.

    Args:
        trials: each with its reports.
        space: that they come from.
        metric: to be compared by; an attribute of the new study.
        mode: "min" or "max".
        name: of the new study.
        storage: a database's address or one of Optuna's storages; None: in memory.

    Raises:
        optuna.exceptions.DuplicatedStudyError: the storage has a study of that name.
    """
    import optuna
    from optuna.trial import TrialState as There

    study = optuna.create_study(study_name=name, storage=storage, direction="minimize" if mode == "min" else "maximize")
    study.set_user_attr("metric", metric)
    states = {TrialState.COMPLETE: There.COMPLETE, TrialState.STOPPED: There.PRUNED, TrialState.FAILED: There.FAIL}
    for row, reports in trials:
        if row.state not in states:
            continue
        state = states[row.state] if row.objective is not None else There.FAIL
        parameters = space.parameters(row.config)
        curve = {report.epoch: report.metrics[metric] for report in reports if metric in report.metrics}
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=row.objective if state is not There.FAIL else None,
                params={
                    path: domain.shown(value) if isinstance(domain, Choice) else value
                    for path, (domain, value) in parameters.items()
                },
                distributions={path: domain.to_optuna() for path, (domain, _) in parameters.items()},
                intermediate_values=curve,
                user_attrs={"number": row.number, "epochs": row.epoch, "reason": row.reason, "seconds": row.seconds},
            )
        )
    return study
