"""Tables of what a few real steps showed before a search, and the same as plain values for `--json`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.core.space import flatten
from shoal.dry_run.parts import Parts, percent, saved
from shoal.dry_run.result import Company, Measured, Rehearsal
from shoal.report.text import leaf_text, rounded
from shoal.schedule.ledger import bytes_text

__all__ = ["TOTALS", "RehearsalTable", "rehearsal_json", "seconds_text", "verdict"]

TOTALS = {
    "apart": "one after another",
    "packed": "packed, none fused",
    "fused": "fused, none packed",
    "chosen": "Shoal's choice",
}
"""What can be done with trials, as `Rehearsal` calls it and as a person reads it."""

_WAYS = {"turns": "one after another", "steps": "step by step", "streams": "streams", "threads": "threads"}
_WIDE = 160
"""Characters from which on all of an array stands on one line."""

_NARROW = 80
"""Characters that figures need to stand unbroken."""

_NAMED = 4
"""So many trials of an array are named."""


@dataclass(frozen=True)
class _Column:
    """Of the arrays, and then of those trials that are in none."""

    head: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class RehearsalTable:
    """What rich prints: a row for each array, what was measured of company, the totals, and whether sharing pays."""

    rehearsal: Rehearsal

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown = self.rehearsal
        number, *figures = self._figures()
        texts = self._texts()
        if options.max_width >= _WIDE:
            yield _table([number, *figures, *texts], options.max_width)
        else:
            yield _table([number, *figures], options.max_width)
            yield ""
            yield _table([number, *texts], options.max_width)
        if any(len(each.lanes) > 1 for each in (*shown.companies, *shown.unfused)):
            yield ""
            yield self._companies()
        if shown.arrays:
            yield ""
            yield self._totals()
            yield ""
            yield Text(verdict(shown), style="bold green" if shown.pays else "bold")

    def _figures(self) -> list[_Column]:
        arrays, nothing = self.rehearsal.arrays, [""] * len(self.rehearsal.failed)

        def column(head: str, cells: Sequence[str]) -> _Column:
            return _Column(head, [*cells, *nothing])

        numbers = [tuple(member.trial.number for member in each.array.members) for each in arrays]
        trials = [*numbers, *(each.trials for each in self.rehearsal.failed)]
        return [
            column("", [str(index + 1) for index in range(len(arrays))]),
            _Column("\ntrials", list(map(_trials, trials))),
            column("\nbatch", [str(each.array.key.batch_size) for each in arrays]),
            column("ms a step\nalone", [_milliseconds(each.step_alone) for each in arrays]),
            column("of each\nfused", [_fused(each) for each in arrays]),
            column("memory\nalone", [bytes_text(each.memory_alone) for each in arrays]),
            column("\nfused", [bytes_text(each.memory) if each.members > 1 else "–" for each in arrays]),
            column("pre-\nprocessing", [f"{percent(each.preprocessing)} {each.profile.sharing}" for each in arrays]),
            column("ms to\nswitch", [_milliseconds(each.switching) for each in arrays]),
        ]

    def _texts(self) -> list[_Column]:
        nothing = [""] * len(self.rehearsal.failed)
        failed = [f"could not be measured: {each.reason}" for each in self.rehearsal.failed]
        texts = [_Column("\nwhat decided", [*self.rehearsal.decided, *failed], "left")]
        configs = [*_configs(self.rehearsal.arrays), *nothing]
        return [_Column("\nconfig", configs, "left"), *texts] if any(configs) else texts

    def _companies(self) -> Table:
        table = _new("lanes of one process", "turns", "pace", "µs a sample", "fetches of it")
        for label, company in self._labelled():
            if len(company.lanes) > 1:
                table.add_row(label, *_company(company))
        return table

    def _labelled(self) -> Iterator[tuple[str, Company]]:
        """What was measured together: groups that a search has or has tried, and trials none of which are fused."""
        arrays = [each.array for each in self.rehearsal.arrays]
        for company in self.rehearsal.companies:
            group = tuple(arrays.index(lane) for lane in company.lanes)
            undone = "" if group in self.rehearsal.groups else ", undone"
            yield f"arrays {', '.join(str(index + 1) for index in group)}{undone}", company
        known = [company.lanes for company in self.rehearsal.companies]
        for company in self.rehearsal.unfused:
            if company.lanes not in known:
                yield f"{_named(company.trials)}, none fused", company

    def _totals(self) -> Table:
        epoch = "one epoch of each" if self.rehearsal.trials > 1 else "one epoch"
        table = _new(epoch, "seconds", "IMPV", "steps", "preprocessing", "switching")
        for name, text in TOTALS.items():
            parts = self.rehearsal.in_all(name)
            kinds = (parts.seconds, parts.steps, parts.preprocessing, parts.switching)
            total, *others = (rounded(each, 3) for each in kinds)
            table.add_row(text, total, "" if name == "apart" else percent(self.rehearsal.saves(name)), *others)
        return table


def verdict(rehearsal: Rehearsal) -> str:
    """Whether sharing pays, in a sentence."""
    apart, chosen = rehearsal.in_all("apart").seconds, rehearsal.in_all("chosen").seconds
    count = "1 configuration" if rehearsal.trials == 1 else f"{rehearsal.trials} configurations"
    times = f"one epoch of {count} takes {seconds_text(chosen)} instead of {seconds_text(apart)} one after another"
    parts = ", ".join(
        f"{name} alone saves {percent(part)}"
        for name, part in (("fusing", rehearsal.saves("fused")), ("packing", rehearsal.saves("packed")))
    )
    if rehearsal.pays:
        return f"Sharing pays: {times}, {percent(rehearsal.saves('chosen'))} less ({parts})."
    if rehearsal.trials == 1:
        return "Sharing does not pay here: there is but one configuration."
    return f"Sharing does not pay here: {times} ({parts})."


def rehearsal_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """All of it as plain values: seconds, bytes, numbers of trials, and of arrays from 1 on as the tables have them."""
    arrays = [each.array for each in rehearsal.arrays]
    group = {index: group for group in rehearsal.groups for index in group}
    return {
        "device": rehearsal.device.name,
        "kind": rehearsal.device.kind,
        "arrays": [
            {
                "array": index + 1,
                **_array_json(each),
                "packed_with": [other + 1 for other in group[index] if other != index],
                "decided": rehearsal.decided[index],
            }
            for index, each in enumerate(rehearsal.arrays)
        ],
        "packs": [
            {"arrays": [arrays.index(lane) + 1 for lane in each.lanes], **_company_json(each)}
            for each in rehearsal.companies
        ],
        "unfused": [_company_json(each) for each in rehearsal.unfused if len(each.lanes) > 1],
        "failed": [{"trials": list(each.trials), "reason": each.reason} for each in rehearsal.failed],
        "data": [
            {"arrays": [index + 1 for index in each.arrays]}
            | {name: _parts_json(getattr(each, name), each.apart) for name in TOTALS}
            for each in rehearsal.streams
        ],
        "totals": {name: _parts_json(rehearsal.in_all(name), rehearsal.in_all("apart")) for name in TOTALS},
        "pays": rehearsal.pays,
        "verdict": verdict(rehearsal),
    }


def seconds_text(seconds: float) -> str:
    """As 12.3 s or 45.6 ms."""
    return f"{rounded(seconds, 3)} s" if seconds >= 1 else f"{rounded(1000 * seconds, 3)} ms"


def _array_json(each: Measured) -> dict[str, Any]:
    return {
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
        "switching_alone": each.switching_alone,
        "switching": each.switching,
    }


def _company_json(company: Company) -> dict[str, Any]:
    return {
        "trials": list(company.trials),
        "way": company.way,
        "pace": company.pace,
        "sample_seconds": company.sample_seconds,
        "fetches": company.fetches,
        "error": company.error or None,
    }


def _parts_json(parts: Parts, apart: Parts) -> dict[str, float]:
    return {"seconds": parts.seconds, "impv": saved(apart, parts), **asdict(parts)}


def _company(company: Company) -> tuple[str, ...]:
    if company.error:
        return (f"could not be measured: {company.error}",)
    way = "not found in time" if company.way is None else _WAYS[company.way]
    sample = "–" if company.sample_seconds is None else rounded(1e6 * company.sample_seconds, 3)
    return (way, rounded(company.pace, 2), sample, rounded(company.fetches, 2))


def _configs(arrays: Sequence[Measured]) -> list[str]:
    """What tells each array from others: the parameters of which each array has one value, and not all the same."""
    values: list[dict[str, set[str]]] = []
    for each in arrays:
        mine: dict[str, set[str]] = {}
        for member in each.array.members:
            for name, value in flatten(member.trial.config).items():
                mine.setdefault(name, set()).add(leaf_text(value))
        values.append(mine)
    names = [name for name in {name: None for mine in values for name in mine} if _tells(name, values, arrays)]
    return [" ".join(f"{name}={next(iter(mine[name]))}" for name in names if name in mine) for mine in values]


def _tells(name: str, values: Sequence[Mapping[str, set[str]]], arrays: Sequence[Measured]) -> bool:
    found = [mine.get(name, {""}) for mine in values]
    if all(some == {str(each.array.key.batch_size)} for some, each in zip(found, arrays, strict=True)):
        return False  # it has a column of its own
    return all(len(some) == 1 for some in found) and len({text for some in found for text in some}) > 1


def _trials(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) if len(numbers) <= _NAMED else f"{len(numbers)} trials"


def _named(numbers: Sequence[int]) -> str:
    return f"trials {_trials(sorted(numbers))}" if len(numbers) <= _NAMED else _trials(numbers)


def _milliseconds(seconds: float) -> str:
    return rounded(1000 * seconds, 3)


def _fused(each: Measured) -> str:
    return f"{_milliseconds(each.step_fused)}, {each.gain:.1f}x" if each.members > 1 else "–"


def _table(columns: Sequence[_Column], width: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        whole = column.justify == "right" and width >= _NARROW  # else figures are folded, for none is to be cut
        table.add_column(column.head, justify=column.justify, no_wrap=whole, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _new(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for other in others:
        if other == "turns":
            table.add_column(other, max_width=32, overflow="fold")
        else:
            table.add_column(other, justify="right")
    return table
