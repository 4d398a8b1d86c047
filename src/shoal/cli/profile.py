"""`shoal profile`: measure the cost of a search before it runs, and show it as a table, as JSON or as a bar chart."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from shoal import api
from shoal.cli.command import run_script
from shoal.cli.options import AsJson, Devices, File, Packing, Script, device_list, print_json, print_table, say
from shoal.core.errors import ShoalError
from shoal.core.space import flatten
from shoal.cost.history import History, environment
from shoal.dry_run.request import dry_run_request
from shoal.dry_run.result import PLANS, DryRun, PlannedArray, percent
from shoal.reporting.drawing import check_drawing, literal, save
from shoal.reporting.text import leaf_text, rounded
from shoal.schedule.ledger import bytes_text

__all__ = ["DryRunTable", "draw_dry_run", "dry_run_json", "profile", "seconds_text", "verdict"]

_WIDE, _NARROW = 140, 80
"""Least widths of the terminal, in characters, for reasons beside the figures instead of below, and for unbroken
figures.
"""

_NAMED = 4
"""Most trials of an array that are named."""

_FIGURES = ("", "trials", "batch", "ms a step\nalone", "of each\nfused", "memory", "samples")
_SECONDS = ("s an epoch\nalone", "planned")


def profile(
    file: File,
    arguments: Script = None,
    trials: Annotated[int, typer.Option(min=1, help="Configurations, as shoal.Random would try them.")] = 8,
    devices: Devices = None,
    packing: Packing = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw the totals: a .png or .svg file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the configurations and of all that is random.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a search would cost, and whether sharing pays, before it runs.

    Runs a Python file up to its call of shoal.tune, which does not return: no trial is trained to its end, and no
    directory is made. A few configurations of its space are trained for some steps on the first device, and the planner
    makes jobs of them as in a search: a row for each array, with seconds of a step, peak memory, the part of
    preprocessing, the seconds of an epoch, and the deciding rule. IMPV is the part of the time that sharing saves.

    Options replace the arguments that the file gives to shoal.tune. The measurements go into the job history, so a
    search does not measure them again. With --json the output of the file goes to standard error. The exit status is 1
    if no configuration could be measured.
    """
    if plot is not None:
        check_drawing(plot, "a plot", "simulate")
    given = {"devices": device_list(devices), "packing": packing, "seed": seed}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            with api.overridden(**chosen):
                wanted = dry_run_request(lambda: run_script(file, arguments or []))
            if wanted is None:
                raise ShoalError(f"{file} ended without a call of shoal.tune, so there is nothing to measure")
            if wanted.spec["opaque"]:
                raise ShoalError(
                    f"{wanted.spec['task']} is a program of yours, which cannot be tried for a few steps; a study "
                    "learns what it costs while it runs, and shoal.Task is what can be fused and packed"
                )
            from shoal.dry_run.run import dry_run

            history = History(environment=environment())
            found = dry_run(wanted, wanted.trials(trials), history, say)
    except KeyboardInterrupt as stop:
        say("stopped; what was measured so far is in the job history")
        raise typer.Exit(1) from stop
    if as_json:
        print_json(dry_run_json(found))
    else:
        print_table(DryRunTable(found))
    if not found.arrays:
        raise ShoalError("no configuration could be measured; the reasons are above")
    if plot is not None:
        title = f"{file.name}: {wanted.spec['task']}, {found.trials} configurations on {found.device.name}"
        draw_dry_run(found, plot, title)
        say(f"drawn in {plot}")


@dataclass(frozen=True)
class DryRunTable:
    """Rich output: a row for each array, arrays of a job together; the totals; and whether sharing pays."""

    found: DryRun

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = options.max_width >= _WIDE
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in (*_FIGURES, *_SECONDS):
            # on a narrow terminal figures are folded, so that none is cut
            table.add_column(head, justify="right", no_wrap=options.max_width >= _NARROW, overflow="fold")
        if wide:
            table.add_column("what decided", overflow="fold")
        texts = []
        for cells, text in self._rows(" " if wide else "\n"):
            table.add_row(*map(Text, (*cells, text) if wide else cells))
            texts.append((cells[0] or f"trials {cells[1]}", text))
        yield table
        if not wide:
            yield ""
            yield from (Text(f"{place}: {text}") for place, text in texts)
        if self.found.arrays:
            yield ""
            yield Text(verdict(self.found), style="bold green" if self.found.pays else "bold")

    def _rows(self, between: str) -> Iterator[tuple[tuple[str, ...], str]]:
        """Figures of each array and the reason for its size; figures of a job stand in the row of its first array.

        Args:
            between: Separator of two figures of a cell; a line break on a narrow terminal.
        """
        arrays = self.found.arrays
        for index, (each, config) in enumerate(zip(arrays, _configs(arrays), strict=True)):
            first = index == 0 or arrays[index - 1].job != each.job
            seconds = rounded(each.apart, 3), rounded(each.seconds, 3) if first else ""
            yield (
                (str(index + 1), *_figures(each, between), *seconds),
                f"{config}: {each.decided}" if config else each.decided,
            )
        nothing = [""] * (len(_FIGURES) + len(_SECONDS) - 2)
        for failed in self.found.failed:
            yield ("", _trials(failed.trials), *nothing), failed.reason


