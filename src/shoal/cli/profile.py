"""`shoal profile`: measure the cost of a search before it runs, and show it as a table or as JSON."""

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

from shoal.cli.command import run_script
from shoal.cli.options import (
    AsJson,
    Devices,
    Packing,
    Script,
    device_list,
    print_json,
    print_message,
    print_table,
)
from shoal.core.errors import ShoalError
from shoal.core.resources import bytes_text
from shoal.core.space import flatten
from shoal.look.text import SMALL_SPEEDUP, leaf_text, rounded
from shoal.run_study import measured
from shoal.study.preview import PLANS, TOO_FEW_STEPS, PlannedArray, Preview, percent

__all__ = ["PreviewTable", "preview_json", "profile", "seconds_text", "verdict"]

_WIDE = 140
"""Least width of the terminal, in characters, for reasons beside the figures instead of below."""

_MAX_NAMED = 4

_FIGURES = ("", "trials", "batch", "ms a step\nalone", "of each\nfused", "memory", "samples")
_SECONDS = ("s an epoch\nalone", "planned")


def profile(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Python file that calls shoal.tune.")
    ],
    arguments: Script = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Number of configurations to measure, those that shoal.Random would try.")
    ] = 8,
    devices: Devices = None,
    packing: Packing = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the configurations and of all random numbers.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a search would cost, and whether sharing pays, before it runs.

    Runs a Python file up to its call of shoal.tune, which does not return: a study in a temporary directory measures a
    few configurations of the space as a search does at its beginning, plans their jobs, and trains none. The first
    sentence says what speed-up to expect. A row for each array has seconds of a step, peak memory, the part of
    preprocessing, the seconds of an epoch, and the deciding rule.
    IMPV is the part of the time that sharing saves.

    Options override the arguments of shoal.tune in the file. The measurements go into the job history, so a
    search does not measure them again. With --json the output of the file goes to standard error. The exit status is 1
    if no configuration could be measured.
    """
    options = {"devices": device_list(devices), "packing": packing, "seed": seed}
    overrides: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            result = measured(lambda: run_script(file, arguments or []), trials, **overrides)
    except KeyboardInterrupt as stop:
        print_message("stopped; what was measured so far is in the job history")
        raise typer.Exit(1) from stop
    if result is None:
        raise ShoalError(f"{file} ended without a call of shoal.tune, so there is nothing to measure")
    if as_json:
        print_json(preview_json(result))
    else:
        print_table(PreviewTable(result))
    if not result.arrays:
        raise ShoalError("no configuration could be measured; the reasons are above")


@dataclass(frozen=True)
class PreviewTable:
    """Rich output: whether sharing pays, in a sentence; then a row for each array, arrays of a job together."""

    result: Preview

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = options.max_width >= _WIDE
        table = Table(box=None, pad_edge=False, header_style="bold")
        for head in (*_FIGURES, *_SECONDS):
            # on a narrow terminal figures that do not fit are folded, so that none is cut
            table.add_column(head, justify="right", no_wrap=wide, overflow="fold")
        if wide:
            table.add_column("what decided", overflow="fold")
        texts = []
        for cells, text in self._rows(" " if wide else "\n"):
            table.add_row(*map(Text, (*cells, text) if wide else cells))
            texts.append((cells[0] or f"trials {cells[1]}", text))
        if self.result.arrays:
            yield Text(verdict(self.result), style="bold green" if self.result.pays else "bold")
            yield ""
        yield table
        if not wide:
            yield ""
            yield from (Text(f"{number}: {text}") for number, text in texts)

    def _rows(self, separator: str) -> Iterator[tuple[tuple[str, ...], str]]:
        """Figures of each array and the reason for its size; figures of a job stand in the row of its first array."""
        arrays = self.result.arrays
        for index, (each, config) in enumerate(zip(arrays, _configs(arrays), strict=True)):
            first = index == 0 or arrays[index - 1].job != each.job
            seconds = rounded(each.separate_seconds, 3), rounded(each.seconds, 3) if first else ""
            yield (
                (str(index + 1), *_figures(each, separator), *seconds),
                f"{config}: {each.decision}" if config else each.decision,
            )
        blank = [""] * (len(_FIGURES) + len(_SECONDS) - 2)
        for failed in self.result.failed:
            yield ("", _trials(failed.trials), *blank), failed.reason


def verdict(result: Preview) -> str:
    """Return what speed to expect of sharing, in a sentence."""
    if result.trials == 1:
        return "Sharing does not pay here: there is but one configuration."
    apart, chosen = result.totals["apart"], result.totals["chosen"]
    times = (
        f"one epoch of {result.trials} configurations takes {seconds_text(chosen)} instead of "
        f"{seconds_text(apart)} one after another"
    )
    parts = (
        f"fusing alone saves {percent(result.saves('fused'))}, packing alone saves {percent(result.saves('packed'))}"
    )
    if any(each.members > 1 and each.cost.is_untried for each in result.arrays):
        return (
            "Not measured yet: only single trials were timed, as timing arrays takes long beside the expected epochs; "
            f"training tries arrays in its first steps, and one epoch of {result.trials} configurations takes at most "
            f"{seconds_text(chosen)}."
        )
    if not result.pays and any(TOO_FEW_STEPS in each.decision for each in result.arrays):
        return (
            f"Not measured: one epoch of {result.trials} configurations has too few steps to try sharing, and takes "
            f"{seconds_text(chosen)}; a search of more steps tries it."
        )
    one = "the speed of one trial at a time"
    if result.pays:
        return f"Sharing pays: expect {apart / chosen:.1f} times {one}; {times} ({parts})."
    return f"Sharing does not pay here: expect 1.0 to {SMALL_SPEEDUP:.1f} times {one}; {times} ({parts})."


def preview_json(result: Preview) -> dict[str, Any]:
    """A preview as plain values: seconds, bytes, numbers of trials, and numbers of arrays from 1 on as in the table."""
    return {
        "device": result.device.name,
        "kind": result.device.kind,
        "arrays": [{"array": number, **_array_json(each)} for number, each in enumerate(result.arrays, start=1)],
        "failed": [{"trials": list(each.trials), "reason": each.reason} for each in result.failed],
        "totals": {name: {"seconds": result.totals[name], "impv": result.saves(name)} for name in PLANS},
        "pays": result.pays,
        "verdict": verdict(result),
    }


def seconds_text(seconds: float) -> str:
    """Return a time as 12.3 s or 45.6 ms."""
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
        "fetch_seconds": each.cost.fetch_seconds,
        "preprocessing": each.preprocessing,
        "sample_sharing": each.cost.sample_sharing,
        "seconds_apart": each.separate_seconds,
        "job_seconds": each.seconds,
        "decided": each.decision,
    }


def _figures(each: PlannedArray, separator: str) -> tuple[str, ...]:
    """Return the cells before the seconds, except the first."""
    several = each.members > 1
    return (
        _trials([member.trial.number for member in each.array.members]),
        str(each.array.key.batch_size),
        rounded(1000 * each.step_alone, 3),
        f"{rounded(1000 * each.step_fused, 3)}, {each.gain:.1f}x" if several else "–",
        bytes_text(each.memory),
        f"{percent(each.preprocessing)}{separator}{each.cost.sample_sharing}",
    )


def _configs(arrays: Sequence[PlannedArray]) -> list[str]:
    """Return the parameters that distinguish each array: each array has one value of them, and not all the same."""
    values: list[dict[str, set[str]]] = []
    for each in arrays:
        by_name: dict[str, set[str]] = {}
        for member in each.array.members:
            for name, value in flatten(member.trial.config).items():
                by_name.setdefault(name, set()).add(leaf_text(value))
        values.append(by_name)
    names = [
        name for name in {name: None for by_name in values for name in by_name} if _distinguishes(name, values, arrays)
    ]
    return [" ".join(f"{name}={next(iter(by_name[name]))}" for name in names if name in by_name) for by_name in values]


def _distinguishes(name: str, values: Sequence[Mapping[str, set[str]]], arrays: Sequence[PlannedArray]) -> bool:
    result = [by_name.get(name, {""}) for by_name in values]
    if all(some == {str(each.array.key.batch_size)} for some, each in zip(result, arrays, strict=True)):
        return False  # the batch size has its own column
    return all(len(some) == 1 for some in result) and len({text for some in result for text in some}) > 1


def _trials(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= _MAX_NAMED else f"{len(numbers)} trials"
