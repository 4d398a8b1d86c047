"""`shoal history`: show or clear the measurements of jobs on this machine."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal.cli.options import AsJson, print_json, print_message, print_table
from shoal.core.demand import Profile
from shoal.core.errors import ShoalError
from shoal.core.resources import bytes_text
from shoal.look.text import config_text, rounded, structure_text
from shoal.plan.cost.history import HistoryRecord, delete_records, environment, history_path, records

__all__ = ["history_app", "history_table", "record_json", "tasks_table"]

history_app = typer.Typer(
    help="Show or clear the measurements of jobs on this machine.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Kind = Annotated[str | None, typer.Option(help="Only measurements on this kind of device.")]
_Structure = Annotated[str | None, typer.Option(help="Only structures whose digest begins with this.")]

_INDENT = 2
_KIND_WIDTH, _STRUCTURE_WIDTH, _STEPS_WIDTH = 6, 9, 9
"""Least widths of these columns: with them all fits into 80 columns, whose widest words are "NVIDIA" and headers."""


@history_app.callback()
def _show(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the measurements of jobs on this machine, from all studies; a study measures only what is missing.

    Each line is a structure, a batch size and a kind of device: milliseconds of a training step by number of members,
    memory per member and of the process alone, compute and cores in use, and the slowdown of a step while members are
    at different epochs. Measurements by other versions of Python, torch or Shoal come last, are marked, and are not
    used. Structures are named by the first digits of their digests; so are data sets, if a structure was measured with
    several. The second table has, for each structure, data set and batch size: its tasks with the parameters that all
    trials share, why only one number of members was measured, and its speed on a share of a device and beside others.
    """
    if context.invoked_subcommand is not None:
        return
    path, current = history_path(), environment()
    found = sorted(records(path), key=lambda record: record.environment != current)
    if as_json:
        shown = [record_json(record, current) for record in found]
        print_json({"path": str(path), "environment": current, "records": shown})
        return
    if found:
        print_table(history_table(found, current))
        tasks = tasks_table(found)
        if tasks.row_count:
            typer.echo()
            print_table(tasks)
    typer.echo(f"{'in' if found else 'no measurements yet in'} {path}")


@history_app.command("clear")
def _clear(kind: _Kind = None, structure: _Structure = None) -> None:
    """Remove all measurements, or those that the options select; studies measure them again."""
    path = history_path()
    known = records(path)
    if kind is not None and kind not in (kinds := sorted({record.kind for record in known})):
        measured = ", ".join(map(repr, kinds)) or "none"
        raise ShoalError(f"there are no measurements of the kind {kind!r}; measured kinds: {measured}")
    if structure is not None and not any(record.structure.startswith(structure) for record in known):
        raise ShoalError(f"there are no measurements of a structure that begins with {structure!r}; see: shoal history")
    profiles, relative_times = delete_records(path, kind=kind, structure=structure)
    print_message(
        f"removed {profiles} measurements of structures and {relative_times} of structures in one process, from {path}"
    )


