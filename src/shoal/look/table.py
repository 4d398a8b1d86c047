"""Tables of trials and of the study's state: for the terminal, and as plain values for `--json`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict
from itertools import chain
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shoal.core.epoch_order import EpochOrder
from shoal.core.objective import Objective
from shoal.core.ranking import front, ranked
from shoal.core.repeats import ConfigurationRow
from shoal.core.rows import Intervention, TrialRow, Verdict
from shoal.core.space import flatten
from shoal.core.trial import TrialState, numbers_text, state_name
from shoal.look.devices import device_json, device_lines
from shoal.look.failures import (
    cause_json,
    cause_line,
    cause_lines,
    failing_json,
    failing_lines,
    unmeasured_lines,
)
from shoal.look.progress_row import ProgressRow
from shoal.look.savings import Savings
from shoal.look.snapshot import Best, Snapshot, TaskEdit
from shoal.look.text import (
    best_texts,
    config_text,
    finite_or_none,
    hypervolume_text,
    intervention_text,
    leaf_text,
    metric_text,
    number_text,
    numbered_trials,
    printable,
    progress_texts,
    savings_text,
    speedup_text,
    state_counts,
    states_text,
    task_edit_text,
    time_text,
    trial_state_text,
    trials_text,
    verdict_text,
    verdict_texts,
)

__all__ = [
    "best_table",
    "reasons_json",
    "savings_json",
    "snapshot_json",
    "status_table",
    "task_edit_json",
    "trial_json",
    "trials_table",
    "verdict_json",
]

_COLOURS = {
    TrialState.RUNNING: "cyan",
    TrialState.COMPLETE: "green",
    TrialState.FAILED: "red",
}
_GAP = 2
"""Spaces between two columns of trials."""
_MIN_CONFIG_WIDTH = 20
_INDENT_BELOW = 4
"""Spaces before the config of a trial where it has lines of its own, below the other columns."""
_SIGNIFICANCE = 0.05
"""p-values below it tell two configurations apart."""
_MAX_REASONS = 4
_MAX_REQUESTS = 3
"""Most requests of users that are shown, the newest."""
_MAX_NAMED = 3
"""Most trials that are named for one waiting reason in JSON."""


class _TrialLines:
    """The lines of `trials_table`; a rich `Table` takes half a millisecond for each of its rows.

    Args:
        head: Titles of the columns before the config, and whether each is aligned to the right.
        rows: Cells of each row, its state, its config, and its reason.
    """

    def __init__(
        self, head: Sequence[tuple[str, bool]], rows: Sequence[tuple[Sequence[str], TrialState, str, str]]
    ) -> None:
        self._head, self._rows = head, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        titles = [title for title, _ in self._head]
        columns = zip(titles, *(cells for cells, *_ in self._rows), strict=True)
        widths = [max(map(cell_len, column)) for column in columns]
        indent = sum(widths) + _GAP * len(widths)
        below = indent + _MIN_CONFIG_WIDTH > options.max_width  # the config has lines of its own
        if below:
            indent = _INDENT_BELOW
        width = max(options.max_width - indent, 1)
        styles = {state: console.get_style(colour) for state, colour in _COLOURS.items()}
        dim = console.get_style("dim")

        def aligned(cells: Sequence[str]) -> Iterator[str]:
            for cell, (_, right), wide in zip(cells, self._head, widths, strict=True):
                space = " " * (wide - cell_len(cell))
                yield f"{space}{cell}{' ' * _GAP}" if right else f"{cell}{space}{' ' * _GAP}"

        titled = "".join([*aligned(titles), "" if below else "config"])
        for line in _folded(titled.rstrip(), options.max_width, console):
            yield Segment(f"{line}\n", console.get_style("bold"))
        for cells, state, config, reason in self._rows:
            number, name, *others = aligned(cells)
            lines = _folded(config, width, console)
            if below:
                for line in _folded("".join([number, name, *others]).rstrip(), options.max_width, console):
                    yield Segment(f"{line}\n", styles.get(state))
            else:
                yield Segment(number)
                yield Segment(name, styles.get(state))
                yield Segment(f"{''.join(others)}{lines.pop(0)}\n")
            for line in lines:
                yield Segment(f"{' ' * indent}{line}\n")
            for line in _folded(reason, width, console) if reason else ():
                yield Segment(f"{' ' * indent}{line}\n", dim)


def _folded(text: str, width: int, console: Console) -> list[str]:
    """The lines of a text, folded where one is wider."""
    text = text.expandtabs()
    lines = text.split("\n")
    if all(cell_len(line) <= width for line in lines):
        return lines
    return [line.plain.rstrip() for line in Text(text).wrap(console, width, overflow="fold")]


def trials_table(
    rows: Sequence[TrialRow],
    objectives: Sequence[Objective],
    best: Set[int] | None = None,
    *,
    runs: bool = True,
    of_best: EpochOrder | None = None,
) -> Group:
    """All trials, the best first, with the reason for the state of each below its config, and what the columns mean.

    The reason of a trial that waits for others has only the epoch, which is in a column.

    With several metrics, each has its columns, and the trials of the front (`best`, if it is known) are marked.
    `of_best` is that of the study: by default the values are those of the best epoch by the first metric.
    """
    several, constrained = len(objectives) > 1, any(row.violation for row in rows)
    if best is None:
        best = front(rows, objectives) if several else set()
    deciding = (of_best or EpochOrder(tuple(objectives))).objectives[:1]
    others = "last" if deciding else "best"
    metrics = [(title, True) for goal in objectives for title in (printable(goal.metric), others)]
    head = [
        ("trial", True),
        ("state", False),
        *[("front", True)] * several,
        *metrics,
        *[("violation", True)] * constrained,
        *[("at", True)] * len(deciding),
        ("epochs", True),
        ("seconds", True),
    ]
    lines = [
        (
            (
                _numbers_text(row),
                trial_state_text(row, runs),
                *["*" if row.number in best else ""] * several,
                *(
                    text
                    for goal in objectives
                    for text in (
                        metric_text(row, goal.metric),
                        number_text((row.metrics if deciding else row.best).get(goal.metric)),
                    )
                ),
                *[number_text(row.violation) if row.violation else ""] * constrained,
                *["–" if row.best_epoch is None else str(row.best_epoch)] * len(deciding),
                f"{row.epoch}/{row.target}",
                f"{row.seconds:.1f}",
            ),
            row.state,
            config_text(row.config),
            "" if row.state is TrialState.PAUSED and not row.paused_by else printable(row.reason, lines=True),
        )
        for row in _with_repeats(ranked(rows, objectives))
    ]
    return Group(_TrialLines(head, lines), Text(_columns_text(objectives, constrained, deciding), "dim"))


def _numbers_text(row: TrialRow) -> str:
    """The number of a trial, or those of a configuration's trials."""
    return numbers_text([each.number for each in row.members])