def verdict(found: DryRun) -> str:
    """Whether sharing pays, in a sentence."""
    if found.trials == 1:
        return "Sharing does not pay here: there is but one configuration."
    apart, chosen = found.totals["apart"], found.totals["chosen"]
    times = (
        f"one epoch of {found.trials} configurations takes {seconds_text(chosen)} instead of "
        f"{seconds_text(apart)} one after another"
    )
    parts = f"fusing alone saves {percent(found.saves('fused'))}, packing alone saves {percent(found.saves('packed'))}"
    if found.pays:
        return f"Sharing pays: {times}, {percent(found.saves('chosen'))} less ({parts})."
    return f"Sharing does not pay here: {times} ({parts})."


def dry_run_json(found: DryRun) -> dict[str, Any]:
    """A dry run as plain values: seconds, bytes, numbers of trials, and numbers of arrays from 1 on as in the table."""
    return {
        "device": found.device.name,
        "kind": found.device.kind,
        "arrays": [{"array": place, **_array_json(each)} for place, each in enumerate(found.arrays, start=1)],
        "failed": [{"trials": list(each.trials), "reason": each.reason} for each in found.failed],
        "totals": {name: {"seconds": found.totals[name], "impv": found.saves(name)} for name in PLANS},
        "pays": found.pays,
        "verdict": verdict(found),
    }


def draw_dry_run(found: DryRun, path: Path, title: str) -> None:
    """Draw a bar for each plan.

    Args:
        found: Dry run with at least one array.
        path: File that `check_drawing` accepts.
        title: Title of the chart.

    Raises:
        ShoalError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    axes = figure.subplots()
    longest = max(found.totals.values())
    unit, scale = ("s", 1.0) if longest >= 1 else ("ms", 1000.0)
    for row, name in enumerate(PLANS):
        seconds = found.totals[name]
        axes.barh(row, scale * seconds, 0.75, color="#ee8866" if name == "chosen" else "#4477aa")
        told = "" if name == "apart" else f", IMPV {percent(found.saves(name))}"
        text = f"{seconds_text(seconds)}{told}"
        axes.text(scale * (seconds + 0.008 * longest), row, text, va="center", fontsize=9)
    axes.set_yticks(range(len(PLANS)), list(PLANS.values()), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * scale * longest)
    axes.set_xlabel(f"{unit} for one epoch of each trial")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(literal(f"{title}\n{verdict(found)}"), fontsize=10, x=0.01, ha="left", wrap=True)
    save(figure, path, "the plot")


def seconds_text(seconds: float) -> str:
    """A time as 12.3 s or 45.6 ms."""
    return f"{rounded(seconds, 3)} s" if seconds >= 1 else f"{rounded(1000 * seconds, 3)} ms"


def _array_json(each: PlannedArray) -> dict[str, Any]:
    return {
        "job": each.job,
        "packed_with": [other + 1 for other in each.packed_with],
        "trials": [member.trial.number for member in each.array.members],
        "configs": [dict(member.trial.config) for member in each.array.members],
        "batch_size": each.array.key.batch_size,
        "step_seconds_alone": each.step_alone,
        "step_seconds_fused": each.step_fused,
        "gain": each.gain,
        "memory_alone": each.memory_alone,
        "memory": each.memory,
        "fetch_seconds": each.profile.fetch_seconds,
        "preprocessing": each.preprocessing,
        "sharing": each.profile.sharing,
        "seconds_apart": each.apart,
        "job_seconds": each.seconds,
        "decided": each.decided,
    }


def _figures(each: PlannedArray, between: str) -> tuple[str, ...]:
    """The cells before the seconds, except the first."""
    several = each.members > 1
    return (
        _trials([member.trial.number for member in each.array.members]),
        str(each.array.key.batch_size),
        rounded(1000 * each.step_alone, 3),
        f"{rounded(1000 * each.step_fused, 3)}, {each.gain:.1f}x" if several else "–",
        bytes_text(each.memory),
        f"{percent(each.preprocessing)}{between}{each.profile.sharing}",
    )


def _configs(arrays: Sequence[PlannedArray]) -> list[str]:
    """The parameters that distinguish each array: each array has one value of them, and not all the same."""
    values: list[dict[str, set[str]]] = []
    for each in arrays:
        mine: dict[str, set[str]] = {}
        for member in each.array.members:
            for name, value in flatten(member.trial.config).items():
                mine.setdefault(name, set()).add(leaf_text(value))
        values.append(mine)
    names = [name for name in {name: None for mine in values for name in mine} if _tells(name, values, arrays)]
    return [" ".join(f"{name}={next(iter(mine[name]))}" for name in names if name in mine) for mine in values]


def _tells(name: str, values: Sequence[Mapping[str, set[str]]], arrays: Sequence[PlannedArray]) -> bool:
    found = [mine.get(name, {""}) for mine in values]
    if all(some == {str(each.array.key.batch_size)} for some, each in zip(found, arrays, strict=True)):
        return False  # the batch size has its own column
    return all(len(some) == 1 for some in found) and len({text for some in found for text in some}) > 1


def _trials(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= _NAMED else f"{len(numbers)} trials"
