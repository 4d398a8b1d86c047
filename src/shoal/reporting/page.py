"""The report on a study as one self-contained HTML file, and the same as plain values."""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.core.job import Purpose
from shoal.journal.rows import JobRow
from shoal.reporting.failures import cause_text, failing_json, failing_text
from shoal.reporting.overview import SHARES, TELEMETRY, Overview, Usage
from shoal.reporting.text import (
    best_text,
    config_text,
    duration_text,
    epochs_text,
    finite_or_none,
    number_text,
    numbers_text,
    printable,
    state_text,
    states_text,
    task_edit_text,
)
from shoal.schedule.ledger import bytes_text

__all__ = ["failed_job_json", "notebook_html", "overview_json", "page", "write_page"]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 78em; padding: 0 1em; color: #222; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 0.9em; } th { text-align: left; }
th, td { padding: 0.25em 1em 0.25em 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.wide { overflow-wrap: anywhere; } pre { white-space: pre-wrap; margin: 0; font-size: 0.9em; }
img { max-width: 100%; }
"""
_PURPOSE_WORDS = {
    Purpose.TRAIN: "training",
    Purpose.SIGNATURE: "looking at models",
    Purpose.PROFILE: "measuring",
    Purpose.ASSIST: "helping jobs of other devices",
}
_MAX_FAILURES = 200
"""Most failed jobs, and failed trials, that are listed."""


def write_page(study: Overview, picture: bytes, path: Path) -> None:
    """Write the page.

    Args:
        study: Content of the report.
        picture: Timeline of the study, a PNG file.
        path: File to write.

    Raises:
        ShoalError: the file cannot be written.
    """
    try:
        path.write_text(page(study, picture), encoding="utf-8")
    except OSError as error:
        raise ShoalError(f"the report cannot be written: {error}") from error


def page(study: Overview, picture: bytes) -> str:
    """Return the HTML; for the arguments see `write_page`."""
    name = _text(study.name)
    image = base64.b64encode(picture).decode()
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{name}</h1>",
        _summary_table(study),
        f'<h2>Timeline</h2>\n<img alt="what each device did and when" src="data:image/png;base64,{image}">',
        _section("Edits of the task", [task_edit_text(edit) for edit in study.state.edits]),
        _section("Best trials", _best(study)),
        _section("Devices", _devices(study)),
        f"<p>{_text(f'{SHARES}; {TELEMETRY}' if _has_telemetry(study) else SHARES)}</p>" if study.usage else "",
        _section("Tried again", [failing_text(each) for each in study.state.failing]),
        _section("Jobs that failed", _failures(study)),
        _section("Trials that failed for good", _failed_trials(study)),
        "</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


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


def failed_job_json(study: Overview, job: JobRow) -> dict[str, Any]:
    """Return a job that failed, as plain values, without its log and its message."""
    return {
        "job": job.id,
        "device": job.device,
        "trials": list(job.trials),
        "seconds": study.elapsed(job.started),
        "outcome": job.outcome,
        "cause": job.cause,
    }


def overview_json(study: Overview) -> dict[str, Any]:
    """Return the page as plain values, without those of `snapshot_json`; None for NaN and the infinities."""
    return {
        "name": study.name,
        "seconds": study.elapsed.total,
        "jobs": len(study.bars),
        "curve": [{"seconds": seconds, "value": finite_or_none(value)} for seconds, value in study.curve],
        "devices": [
            {
                "device": usage.device.name,
                "kind": usage.device.kind,
                "busy": usage.busy,
                "occupancy": usage.occupancy,
                "kernels": usage.kernels,
                "memory_in_use": usage.memory,
                "seconds": {str(purpose): seconds for purpose, seconds in usage.seconds.items()},
                "jobs": usage.jobs,
                "failed": usage.failed,
            }
            for usage in study.usage
        ],
        "best": [row.number for row in study.best],
        "failing": [failing_json(failing) for failing in study.state.failing],
        "failures": [failed_job_json(study, job) | {"log": job.log or None} for job in study.failures],
        "failed": [{"trial": row.number, "epoch": row.epoch, "reason": row.reason} for row in study.failed_trials],
    }


def _summary_table(study: Overview) -> str:
    state = study.state
    goals = ", ".join(f"{goal.metric} ({goal.mode})" for goal in study.objectives)
    runner = "no process runs it" if state.pid is None else f"process {state.pid} runs it"
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


def _devices(study: Overview) -> str:
    measured = _has_telemetry(study)
    rows = [
        (
            usage.device.name,
            usage.device.kind,
            bytes_text(usage.device.memory),
            f"{usage.busy:.0%}",
            f"{usage.occupancy:.0%}",
            *(_telemetry(usage) if measured else ()),
            _by_purpose(usage.seconds),
            usage.jobs,
            usage.failed,
            _health(usage, study.state.pid is not None),
        )
        for usage in study.usage
    ]
    columns = ("kernels", "in use") if measured else ()
    head = ("device", "kind", "memory", "used", "reserved", *columns, "device time", "jobs", "failed", "now")
    return _table(head, rows)


def _has_telemetry(study: Overview) -> bool:
    """Return whether the use of a device was measured, as that of GPUs is."""
    return any(usage.kernels is not None or usage.memory is not None for usage in study.usage)


def _telemetry(usage: Usage) -> tuple[str, str]:
    return (
        "–" if usage.kernels is None else f"{usage.kernels:.0%}",
        "–" if usage.memory is None else bytes_text(usage.memory),
    )


def _health(usage: Usage, runs: bool) -> str:
    """Return whether the device is the study's, or why it is not; "–" for a device of a study that no process runs."""
    if not usage.device.healthy:
        return usage.device.reason or "not healthy"
    return "in use" if runs else "–"


def _failures(study: Overview) -> str:
    rows = [
        (job.id, job.device, numbers_text(job.trials), cause_text(job.outcome, job.cause), job.log or "–")
        for job in study.failures
    ]
    return _table(("job", "device", "trials", "cause", "log"), rows[:_MAX_FAILURES], len(rows))


def _failed_trials(study: Overview) -> str:
    rows = [(row.number, row.epoch, config_text(row.config), row.reason) for row in study.failed_trials]
    return _table(("trial", "epochs", "config", "reason"), rows[:_MAX_FAILURES], len(rows))


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


def _section(title: str, content: str | Sequence[str]) -> str:
    """Return a heading with its content, a table or lines; "" without content."""
    if not isinstance(content, str):
        content = "\n".join(f"<p>{_text(line)}</p>" for line in content)
    return f"<h2>{_text(title)}</h2>\n{content}" if content else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]], count: int = 0) -> str:
    """Return a table of rows of texts and integers; "" without rows.

    Args:
        head: Titles of the columns; without them, the first column holds titles.
        rows: Rows to show.
        count: Number of all rows, if it is greater.
    """
    if not rows:
        return ""
    lines = ["<table>"]
    if head:
        lines.append(f"<tr>{''.join(f'<th>{_text(title)}</th>' for title in head)}</tr>")
    for row in rows:
        lines.append(f"<tr>{''.join(_cell(value, not head and column == 0) for column, value in enumerate(row))}</tr>")
    lines.append("</table>")
    if count > len(rows):
        lines.append(f"<p>and {count - len(rows)} more</p>")
    return "\n".join(lines)


def _cell(value: object, title: bool) -> str:
    if title:
        return f"<th>{_text(value)}</th>"
    if isinstance(value, int):
        return f'<td class="number">{value}</td>'
    text = _text(value)
    return f"<td><pre>{text}</pre></td>" if "\n" in text else f'<td class="wide">{text}</td>'


def _text(what: object) -> str:
    """Return the text escaped for HTML, see `printable`."""
    return escape(printable(str(what), lines=True))