def _with_repeats(rows: Iterable[TrialRow]) -> Iterator[TrialRow]:
    """Each row, and below that of a configuration those of its trials."""
    for row in rows:
        yield row
        if isinstance(row, ConfigurationRow):
            yield from row.repeats


def _columns_text(objectives: Sequence[Objective], constrained: bool, deciding: Sequence[Objective]) -> str:
    first = objectives[0]
    better = "lower" if first.mode == "min" else "higher"
    which = "its value at the best epoch of each trial" if deciding else "the last value"
    ranked_by = f"ranked by {printable(first.metric)}, {which} ({better} is better)"
    if len(objectives) > 1:
        ranked_by = "*: no other trial is better in all metrics; then those that only these are, and so on"
    if constrained:
        ranked_by += "\nviolation: of the constraints; feasible trials, without one, come first"
    best = "".join(f", that of the best {printable(goal.metric)}" for goal in deciding if goal != first)
    columns = f"at: the best epoch{best}; last: of the newest epoch" if deciding else "best: of all epochs"
    return f"{ranked_by}\n{columns}; seconds: of training, a trial's share of its array's"


def best_table(
    row: TrialRow,
    objectives: Sequence[Objective],
    *,
    runs: bool = True,
    following: tuple[TrialRow, float] | None = None,
) -> Table:
    """One trial with its whole config and all its metrics; those of the objectives come first.

    The values are those of its best epoch with the last ones, or the last ones with the best of each metric.
    `following` is the next best configuration, with the p-value of its difference.
    """
    first = [objective.metric for objective in objectives]
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    median = f" (the median: {row.number})" if isinstance(row, ConfigurationRow) else ""
    title = "trials" if median else "trial"
    table.add_row(title, f"{_numbers_text(row)}{median}, {trial_state_text(row, runs)}, {row.epoch} epochs")
    if row.violation:
        table.add_row("violation", f"{number_text(row.violation)}: infeasible")
    if row.best_epoch is not None:
        table.add_row("best epoch", str(row.best_epoch))
    for name in sorted(row.metrics, key=lambda name: (first.index(name) if name in first else len(first), name)):
        also, beside = ("best", row.best.get(name)) if row.best_epoch is None else ("last", row.metrics[name])
        others = "" if beside is None else f" ({also} {number_text(beside)})"
        table.add_row(Text(printable(name)), f"{metric_text(row, name)}{others}")
    for name, value in flatten(row.config).items():
        table.add_row(Text(f"config.{printable(name)}"), Text(leaf_text(value)))
    if following is not None:
        other, p = following
        where = "larger than" if p < _SIGNIFICANCE else "within"
        value = f"{metric_text(other, first[0])} by trials {_numbers_text(other)}"
        table.add_row("next", f"{value}; the difference is {where} their spread (p = {p:.2g}, Welch's t-test)")
    return table