def history_table(records: Sequence[HistoryRecord], current: str) -> Table:
    """A row for each record; records of another environment are dim, marked with a star and explained below.

    If a structure was measured with several data sets, these stand below it, as another column would not fit.
    """
    others = sorted({record.environment for record in records} - {current})
    caption = "\n".join(f"{_mark(name, current, others)} measured with {name}: not used now" for name in others)
    table = Table(box=None, pad_edge=False, header_style="bold", caption=Text(caption, "dim"), caption_justify="left")
    ambiguous = _with_several_data_sets(records)
    table.add_column("kind", overflow="fold", min_width=_KIND_WIDTH)
    table.add_column("structure\nand data" if ambiguous else "structure", overflow="fold", min_width=_STRUCTURE_WIDTH)
    table.add_column("batch\nsize", justify="right", no_wrap=True)
    table.add_column("ms of a\nstep by\nmembers", overflow="fold", min_width=_STEPS_WIDTH)
    for name in ("per\nmember", "process", "compute", "cores", "mixing"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        data = _data_text(record, ambiguous)
        table.add_row(
            Text("\N{NO-BREAK SPACE}".join(filter(None, [_mark(record.environment, current, others), record.kind]))),
            Text("\n".join(filter(None, [structure_text(record.structure), data]))),
            str(record.batch_size),
            *_measured(record),
            style="" if record.environment == current else "dim",
        )
    return table


def tasks_table(records: Sequence[HistoryRecord]) -> Table:
    """For each structure and batch size its tasks, why one number of members was measured, and its speed when sharing.

    These are indented below the structure, a row each, so that a row has the whole width. A structure that was measured
    with several data sets occurs once for each.
    """
    table = Table.grid()
    table.add_column(overflow="fold")
    ambiguous = _with_several_data_sets(records)
    lines: dict[str, dict[str, None]] = {}
    for record in records:
        texts = lines.setdefault(_name(record, ambiguous), {})
        tasks = (f"{task}: {config_text(found)}" if found else task for task, found in record.tasks.items())
        texts.update(dict.fromkeys(tasks))
        for text in filter(None, (_why_one_measurement(record), _sharing_text(record.profile))):
            texts[f"{record.kind}: {text}"] = None
    for name, texts in lines.items():
        if texts:
            table.add_row(Text(name))
        for text in texts:
            table.add_row(Padding(Text(text), (0, 0, 0, _INDENT)))
    return table


def _sharing_text(profile: Profile | None) -> str:
    """Return how a structure does on shares of a device, at its largest size, and side by side; "" if not measured."""
    if profile is None:
        return ""
    speeds = sorted(profile.share_speeds[max(profile.share_speeds)].items()) if profile.share_speeds else []
    texts = [f"{speed:.0%}{'' if place else ' of its speed'} on {share:.0%}{'' if place else ' of the device'}"
             for place, (share, speed) in enumerate(speeds)]  # fmt: skip
    beside = [f"{jobs} side by side take {rounded(factor, 3)}x" for jobs, factor in sorted(profile.crowding.items())]
    return "; ".join(filter(None, [", ".join(texts), ", ".join(beside)]))


def _name(record: HistoryRecord, ambiguous: set[tuple[str, str, str, int]]) -> str:
    """Return the structure of a record with its data, if the structure was measured with others, and its batch size."""
    data = _data_text(record, ambiguous)
    name = f"{structure_text(record.structure)} and {data}" if data else structure_text(record.structure)
    return name if _is_program(record.structure) else f"{name}, batches of {record.batch_size}"


def _is_program(structure: str) -> bool:
    return structure.startswith("opaque ")


def _why_one_measurement(record: HistoryRecord) -> str:
    """Return why steps were measured with one number of members only; "" if they were with several."""
    profile = record.profile
    if profile is None or len(profile.step_seconds) != 1:
        return ""
    (size,) = profile.step_seconds
    measured = f"{size} {'member' if size == 1 else 'members'} measured"
    if _is_program(record.structure):
        return f"{measured}: programs are not fused"
    if profile.measured_members == 1:
        return f"{measured}: no array had more"
    if (epochs := profile.expected_epochs) is not None:
        return f"{measured}: only {epochs:g} {'epoch' if epochs == 1 else 'epochs'} waited"
    return f"{measured}: more take over half of the memory"


def record_json(record: HistoryRecord, current: str) -> dict[str, Any]:
    """Return a record as plain values, with bytes and seconds; "profile" is None if the record cannot be read."""
    profile = record.profile
    return {
        "environment": record.environment,
        "current": record.environment == current,
        "kind": record.kind,
        "structure": record.structure,
        "data": record.data,
        "batch_size": record.batch_size,
        "tasks": {task: dict(found) for task, found in record.tasks.items()},
        "profile": profile
        and {
            "step_seconds": {str(size): seconds for size, seconds in sorted(profile.step_seconds.items())},
            "member_memory": profile.member_memory,
            "base_memory": profile.base_memory,
            "compute": profile.compute,
            "cores": profile.cores,
            "mixing": profile.mixing,
            "measured_members": profile.measured_members,
            "expected_epochs": profile.expected_epochs,
            "share_speeds": {
                str(size): {str(share): speed for share, speed in sorted(speeds.items())}
                for size, speeds in sorted(profile.share_speeds.items())
            },
            "crowding": {str(jobs): factor for jobs, factor in sorted(profile.crowding.items())},
        },
    }


def _measured(record: HistoryRecord) -> tuple[str, ...]:
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
    """Return "1:0.57, 4:2.89": rich would break a line at a space within an item, also at an unbreakable one."""
    return ", ".join(f"{size}:{rounded(1000 * seconds, 3)}" for size, seconds in sorted(step_seconds.items()))


def _with_several_data_sets(records: Sequence[HistoryRecord]) -> set[tuple[str, str, str, int]]:
    """Return the structures, with batch size and device, that were measured with several data sets."""
    seen: dict[tuple[str, str, str, int], set[str]] = {}
    for record in records:
        seen.setdefault((record.environment, record.kind, record.structure, record.batch_size), set()).add(record.data)
    return {what for what, data in seen.items() if len(data) > 1}


def _data_text(record: HistoryRecord, ambiguous: set[tuple[str, str, str, int]]) -> str:
    """Return the name of a record's data set; "" if its structure was measured with no other."""
    shown = (record.environment, record.kind, record.structure, record.batch_size) in ambiguous
    return structure_text(record.data) if shown else ""


def _mark(environment: str, current: str, others: Sequence[str]) -> str:
    """Return "*", "**" ... for an environment other than `current`, else ""."""
    return "" if environment == current else "*" * (1 + others.index(environment))
