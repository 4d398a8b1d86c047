"""Tables of the job history for `shoal history`, and the same as plain values."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from shoal.cost.history import Record
from shoal.reporting.text import config_text, rounded, structure_text
from shoal.schedule.ledger import bytes_text

__all__ = ["history_table", "origins_table", "record_json"]

_STEPS_WIDTH = 9
"""Least width of the step times: with it all fits into 80 columns, whose widest words are "NVIDIA" and headers."""


def history_table(records: Sequence[Record], mine: str) -> Table:
    """A row for each record; records of another environment are dim, marked with a star and explained below.

    If a structure was measured with several data sets, these stand below it, as another column would not fit.

    Args:
        records: Records, those of one environment together.
        mine: Environment that a study would have now.
    """
    others = sorted({record.environment for record in records} - {mine})
    below = "\n".join(f"{_mark(name, mine, others)} measured with {name}: not used now" for name in others)
    table = Table(box=None, pad_edge=False, header_style="bold", caption=Text(below, "dim"), caption_justify="left")
    several = _several(records)
    table.add_column("kind", overflow="fold")
    table.add_column("structure\nand data" if several else "structure", no_wrap=True)
    table.add_column("batch\nsize", justify="right", no_wrap=True)
    table.add_column("ms of a\nstep by\nmembers", overflow="fold", min_width=_STEPS_WIDTH)
    for name in ("per\nmember", "process", "compute", "cores", "mixing"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        data = _data_shown(record, several)
        table.add_row(
            Text("\N{NO-BREAK SPACE}".join(filter(None, [_mark(record.environment, mine, others), record.kind]))),
            Text("\n".join(filter(None, [structure_text(record.structure), data]))),
            str(record.batch_size),
            *_measured(record),
            style="" if record.environment == mine else "dim",
        )
    return table


def origins_table(records: Sequence[Record]) -> Table:
    """A row for each structure and batch size: its origin, and why only one number of members was measured.

    A structure that was measured with several data sets has one row for each.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    several = _several(records)
    lines: dict[tuple[str, str, int], dict[str, None]] = {}
    for record in records:
        told = lines.setdefault((record.structure, _data_shown(record, several), record.batch_size), {})
        told.update(dict.fromkeys(_origin(task, found) for task, found in record.origins.items()))
        if why := _why_one_size(record):
            told[f"{record.kind}: {why}"] = None
    for (structure, data, size), told in lines.items():
        name = f"{structure_text(structure)} and {data},\n" if data else f"{structure_text(structure)}, "
        if told:
            table.add_row(Text(f"{name}batches of {size}"), Text("\n".join(told)))
    return table


def _origin(task: str, parameters: Mapping[str, Any]) -> str:
    return f"{task}: {config_text(parameters)}" if parameters else task


def _why_one_size(record: Record) -> str:
    """Why steps were measured with one number of members only; "" if they were with several."""
    profile = record.profile
    if profile is None or len(profile.step_seconds) != 1:
        return ""
    (size,) = profile.step_seconds
    only = f"measured with {size} {'member' if size == 1 else 'members'} only"
    if structure_text(record.structure) == record.structure:
        return f"{only}, for programs are not fused"
    if profile.sample == 1:
        return f"{only}, for no array had more"
    if profile.pending is not None:
        return f"{only}, for {profile.pending:g} epochs waited: measuring more would have cost more than it saves"
    return f"{only}, for more would have taken over half of the memory"


def record_json(record: Record, mine: str) -> dict[str, Any]:
    """A record as plain values; memory in bytes, steps in seconds. For an unreadable record, "profile" is None."""
    profile = record.profile
    return {
        "environment": record.environment,
        "current": record.environment == mine,
        "kind": record.kind,
        "structure": record.structure,
        "data": record.data,
        "batch_size": record.batch_size,
        "origins": {task: dict(found) for task, found in record.origins.items()},
        "profile": profile
        and {
            "step_seconds": {str(size): seconds for size, seconds in sorted(profile.step_seconds.items())},
            "member_memory": profile.member_memory,
            "base_memory": profile.base_memory,
            "compute": profile.compute,
            "cores": profile.cores,
            "mixing": profile.mixing,
            "sample": profile.sample,
            "pending": profile.pending,
            "crowding": {str(jobs): factor for jobs, factor in sorted(profile.crowding.items())},
        },
    }


def _measured(record: Record) -> tuple[str, ...]:
    profile = record.profile
    if profile is None:
        return ("cannot be read by this version", "", "", "", "", "")
    return (
        _steps(profile.step_seconds),
        bytes_text(profile.member_memory),
        bytes_text(profile.base_memory),
        f"{profile.compute:.0%}",
        rounded(profile.cores, 2),
        "–" if profile.mixing is None else rounded(profile.mixing, 3),
    )


def _steps(step_seconds: Mapping[int, float]) -> str:
    return ", ".join(
        f"{size}:\N{NO-BREAK SPACE}{rounded(1000 * seconds, 3)}" for size, seconds in sorted(step_seconds.items())
    )


def _several(records: Sequence[Record]) -> set[tuple[str, str, str, int]]:
    """The structures, with batch size and device, that were measured with several data sets."""
    seen: dict[tuple[str, str, str, int], set[str]] = {}
    for record in records:
        seen.setdefault((record.environment, record.kind, record.structure, record.batch_size), set()).add(record.data)
    return {what for what, data in seen.items() if len(data) > 1}


def _data_shown(record: Record, several: set[tuple[str, str, str, int]]) -> str:
    """Name of a record's data set; "" if its structure was measured with no other."""
    shown = (record.environment, record.kind, record.structure, record.batch_size) in several
    return structure_text(record.data) if shown else ""


def _mark(environment: str, mine: str, others: Sequence[str]) -> str:
    """ ""*", "**" ... for an environment other than `mine`."""
    return "" if environment == mine else "*" * (1 + others.index(environment))