def status_table(snapshot: Snapshot) -> Table:
    """Return a study at one moment: progress, waiting reasons, failures, best trials, jobs of each device."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(snapshot.unit, ProgressRow(snapshot))
    _add_lines(table, "now", progress_texts(snapshot))
    table.add_row("trials", states_text(snapshot))
    if snapshot.runs > 1:
        table.add_row("time", time_text(snapshot))
    _add_lines(table, "workers", ["are being started"] * snapshot.starting)
    _add_lines(table, "warm start", snapshot.earlier_from)
    _add_lines(table, "waiting", _waiting_lines(snapshot), "dim")
    _add_lines(table, "failed", _failure_lines(snapshot), "red")
    _add_lines(table, "arrays", verdict_texts(snapshot.arrays))
    _add_lines(table, "note", snapshot.note.splitlines(), "yellow")
    _add_lines(table, "task", map(task_edit_text, snapshot.edits))
    _add_lines(table, "asked", map(intervention_text, snapshot.interventions[-_MAX_REQUESTS:]))
    _add_lines(table, "best", best_texts(snapshot))
    if snapshot.constraints:
        _add_lines(table, "subject to", [", ".join(snapshot.constraints)])
    if snapshot.hypervolume is not None:
        _add_lines(table, "front", [hypervolume_text(snapshot.hypervolume, snapshot.metric)])
    _add_lines(table, "fusing", [savings_text(snapshot.savings, snapshot.unit)] if snapshot.savings else [])
    _add_lines(table, "speed", [speedup_text(snapshot.speedup)] if snapshot.speedup and not snapshot.savings else [])
    for use in snapshot.devices:
        _add_lines(table, use.device.name, device_lines(use, snapshot.unit))
    return table


def _add_lines(table: Table, title: str, lines: Iterable[str], style: str = "") -> None:
    for index, line in enumerate(lines):
        table.add_row(Text("" if index else title), Text(printable(line), style=style))


def trial_json(row: TrialRow, *, runs: bool = True) -> dict[str, Any]:
    """A trial as plain values; None for NaN and the infinities. Without a process, a running one is "interrupted".
    `state` is the public `TrialState`, and `status` the words of tables for it, see `trial_state_text`.
    """
    return {
        "trial": row.number,
        "state": state_name(row.state, runs),
        "status": trial_state_text(row, runs),
        "paused_by": row.paused_by or None,
        "actions": list(row.actions),
        "config": dict(row.config),
        "origin": row.trial.origin and {"trial": row.trial.origin.trial, "epoch": row.trial.origin.epoch},
        "metrics": {name: finite_or_none(value) for name, value in row.metrics.items()},
        "best": {name: finite_or_none(value) for name, value in row.best.items()},
        "feasible": not row.violation,
        "violation": finite_or_none(row.violation),
        "ranked": {name: finite_or_none(value) for name, value in row.ranked.items()},
        "best_epoch": row.best_epoch,
        "errors": dict(row.errors),
        "epochs": row.epoch,
        "target": row.target,
        "seconds": row.seconds,
        "failures": row.failures,
        "device": row.device,
        "job": row.job,
        "reason": row.reason,
        **({} if not isinstance(row, ConfigurationRow) else _repeats_json(row, runs)),
    }


def _repeats_json(row: ConfigurationRow, runs: bool) -> dict[str, Any]:
    return {"deviations": row.deviations, "repeats": [trial_json(each, runs=runs) for each in row.repeats]}


def snapshot_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return a study at one moment as plain values; None for NaN and the infinities."""
    several: dict[str, Any] = {}
    if not isinstance(snapshot.metric, str):
        several["front"] = [_best_json(best) for best in snapshot.front]
        several["hypervolume"] = snapshot.hypervolume and asdict(snapshot.hypervolume)
    return {
        "metric": snapshot.metric,
        "mode": snapshot.mode,
        "pid": snapshot.pid,
        "host": snapshot.host or None,
        "finished": snapshot.finished,
        "trials": {state_name(state, snapshot.pid is not None): count for state, count in snapshot.states.items()},
        "status": state_counts(snapshot),
        "waiting": reasons_json(snapshot.waiting),
        "waiting_for_others": reasons_json(snapshot.waiting_for_others),
        "best": snapshot.best and _best_json(snapshot.best),
        **several,
        "constraints": list(snapshot.constraints),
        "epochs_done": snapshot.epochs_done,
        "epochs_asked": snapshot.epochs_asked,
        "epochs_total": snapshot.epochs_total,
        "epochs_most": snapshot.epochs_most,
        "totals": None if snapshot.totals is None else asdict(snapshot.totals),
        "elapsed": snapshot.elapsed,
        "span": snapshot.span,
        "runs": snapshot.runs,
        "seconds_left": snapshot.seconds_left,
        "time_left": snapshot.time_left,
        "end": snapshot.end,
        "stopped": snapshot.stopped and cause_json(snapshot.stopped),
        "causes": [cause_json(cause) for cause in snapshot.causes],
        "arrays": list(map(verdict_json, snapshot.arrays)),
        "note": snapshot.note,
        "warm_start": list(snapshot.earlier_from),
        "edits": [task_edit_json(edit) for edit in snapshot.edits],
        "interventions": [_intervention_json(each) for each in snapshot.interventions],
        "paused": {"study": snapshot.paused, "trials": list(snapshot.held)},
        "failing": [failing_json(failing) for failing in snapshot.failing],
        "unmeasured": [cause_json(cause) for cause in snapshot.unmeasured],
        "devices": [device_json(use) for use in snapshot.devices],
        "speedup": snapshot.speedup and {**asdict(snapshot.speedup), "text": speedup_text(snapshot.speedup)},
        "savings": snapshot.savings and savings_json(snapshot.savings, snapshot.unit),
    }


