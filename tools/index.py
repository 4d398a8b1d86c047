"""The index of experiments: a table for each paper, and pictures of the figures, made from the results."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from session import Result

# isort: split
from papers import fluid, hermes, hfta, hypersack, pack, quality, rivals, searches
from papers.experiment import Experiment, missed_of

__all__ = ["experiments_of", "page", "pictures"]

BEGIN, END = "<!-- measured: tools/experiments.py writes from here -->", "<!-- measured: to here -->"
DIGITS, MOST_DIGITS = 3, 6
BAR, ROW, LABEL, VALUE, PAD = 280, 22, 440, 120, 10
"""Lengths of a picture in pixels: the longest bar, a row, the room of names and of values, the edge."""
OURS, THEIRS, TEXT = "#2f7ed8", "#a8a8a8", "#7a7a7a"
"""Colours that can be read on white and on black."""


def experiments_of() -> dict[str, tuple[Experiment, ...]]:
    """The experiments by paper, in the order of the index."""
    return {
        "HFTA: trials as one model": hfta.EXPERIMENTS,
        "Pack: models in one process": pack.EXPERIMENTS,
        "HyperSack: jobs on devices": hypersack.EXPERIMENTS,
        "Hermes: jobs take turns": hermes.EXPERIMENTS,
        "Fluid: groups of trials": fluid.EXPERIMENTS,
        "Searches: from the call to the result": searches.EXPERIMENTS,
        "Rivals: the same search by other tools": rivals.EXPERIMENTS,
        "Search algorithms": quality.EXPERIMENTS,
    }


def page(text: str, results: Mapping[str, Result]) -> str:
    """The page with the tables of all experiments between its two marks; what is outside of them stays."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page has no lines {BEGIN!r} and {END!r}, between which the results are written")
    all_of = experiments_of()
    values = [(each, value_of(each, results.get(each.measurement.name))) for some in all_of.values() for each in some]
    known = [(each, value) for each, value in values if value is not None]
    reached = sum(each.reached(value) for each, value in known)
    lines = [f"{len(values)} experiments: {len(known)} measured, of which {reached} reach what was asked."]
    for title, some in all_of.items():
        shown = [f"![{title}](../pictures/{_picture(title)})", ""] if _bars_of(some, results) else []
        lines += [
            "",
            f"## {title}",
            "",
            *shown,
            *_table(some, results),
            "",
            *_commands(some, results),
            *_own_judgements(some, results),
        ]
        if some is searches.EXPERIMENTS:
            lines += ["", searches.means({name: result["figures"] for name, result in results.items()})]
    return f"{before}{BEGIN}\n\n{chr(10).join(lines).strip()}\n\n{END}{after}"


def value_of(each: Experiment, result: Mapping[str, Any] | None) -> float | None:
    """The value of an experiment in a result; None if it has none."""
    if result is None or not result["figures"]:
        return None
    try:
        value = float(each.figure(result["figures"]))
    except (KeyError, ValueError, ZeroDivisionError):
        return None
    return value if math.isfinite(value) else None


def _table(some: Sequence[Experiment], results: Mapping[str, Result]) -> list[str]:
    lines = [
        "| experiment | the paper reports | measured here | value | of the paper's | asked | another day | by |",
        "|---|---|---|---:|---:|---|---|---|",
    ]
    for each in some:
        result = results.get(each.measurement.name)
        value = value_of(each, result)
        before = value_of(each, (result or {}).get("before"))
        ratio = f"{value / each.published:.2f}" if value is not None and each.published else "–"
        asked = f"{each.better} {_number(each.asked, each.unit)}"
        if value is not None:
            asked += ": reached" if each.reached(value) else ": **missed**" + (f", {each.why}" if each.why else "")
        lines.append(
            "| " + " | ".join(
                cell.replace("|", "/") for cell in (
                    each.title, ": ".join(filter(None, (each.place, each.reported))) or "–", each.setting,
                    "not measured" if value is None else _number(value, each.unit), ratio, asked,
                    _other_day(each, value, before, result), each.measurement.name,
                )
            ) + " |"
        )  # fmt: skip
    return lines


def _other_day(each: Experiment, value: float | None, before: float | None, result: Result | None) -> str:
    if value is None or before is None or result is None:
        return "–"
    agrees = abs(value - before) <= each.noise * max(abs(value), abs(before))
    said = "agrees within" if agrees else "**differs** by more than"
    return f"{_number(before, each.unit)} on {result['before']['date']}: {said} {100 * each.noise:.2g} %"


