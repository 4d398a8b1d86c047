"""The finished trials of earlier studies, from which the model of a new study learns."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as short

from shoal.core.constraint import with_directions
from shoal.core.domain import Domain
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.errors import ShoalError
from shoal.core.rows import TrialRow
from shoal.core.space import Space, flatten, is_number
from shoal.core.trial import EarlierTrial, TrialState
from shoal.host.paths import absolute, as_given, check_path
from shoal.journal.view import JournalView
from shoal.spec import StudySpec

__all__ = ["earlier_trials", "no_effect"]

_MOST_TRIALS = 2000
"""Most earlier trials, since the specification of a study, which each reader reads, has them all."""

_MOST_REASONS = 3


def earlier_trials(
    directories: object, spec: StudySpec, budgets: Sequence[int], of_best: EpochOrder = LAST_EPOCHS
) -> tuple[list[EarlierTrial], list[str]]:
    """Read the trials of earlier studies that a new study can use.

    A trial can be used if its configuration is in the space, it trained from its start, and has values at one of the
    budgets. Of a study with repeats the configurations count, with their aggregates.

    Args:
        directories: Argument `warm_start` of `tune`.
        spec: Specification of the new study.
        budgets: Epochs of the values that the algorithm can use; if empty, the studies are only checked.
        of_best: Which epoch until a budget has the value at that budget; by default that of the budget itself.

    Returns:
        The trials, and for each study a line for people, "31 of 40 trials of runs/a; 9 with `lr` > 0.1".

    Raises:
        ShoalError: the argument is no list of directories; a study has another metric or mode, or no trial that can be
            used; or there are too many trials.
        JournalError: a directory has no study.
    """
    if not isinstance(directories, list | tuple):
        raise ShoalError(f'`warm_start` must be a list of directories, such as ["runs/a"], got {short(directories)}')
    found: list[EarlierTrial] = []
    lines: list[str] = []
    seen: set[Path] = set()
    for given in directories:
        check_path(given)
        directory = absolute(given)
        if directory.resolve() in seen:
            raise ShoalError(f"`warm_start` names {as_given(directory)} twice; name each study once")
        seen.add(directory.resolve())
        with JournalView.read(directory) as journal:
            _check_goals(journal, spec)
            if budgets:
                trials, line = _usable(journal, spec, sorted(budgets), of_best)
                found += trials
                lines.append(line)
    if len(found) > _MOST_TRIALS:
        raise ShoalError(f"`warm_start` takes at most {_MOST_TRIALS} trials, got {len(found)}; name fewer studies")
    return found, lines


def no_effect(algorithm: str, directories: Sequence[Path | str]) -> str:
    """The warning that an algorithm does not use earlier trials, with what is possible instead."""
    return (
        f"`warm_start` has no effect on {algorithm}, which has no model that earlier trials could enter; their best "
        f'configurations can be tried first: initial=shoal.Study("{directories[0]}").top(5)'
    )


def _check_goals(journal: JournalView, spec: StudySpec) -> None:
    goals = journal.objectives, spec.objectives
    if set(goals[0]) != set(goals[1]):
        theirs, own = (", ".join(f"{goal.metric} ({goal.mode})" for goal in each) for each in goals)
        raise ShoalError(
            f"the study in {as_given(journal.directory)} compares trials by {theirs}, and this one by {own}; "
            "`warm_start` needs the same metrics and modes"
        )


def _usable(
    journal: JournalView, spec: StudySpec, budgets: Sequence[int], of_best: EpochOrder
) -> tuple[list[EarlierTrial], str]:
    """The trials of one study that can be used, with the line on them."""
    space, found, refused = Space.from_json(spec.space), [], Counter[str]()
    rows = journal.configurations()
    for row in rows:
        refusal = _refusal(row, journal) or _why_outside(space, row)
        if not refusal:
            metrics = _values(journal, row, spec, budgets, of_best)
            if metrics:
                found.append(EarlierTrial(row.config, metrics, stopped=row.state is TrialState.STOPPED))
                continue
            names = " and ".join(
                dict.fromkeys(goal.metric for goal in of_best.directions(spec.objectives, spec.bounds))
            )
            epochs = ", ".join(map(str, budgets))
            refusal = f"without {names} at {spec.unit.removesuffix('s')} {epochs}"
        refused[refusal] += 1
    reasons = _reasons_text(refused)
    noun = "configurations" if journal.spec.repetition.size > 1 else "trials"
    if not found:
        raise ShoalError(
            f"`warm_start` can use none of the {len(rows)} {noun} of {as_given(journal.directory)}"
            f"{reasons and f': {reasons}'}; leave the study out"
        )
    used = f"{len(found)} of {len(rows)} {noun} of {as_given(journal.directory)}"
    return found, f"{used}; {reasons}" if reasons else used


def _reasons_text(refused: Counter[str]) -> str:
    most = refused.most_common(_MOST_REASONS)
    others = refused.total() - sum(count for _, count in most)
    return ", ".join([*(f"{count} {reason}" for reason, count in most), *([f"{others} others"] if others else [])])


def _refusal(row: TrialRow, journal: JournalView) -> str:
    """Why the training of a trial cannot be used; "" if it can."""
    if row.state is TrialState.FAILED:
        return "failed"
    if not row.state.final or not journal.spec.repetition.is_whole(row):
        return "not finished"
    if row.trial.origin is not None:
        return "begun with the weights of another"
    return ""


def _why_outside(space: Space, row: TrialRow) -> str:
    """Why the configuration of a trial is not in a space, in words that are the same for many; "" if it is."""
    faults = space.faults(row.config)
    if not faults:
        return ""
    values, leaves = flatten(row.config), space.leaves()
    for name, leaf in leaves.items():
        if name not in values:
            if not leaf.optional:
                return f"without `{name}`"
            continue
        value, domain = values[name], leaf.values[0]
        if len(leaf.values) == 1 and isinstance(domain, Domain) and is_number(value):
            low, high = domain.value_at(0), domain.value_at(1)
            if is_number(low) and not low <= value <= high:
                return f"with `{name}` > {high:g}" if value > high else f"with `{name}` < {low:g}"
    return next((f"with `{name}`, which the space lacks" for name in values if name not in leaves), faults[0])


def _values(
    journal: JournalView, row: TrialRow, spec: StudySpec, budgets: Sequence[int], of_best: EpochOrder
) -> dict[int, dict[str, float]]:
    """Budget -> the values of the metrics and of the constraints then; without those of which one is missing."""
    needed = of_best.directions(spec.objectives, spec.bounds)
    names = [goal.metric for goal in with_directions(spec.objectives, spec.bounds)]
    found: dict[int, dict[str, float]] = {}
    best: Mapping[str, float] = {}
    for each in journal.spec.repetition.curve_of(row, journal.curve, needed):
        if each.state is TrialState.FAILED or not all(name in each.metrics for name in names):
            continue
        if of_best.improves(each.metrics, best):
            best = each.metrics
        if each.epoch in budgets and (best or not of_best.objectives):
            found[each.epoch] = {name: (best or each.metrics)[name] for name in names}
    return found