def savings_json(found: Savings, unit: str) -> dict[str, Any]:
    """Return what fusing and packing gained as plain values, with its text."""
    return {**asdict(found), "faster": found.faster, "saved": found.saved, "text": savings_text(found, unit)}


def verdict_json(found: Verdict) -> dict[str, Any]:
    """Return the verdict of a structure as plain values, with its text."""
    return {
        **asdict(found),
        "trials": list(found.trials),
        "difference": finite_or_none(found.difference),
        "is_plain": found.is_plain,
        "text": verdict_text(found),
    }


def task_edit_json(edit: TaskEdit) -> dict[str, Any]:
    """Return a resume with an edited task as plain values."""
    return {"time": edit.time, "files": dict(edit.files), "open": list(edit.open), "next": edit.next}


def _intervention_json(each: Intervention) -> dict[str, Any]:
    return {
        "time": each.time,
        "user": each.user,
        "verb": each.verb,
        "trials": list(each.trials),
        "devices": list(each.devices),
        "text": each.text,
        "refused": list(each.refused),
    }


def _best_json(best: Best) -> dict[str, Any]:
    value, last = (
        list(map(finite_or_none, each)) if isinstance(each, tuple) else finite_or_none(each)
        for each in (best.value, best.value if best.last is None else best.last)
    )
    return {"trial": best.trial, "config": dict(best.config), "value": value, "epoch": best.epoch, "last": last}


def reasons_json(reasons: Mapping[str, Sequence[int]], most: int = _MAX_NAMED) -> dict[str, Any]:
    """Return reason -> number of its trials, and the first ones, at most `most`."""
    return {reason: {"count": len(numbers), "first": list(numbers[:most])} for reason, numbers in reasons.items()}


def _waiting_lines(snapshot: Snapshot) -> list[str]:
    """Return the waiting reasons, a line each; the rarest share the last line."""
    reasons = [*snapshot.waiting.items(), *snapshot.waiting_for_others.items()]
    if snapshot.waiting and snapshot.pid is None:  # the reasons are from before the stop, but for those of users
        held = [(reason, numbers) for reason, numbers in snapshot.waiting.items() if set(numbers) <= {*snapshot.held}]
        numbers = sorted({*chain.from_iterable(snapshot.waiting.values())}.difference(*(x for _, x in held)))
        stopped = [("waits until the study is resumed", numbers)] if numbers else []
        reasons = [*stopped, *held, *snapshot.waiting_for_others.items()]
    lines = [
        f"{numbered_trials(numbers)}: {reason or 'waits for a place in a job'}"
        for reason, numbers in reasons[:_MAX_REASONS]
    ]
    if rest := reasons[_MAX_REASONS:]:
        lines.append(f"{trials_text(sum(len(each) for _, each in rest))}: {len(rest)} other reasons, see shoal trials")
    return lines


def _failure_lines(snapshot: Snapshot) -> list[str]:
    """Return the causes of failures, each once, and the next steps of the trials that are still open."""
    stop = () if snapshot.stopped is None else (snapshot.stopped,)
    others = [cause for cause in snapshot.causes if cause.text not in {x.text for x in stop}]
    known = {cause.text for cause in (*stop, *others)}
    return [
        *(f"stopped, as trials failed alike before any had reported: {cause_line(cause)}" for cause in stop),
        *cause_lines(others),
        *failing_lines(snapshot.failing),
        *unmeasured_lines([cause for cause in snapshot.unmeasured if cause.text not in known]),
    ]
