"""A study as HTML for a notebook."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from shoal.core.job import Purpose
from shoal.journal.lock import LockOwner
from shoal.reporting.overview import Overview
from shoal.reporting.text import (
    best_text,
    config_text,
    duration_text,
    epochs_text,
    number_text,
    printable,
    state_text,
    states_text,
)

__all__ = ["notebook_html"]

_PURPOSE_WORDS = {
    Purpose.TRAIN: "training",
    Purpose.SIGNATURE: "looking at models",
    Purpose.PROFILE: "measuring",
    Purpose.ASSIST: "helping jobs of other devices",
}


def notebook_html(study: Overview) -> str:
    """Return the state of a study, the best value over time as a picture, and the best trials, for a notebook."""
    return f"<div><b>{_text(study.name)}</b>\n{_summary_table(study)}\n{_curve(study)}\n{_best(study)}</div>"


def _curve(study: Overview) -> str:
    """Return the best value so far as SVG in the colour of the text, dark or light; "" without a value."""
    points = [(time, value) for time, value in study.curve if math.isfinite(value)]
    if not points:
        return ""
    low, high = (function(value for _, value in points) for function in (min, max))
    across, down = 480 / study.elapsed.total, 90 / (high - low or 1.0)
    steps = [(time * across, 95 - (value - low) * down) for time, value in points]
    path = f"M{steps[0][0]:.1f} {steps[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in steps[1:])
    title = _text(
        f"best {study.objectives[0].metric} so far, {number_text(points[0][1])} to {number_text(points[-1][1])}"
    )
    return (
        f'<svg role="img" viewBox="0 0 480 100" width="480" height="100" style="max-width: 100%"><title>{title}</title>'
        f'<path d="{path}H480" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>\n'
        f"<p><small>{title}</small></p>"
    )


def _summary_table(study: Overview) -> str:
    state = study.state
    goals = ", ".join(f"{goal.metric} ({goal.mode})" for goal in study.objectives)
    runner = "no process runs it" if state.pid is None else f"{LockOwner(state.pid, state.host)} runs it"
    remaining = "" if state.seconds_left is None else f", {duration_text(state.seconds_left)} left"
    return _table(
        (),
        [
            ("compared by", goals),
            ("trials", states_text(state)),
            (state.unit, epochs_text(state)),
            ("time", f"{duration_text(study.elapsed.total)}{remaining}; {runner}"),
            ("device time", _by_purpose(_sum(usage.seconds for usage in study.usage))),
            ("best", best_text(state)),
        ],
    )


def _best(study: Overview) -> str:
    names = [goal.metric for goal in study.objectives]
    rows = [
        (
            row.number,
            state_text(row.state, study.state.pid is not None),
            *(number_text(row.metrics.get(name)) for name in names),
            row.epoch,
            f"{row.seconds:.1f}",
            config_text(row.config),
        )
        for row in study.best
    ]
    return _table(("trial", "state", *names, "epochs", "seconds", "config"), rows)


def _sum(each: Iterable[Mapping[Purpose, float]]) -> dict[Purpose, float]:
    total: dict[Purpose, float] = {}
    for seconds in each:
        for purpose, value in seconds.items():
            total[purpose] = total.get(purpose, 0.0) + value
    return total


def _by_purpose(seconds: Mapping[Purpose, float]) -> str:
    return (
        ", ".join(
            f"{_PURPOSE_WORDS[purpose]} {duration_text(seconds[purpose])}" for purpose in Purpose if purpose in seconds
        )
        or "–"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of rows of texts and integers; "" without rows."""
    if not rows:
        return ""
    lines = ["<table>"]
    if head:
        lines.append(f"<tr>{''.join(f'<th>{_text(title)}</th>' for title in head)}</tr>")
    for row in rows:
        tags = ["td" if head or column else "th" for column in range(len(row))]
        lines.append(
            f"<tr>{''.join(f'<{tag}>{_text(value)}</{tag}>' for tag, value in zip(tags, row, strict=True))}</tr>"
        )
    return "\n".join([*lines, "</table>"])


def _text(what: object) -> str:
    """Return the text escaped for HTML, see `printable`."""
    return escape(printable(str(what), lines=True))
