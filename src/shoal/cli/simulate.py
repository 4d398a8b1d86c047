"""`shoal simulate`: run a scenario, and show the results as a table, as JSON and as pages."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shoal.cli.options import AsJson, named_option, print_json, print_message, print_table
from shoal.look.page.files import check_page_file, write_frozen_page
from shoal.plan.schedule.registry import POLICIES
from shoal.simulate.run import SimulationResult
from shoal.simulate.scenario import DATA, Scenario, load

__all__ = ["faults", "outcome_json", "outcomes_table", "simulate"]

_HEADS = {"makespan": "makespan", "mean_completion": "mean job", "time_to_target": "to target"}
"""Titles of the objectives of a scenario; short, so that eleven columns fit into a terminal."""

_ALIKE = ("time_to_target", "time_to_good")
"""Objectives that are one in a simulation, whose curves have their targets."""


def simulate(
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO.toml", exists=True, dir_okay=False, help="Scenario file; see docs/simulate.md."
        ),
    ],
    policy: Annotated[
        list[str] | None, named_option(POLICIES, "Policy to simulate; by default those in the file", repeatable=True)
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed instead of the one in the file.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write an HTML report of the simulated study, as shoal report does."),
    ] = None,
    data: Annotated[Path, typer.Option(file_okay=False, help="Folder with the tables of measurements.")] = DATA,
    as_json: AsJson = False,
) -> None:
    """Simulate a search on a cluster under several policies, without running it.

    The file describes machines, studies and events, and the policies to compare unless --policy names them. With --html
    search.html a report is written; for several policies search-fifo.html and so on. The exit status is 1 if jobs are
    left unfinished under a policy.
    """
    if html is not None:
        check_page_file(html)
    loaded_scenario = load(scenario, data, seed)
    names = dict.fromkeys(policy or loaded_scenario.policies)
    pages = {name: html if len(names) == 1 else html.with_stem(f"{html.stem}-{name}") for name in names} if html else {}
    outcomes = {name: _simulated(loaded_scenario, name, pages.get(name)) for name in names}
    if as_json:
        print_json([outcome_json(loaded_scenario, name, outcome) for name, outcome in outcomes.items()])
    else:
        print_table(outcomes_table(loaded_scenario, outcomes))
    for page in pages.values():
        print_message(f"written: {page}")
    if unfinished := faults(outcomes):
        for line in unfinished:
            print_message(line)
        raise typer.Exit(1)


def _simulated(scenario: Scenario, policy: str, page: Path | None) -> SimulationResult:
    if page is None:
        return scenario.simulate(policy)
    with tempfile.TemporaryDirectory(prefix="shoal-simulate-") as folder:
        directory = Path(folder) / f"{scenario.name}, {policy}"
        outcome = scenario.simulate(policy, directory)
        write_frozen_page(directory, page)
    return outcome


def outcomes_table(scenario: Scenario, outcomes: Mapping[str, SimulationResult]) -> Table:
    """Return a table with a row for each policy; the scenario's objective is marked, and its best value."""
    table = Table(
        title=escape(f"{scenario.name}: {scenario.description}"), title_justify="left", box=None, collapse_padding=True
    )
    table.add_column("policy", min_width=max(map(len, outcomes)))
    reached = any(outcome.reached for outcome in outcomes.values())
    shown = [name for name in _HEADS if name != "time_to_target" or reached]
    for name in shown:
        mark = "*" if name == scenario.objective or (name, scenario.objective) == _ALIKE else ""
        table.add_column(_HEADS[name] + mark, justify="right")
        if name == "mean_completion":
            table.add_column("p95 job", justify="right")
    for title in ("in use", "device s", "ended", "switches", "decisions", "ms each"):
        table.add_column(title, justify="right")
    best = min(outcome.rank(scenario.objective) for outcome in outcomes.values())
    for policy, outcome in outcomes.items():
        cells = []
        for name in shown:
            cells.append(_seconds(getattr(outcome, name)))
            if name == "mean_completion":
                cells.append(_seconds(outcome.p95_completion))
        cells += [
            f"{outcome.mean_occupancy:.0%}",
            f"{outcome.device_seconds:,.0f}",
            f"{len(outcome.completion)}/{len(outcome.arrivals)}",
            f"{outcome.switches}",
            f"{outcome.decisions}",
            f"{1000 * outcome.decision_seconds / max(1, outcome.decisions):.2f}",
        ]
        table.add_row(policy, *cells, style="bold" if outcome.rank(scenario.objective) == best else None)
    return table


def faults(outcomes: Mapping[str, SimulationResult]) -> list[str]:
    """Return a line for each policy under which jobs did not end: their number, and the reason of the first."""
    lines = []
    for policy, outcome in outcomes.items():
        if outcome.waiting:
            segment, reason = next(iter(outcome.waiting.items()))
            lines.append(f"{policy}: {len(outcome.waiting)} jobs still waiting at the end, such as {segment}: {reason}")
    return lines


def outcome_json(scenario: Scenario, policy: str, outcome: SimulationResult) -> dict[str, Any]:
    """Return all figures of a result for programs; times in seconds, None if no job came so far."""
    figures = {
        name: value if isfinite(value := getattr(outcome, name)) else None
        for name in ("makespan", "mean_completion", "p95_completion", "time_to_target", "mean_occupancy")
    }
    fields = asdict(outcome) | {"occupancy": outcome.occupancy, "device_seconds": outcome.device_seconds}
    del fields["clusters"]
    return {"scenario": scenario.name, "policy": policy, "objective": scenario.objective, **figures, **fields}


def _seconds(value: float) -> str:
    """Format seconds as 34.2 s, 12:05 minutes or 3:20:00 hours, or - if there is no such time."""
    if not isfinite(value):
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
