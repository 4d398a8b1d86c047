"""A Gantt chart of what a policy did."""

from collections.abc import Mapping
from pathlib import Path

from shoal.reporting.drawing import lanes, literal, save
from shoal.simulate.result import SimulationResult

__all__ = ["draw_gantt"]


def draw_gantt(outcomes: Mapping[str, SimulationResult], path: Path, title: str) -> None:
    """Draw who was where and when, and the occupancy below: one panel of each for every policy.

    Args:
        outcomes: by the policy's name.
        path: a file that `check_drawing` accepts.
        title: over all.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    devices = sorted({stay.device for outcome in outcomes.values() for stay in outcome.intervals})
    end = max((stay.end for outcome in outcomes.values() for stay in outcome.intervals), default=1.0)
    tall = min(20.0, max(1.5, 0.3 * len(devices)))
    figure = Figure(figsize=(11, len(outcomes) * (tall + 1.4) + 0.6), layout="constrained")
    axes = figure.subplots(
        2 * len(outcomes), 1, squeeze=False, sharex=True, height_ratios=[tall, 0.8] * len(outcomes)
    ).ravel()
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for index, (policy, outcome) in enumerate(outcomes.items()):
        chart, used = axes[2 * index : 2 * index + 2]
        shade = {job: colours[number % len(colours)] for number, job in enumerate(outcome.arrivals)}
        for row, device in enumerate(devices):
            here = [stay for stay in outcome.intervals if stay.device == device]
            for lane, count, stay in lanes(here):
                height = 0.9 / count
                chart.broken_barh(
                    [(stay.begin, stay.end - stay.begin)],
                    (row - 0.45 + lane * height, height),
                    facecolors=shade[stay.trial],
                    edgecolor="white",
                    linewidth=0.3,
                )
        labels = [literal(device) for device in devices]
        chart.set_yticks(range(len(devices)), labels, fontsize=7 if len(devices) < 40 else 3)
        chart.set_ylim(len(devices) - 0.5, -0.5)
        told = f"makespan {outcome.makespan:,.0f} s" if outcome.completion else "no job ended"
        chart.set_title(f"{policy}: {told}", fontsize=10, loc="left")
        times = [*(time for time, _ in outcome.occupancy), end]
        used.stairs([value for _, value in outcome.occupancy], times, fill=True, color="0.6")
        used.set_ylim(0, 1)
        used.set_ylabel("in use", fontsize=8)
        used.set_xlim(0, end)
    axes[-1].set_xlabel("seconds")
    figure.suptitle(literal(title), fontsize=10)
    save(figure, path, "the chart")
