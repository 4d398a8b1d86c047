"""`shoal simulate`: run a scenario, and show the results as a table, as JSON and as a Gantt chart."""

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from shoal.cli.options import AsJson, named_option, print_json, print_message, print_table
from shoal.reporting.drawing import assign_lanes, check_drawing, escape_math, save_figure
from shoal.schedule.registry import POLICIES
from shoal.simulate.result import SimulationResult
from shoal.simulate.scenario import DATA, Scenario, load

__all__ = ["draw_gantt", "faults", "outcome_json", "outcomes_table", "simulate"]

_HEADS = {"makespan": "makespan", "mean_completion": "mean job", "time_to_target": "to target"}
"""Titles of the objectives of a scenario; short, so that eleven columns fit into a terminal."""

_ALIKE = ("time_to_target", "time_to_good")
"""Objectives that are one in a simulation, whose curves have their targets."""


def simulate(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.toml", exists=True, dir_okay=False, help="See docs/simulate.md.")
    ],
    policy: Annotated[
        list[str] | None, named_option(POLICIES, "Policy to simulate; by default those of the file", repeatable=True)
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Counts instead of the file's.")] = None,
    gantt: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw who ran where: a .png or .svg file.")] = None,
    data: Annotated[Path, typer.Option(file_okay=False, help="Folder of the measured tables.")] = DATA,
    as_json: AsJson = False,
) -> None:
    """Simulate a search on a cluster under several policies, without running it.

    The file describes machines, studies and events. Without --policy it also names the compared policies. The exit
    status is 1 if jobs did not end under one of them.
    """
    if gantt is not None:
        check_drawing(gantt, "a Gantt chart")
    loaded_scenario = load(scenario, data, seed)
    outcomes = {name: loaded_scenario.simulate(name) for name in policy or loaded_scenario.policies}
    if as_json:
        print_json([outcome_json(loaded_scenario, name, outcome) for name, outcome in outcomes.items()])
    else:
        print_table(outcomes_table(loaded_scenario, outcomes))
    if gantt is not None:
        draw_gantt(outcomes, gantt, f"{loaded_scenario.name}: {loaded_scenario.description}")
        print_message(f"drawn in {gantt}")
    if unfinished := faults(outcomes):
        for line in unfinished:
            print_message(line)
        raise typer.Exit(1)


def outcomes_table(scenario: Scenario, outcomes: Mapping[str, SimulationResult]) -> Table:
    """Return a table with a row for each policy; the scenario's objective is marked, and its best value.

    The ratios of oversubscription that a tuner has found are in a line below.
    """
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
    ratios = [f"{policy} {_ratios(outcome.oversubscription)}" for policy, outcome in outcomes.items()]
    if any(outcome.oversubscription for outcome in outcomes.values()):
        table.caption, table.caption_justify = f"oversubscription found: {'; '.join(ratios)}", "left"
    return table


def _ratios(oversubscription: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {ratio:g}" for kind, ratio in oversubscription.items()) or "none"


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


def draw_gantt(outcomes: Mapping[str, SimulationResult], path: Path, title: str) -> None:
    """Draw the jobs on all devices over time, and the occupancy below, for every policy.

    Args:
        outcomes: Results by name of the policy.
        path: File that `check_drawing` accepts.
        title: Title of the chart.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    devices = sorted({interval.device for outcome in outcomes.values() for interval in outcome.intervals})
    end = max((interval.end for outcome in outcomes.values() for interval in outcome.intervals), default=1.0)
    chart_height = min(20.0, max(1.5, 0.3 * len(devices)))
    figure = Figure(figsize=(11, len(outcomes) * (chart_height + 1.4) + 0.6), layout="constrained")
    axes = figure.subplots(
        2 * len(outcomes), 1, squeeze=False, sharex=True, height_ratios=[chart_height, 0.8] * len(outcomes)
    ).ravel()
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for index, (policy, outcome) in enumerate(outcomes.items()):
        chart, usage = axes[2 * index : 2 * index + 2]
        colour_of = {job: colours[number % len(colours)] for number, job in enumerate(outcome.arrivals)}
        for row, device in enumerate(devices):
            intervals = [interval for interval in outcome.intervals if interval.device == device]
            for lane, count, interval in assign_lanes(intervals):
                height = 0.9 / count
                chart.broken_barh(
                    [(interval.begin, interval.end - interval.begin)],
                    (row - 0.45 + lane * height, height),
                    facecolors=colour_of[interval.trial],
                    edgecolor="white",
                    linewidth=0.3,
                )
        labels = [escape_math(device) for device in devices]
        chart.set_yticks(range(len(devices)), labels, fontsize=7 if len(devices) < 40 else 3)
        chart.set_ylim(len(devices) - 0.5, -0.5)
        caption = f"makespan {outcome.makespan:,.0f} s" if outcome.completion else "no job ended"
        chart.set_title(f"{policy}: {caption}", fontsize=10, loc="left")
        times = [*(time for time, _ in outcome.occupancy), end]
        usage.stairs([value for _, value in outcome.occupancy], times, fill=True, color="0.6")
        usage.set_ylim(0, 1)
        usage.set_ylabel("in use", fontsize=8)
        usage.set_xlim(0, end)
    axes[-1].set_xlabel("seconds")
    figure.suptitle(escape_math(title), fontsize=10)
    save_figure(figure, path, "the chart")