def _number(value: float, unit: str) -> str:
    shown = "0"
    if value:
        digits = DIGITS - 1 - math.floor(math.log10(abs(value)))
        shown = f"{value:.{max(0, digits)}f}" if digits < MOST_DIGITS else f"{value:.1e}"
    return f"{shown}{' ' if unit not in ('x', '') else ''}{unit}"


def _commands(some: Sequence[Experiment], results: Mapping[str, Result]) -> list[str]:
    lines = ["| by | command | seconds | date | commit | machine |", "|---|---|---:|---|---|---|"]
    for each in {one.measurement.name: one.measurement for one in some}.values():
        command = " ".join(f'"{word}"' if " " in word else word for word in each.command)
        result = results.get(each.name)
        if result is None:
            lines.append(f"| {each.name} | `python {command}` | – | not measured | – | – |")
            continue
        found = result["machine"]
        where = f"{found['cores']} cores, {found['device']}, {found['gib']} GiB, torch {found['torch']}"
        took = f"{result['seconds']:.0f}" if result["outcome"] == "done" else result["outcome"]
        lines.append(f"| {each.name} | `python {command}` | {took} | {result['date']} | {result['commit']} | {where} |")
    return lines


def _own_judgements(some: Sequence[Experiment], results: Mapping[str, Result]) -> list[str]:
    """What commands say that they miss beside the rows, such as other results."""
    lines = []
    for each in {one.measurement.name: one.measurement for one in some}.values():
        figures = (results.get(each.name) or {}).get("figures") or {}
        rows = missed_of(some, each, figures)
        lines += [f"- {each.name}: {words}" for words in figures.get("missed", ()) if words not in rows]
    return ["", "Also missed, as the commands judge, some by narrower limits:", "", *lines] if lines else []


def pictures(results: Mapping[str, Result]) -> dict[str, str]:
    """Files and their contents: for each paper, its experiments that are times of something, as bars."""
    found = {}
    for title, some in experiments_of().items():
        if rows := _bars_of(some, results):
            found[_picture(title)] = bars(title, rows)
    return found


def _picture(title: str) -> str:
    return f"benchmarks-{title.partition(':')[0].lower().replace(' ', '-')}.svg"


def _bars_of(some: Iterable[Experiment], results: Mapping[str, Result]) -> list[tuple[str, float, float | None]]:
    """Name, value and published value of the experiments that are times of something."""
    faster = [each for each in some if each.unit == "x" and each.better == "at least"]
    values = [(each, value_of(each, results.get(each.measurement.name))) for each in faster]
    return [(each.title, value, each.published) for each, value in values if value is not None]


def bars(title: str, rows: Iterable[tuple[str, float, float | None]]) -> str:
    """Bars of values, with a thin one for that of the paper where there is one, and a line at 1."""
    rows = list(rows)
    most = max(value for _, *pair in rows for value in pair if value is not None) or 1.0
    scale, width = BAR / most, LABEL + BAR + VALUE
    height = (len(rows) + 2) * ROW + PAD
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{TEXT}"><title>{escape(title)}</title>',
        f'<text x="{PAD}" y="{ROW - 6}" font-weight="bold">{escape(title)}, times as fast</text>',
    ]
    for number, (name, value, published) in enumerate(rows, start=1):
        top = number * ROW
        lines.append(f'<text x="{LABEL - PAD}" y="{top + 14}" text-anchor="end">{escape(name.replace("`", ""))}</text>')
        lines.append(f'<rect x="{LABEL}" y="{top + 4}" width="{value * scale:.1f}" height="8" rx="1" fill="{OURS}"/>')
        beside = f"{value:.2f}"
        if published is not None:
            lines.append(
                f'<rect x="{LABEL}" y="{top + 13}" width="{published * scale:.1f}" height="4" rx="1" fill="{THEIRS}"/>'
            )
            beside += f" (paper {published:g})"
        end = LABEL + max(value, published or 0, 1.0) * scale  # right of the line at 1
        lines.append(f'<text x="{end + 5:.1f}" y="{top + 14}">{beside}</text>')
    one, bottom = LABEL + scale, (len(rows) + 1) * ROW
    lines.append(
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{ROW}" y2="{bottom}" stroke="{TEXT}" stroke-dasharray="3 3"/>'
        f'<text x="{one:.1f}" y="{bottom + 14}" text-anchor="middle">1</text></svg>'
    )
    return "\n".join(lines) + "\n"
