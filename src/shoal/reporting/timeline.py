"""A drawing of the jobs of every device over time, below the best value so far."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.job import Purpose
from shoal.reporting.drawing import assign_lanes, escape_math, save_figure
from shoal.reporting.overview import SHARES, Bar, Overview, Usage
from shoal.reporting.text import duration_text, numbers_text, printable, rounded, state_text

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["TimelineBar", "axis_limit", "draw_timeline", "merge_thin_bars"]

_WIDTH = 12.0
"""Width of the drawing in inches."""
_DOTS_PER_INCH = 130
"""Dots per inch."""
_CHART_FRACTION = 0.8
"""Approximate fraction of the width that the bars take."""
_THIN_DOTS = 3.0
"""Width in dots: narrower bars that touch are drawn as one."""
_MAX_HEIGHT = 32.0
"""Most inches that all devices take together."""

_PALETTE = ("#4477aa", "#88ccee", "#228833", "#ccbb44", "#aa3377", "#44aa99", "#997700", "#bb88dd")
"""Colours that are distinct under colour blindness (after Paul Tol), none of them that of a failure."""
_OTHER_COLOUR = "#777777"
_MAX_VALUES = 4
"""Most values beyond an axis that are listed."""
_MAX_STRUCTURES = 3
"""Most structures without a colour of their own that are named."""
_FAILED = "#cc3311"
_PURPOSES = {
    Purpose.SIGNATURE: ("looks at models", "#dddddd"),
    Purpose.PROFILE: ("measures", "#b4b4b4"),
    Purpose.ASSIST: ("helps a job on another device", "#ddcc77"),
}


@dataclass(frozen=True)
class TimelineBar:
    """A bar in a lane: a job, or several that are too thin to be drawn separately.

    Args:
        begin: Start in seconds.
        end: End in seconds.
        colour: Colour of the longest job.
        packed: Whether the longest job had several structures.
        jobs: Number of jobs.
        label: Texts for the bar, the preferred one first.
    """

    begin: float
    end: float
    colour: str
    packed: bool
    jobs: int = 1
    label: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end - self.begin


def draw_timeline(study: Overview, path: Path) -> None:
    """Draw a row of bars for each device, and above them the best value so far.

    Concurrent jobs lie in lanes below each other. Bars have the colour of their structure, for the structures that took
    most of the time; those of several are hatched; those that failed have a cross at their end.

    Args:
        study: Overview of the study.
        path: File that `check_drawing` accepts.

    Raises:
        ShoalError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [assign_lanes([bar for bar in study.bars if bar.job.device == usage.device.name]) for usage in study.usage]
    heights = _heights([max((count for _, count, _ in row), default=1) for row in rows])
    total_height = sum(heights) or 0.5
    figure = Figure(figsize=(_WIDTH, total_height + 3.2), layout="constrained")
    above, chart = figure.subplots(2, 1, sharex=True, height_ratios=[1.3, total_height])
    unit, seconds = _unit(study.elapsed.total)
    _draw_curve(above, study, seconds)
    colours = _colours(study.bars)
    dot = study.elapsed.total / (_WIDTH * _CHART_FRACTION * _DOTS_PER_INCH)
    boxes: list[_Box] = []
    top, centres = 0.0, []
    for row, height in zip(rows, heights, strict=True):
        boxes += _boxes(row, top, height, colours, _THIN_DOTS * dot)
        _draw_failures(chart, row, top, height, seconds)
        centres.append(top + height / 2)
        top += height
        chart.axhline(top, color="0.85", linewidth=0.5, zorder=0)
    _draw_boxes(chart, boxes, dot, seconds)
    _name_devices(chart, study.usage, centres, min(heights, default=total_height))
    chart.set_ylim(total_height, 0)
    chart.set_xlim(0, study.elapsed.total / seconds)
    with_resumes = f"{unit} of running time; the study was resumed at the dashed lines"
    chart.set_xlabel(f"{with_resumes if study.elapsed.resumes else unit}\n{SHARES}", fontsize=8)
    chart.tick_params(axis="x", labelsize=8)
    for moment in study.elapsed.resumes:
        for axes in (above, chart):
            axes.axvline(moment / seconds, color="0.3", linewidth=0.7, linestyle=(0, (4, 3)), zorder=4)
    if handles := _legend(study, colours):
        figure.legend(handles=handles, loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    figure.suptitle(escape_math(_title(study)), fontsize=10, x=0.01, ha="left")
    save_figure(figure, path, "the timeline", _DOTS_PER_INCH)


def merge_thin_bars(bars: Sequence[TimelineBar], min_seconds: float) -> list[TimelineBar]:
    """Return the bars of a lane, with thin bars that touch merged.

    Args:
        bars: Bars of one lane, in order.
        min_seconds: Seconds. Shorter bars merge up to that length if they are less than a third of it apart.
    """
    found: list[TimelineBar] = []
    longest = 0.0  # seconds of the longest bar in the last piece
    for bar in bars:
        last = found[-1] if found else None
        apart = last is None or bar.begin - last.end >= min_seconds / 3
        if last is None or apart or max(bar.seconds, last.seconds) >= min_seconds:
            found.append(bar)
            longest = bar.seconds
            continue
        style = bar if bar.seconds > longest else last
        longest = max(longest, bar.seconds)
        found[-1] = replace(style, begin=last.begin, end=max(last.end, bar.end), jobs=last.jobs + bar.jobs, label=())
    return found


def _heights(counts: Sequence[int]) -> list[float]:
    """Return the height of each device's row in inches, by its number of lanes."""
    least = max(0.2, min(0.5, 4 / max(len(counts), 1)))
    heights = [max(least, min(1.0, 0.14 * count)) for count in counts]
    scale = max(1.0, sum(heights) / _MAX_HEIGHT)
    return [height / scale for height in heights]


def _name_devices(axes: "Axes", usage: Sequence[Usage], centres: Sequence[float], height: float) -> None:
    """Name each device on the left; on the right give its used and its reserved share."""
    size = 8.0 if height >= 0.18 else max(3.0, 44 * height)
    axes.set_yticks(centres, [_device_text(each, height) for each in usage], fontsize=size)
    axes.tick_params(axis="y", length=0)
    across = axes.get_yaxis_transform()
    for place, name, shares in (
        (1.04, "used", [each.busy for each in usage]),
        (1.09, "reserved", [each.occupancy for each in usage]),
    ):
        axes.annotate(
            name,
            (place, 1),
            (0, 2),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=7,
            color="0.4",
            ha="right",
        )
        for centre, share in zip(centres, shares, strict=True):
            axes.text(place, centre, f"{share:.0%}", va="center", ha="right", fontsize=size, transform=across)


@dataclass(frozen=True)
class _Box:
    """Place of a bar: inches from the top, and inches of thickness."""

    bar: TimelineBar
    upper: float
    thickness: float

    @property
    def centre(self) -> float:
        return self.upper + self.thickness / 2


def _boxes(
    row: Sequence[tuple[int, int, Bar]], top: float, height: float, colours: Mapping[str, str], min_seconds: float
) -> list[_Box]:
    """Return the bars of a device's row, between `top` and `height` below it."""
    found: list[_Box] = []
    for lane, count in sorted({(lane, count) for lane, count, _ in row}):
        thickness = 0.92 * height / count
        bars = [_timeline_bar(bar, colours) for place, _, bar in row if place == lane]
        found += [
            _Box(bar, top + 0.04 * height + lane * thickness, 0.94 * thickness)
            for bar in merge_thin_bars(bars, min_seconds)
        ]
    return found


def _draw_boxes(axes: "Axes", boxes: Sequence[_Box], dot: float, seconds: float) -> None:
    """Draw all bars, a collection for each style; `dot` is the time of one dot, `seconds` the unit."""
    from matplotlib.collections import PolyCollection

    by_style: dict[tuple[str, bool, bool], list[_Box]] = {}
    for box in boxes:
        wide = box.bar.seconds >= 3 * _THIN_DOTS * dot
        by_style.setdefault((box.bar.colour, box.bar.packed, wide), []).append(box)
    for (colour, packed, wide), styled in by_style.items():
        corners = []
        for box in styled:
            left, right = box.bar.begin / seconds, max(box.bar.end, box.bar.begin + dot) / seconds
            top, bottom = box.upper, box.upper + box.thickness
            corners.append([(left, top), (right, top), (right, bottom), (left, bottom)])
        axes.add_collection(
            PolyCollection(
                corners,
                facecolors=colour,
                edgecolors="white",
                linewidths=0.4 if wide else 0.0,
                hatch="////" if packed else None,
            )
        )
    for box in boxes:
        _label(axes, box, dot, seconds)


def _draw_failures(
    axes: "Axes", row: Sequence[tuple[int, int, Bar]], top: float, height: float, seconds: float
) -> None:
    """Draw a cross at the end of each failed job of a row."""
    crosses = [
        (bar.end / seconds, top + height * (0.04 + 0.92 * (lane + 0.47) / count))
        for lane, count, bar in row
        if bar.job.failed
    ]
    if crosses:
        ends, centres = zip(*crosses, strict=True)
        size = min(24.0, (72 * 0.5 * height / row[0][1]) ** 2)
        axes.scatter(ends, centres, marker="x", s=size, c=_FAILED, linewidths=1.2, zorder=3, clip_on=False)


def _label(axes: "Axes", box: _Box, dot: float, seconds: float) -> None:
    """Draw the first of a bar's texts that fits its width."""
    bar = box.bar
    size = min(7.0, 72 * 0.7 * box.thickness)
    if size < 4:
        return
    width = bar.seconds / dot / _DOTS_PER_INCH * 72 - 4  # points
    for text in bar.label:
        if 0.62 * size * len(text) <= width:
            axes.text(
                (bar.begin + bar.seconds / 2) / seconds,
                box.centre,
                escape_math(text),
                fontsize=size,
                ha="center",
                va="center",
                color=_text_colour(bar.colour),
                bbox={"facecolor": bar.colour, "edgecolor": "none", "pad": 0.6} if bar.packed else None,
                in_layout=False,  # thousands of them would make the layout slow
            )
            return


def _text_colour(colour: str) -> str:
    """Return black or white, whichever reads better on a colour (relative luminance of sRGB, without its gamma)."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def _timeline_bar(bar: Bar, colours: Mapping[str, str]) -> TimelineBar:
    job = bar.job
    if job.purpose is not Purpose.TRAIN:
        word, colour = _PURPOSES[job.purpose]
        return TimelineBar(bar.begin, bar.end, colour, False, label=(f"{word}: {_numbers(job.trials)[0]}", word))
    first = job.keys[0] if job.keys else ""
    return TimelineBar(
        bar.begin, bar.end, colours.get(first, _OTHER_COLOUR), len(job.keys) > 1, label=_numbers(job.trials)
    )


def _numbers(trials: Sequence[int]) -> tuple[str, ...]:
    """Return the text of the trials, wide and narrow; if both are too wide, the first ones and an ellipsis."""
    numbers = numbers_text(trials)
    first, *others = numbers.split(", ")
    return (f"trial{'s' * (len(trials) > 1)} {numbers}", numbers, *([f"{first}, …"] if others else []))


def _colours(bars: Sequence[Bar]) -> dict[str, str]:
    """Return a colour for each of the structures that took most of the time, in the order of their first job."""
    seconds: dict[str, float] = {}
    for bar in bars:
        for key in bar.job.keys[:1]:
            seconds[key] = seconds.get(key, 0.0) + bar.end - bar.begin
    most = set(sorted(seconds, key=lambda key: -seconds[key])[: len(_PALETTE)])
    return dict(zip((key for key in seconds if key in most), _PALETTE, strict=False))


def _legend(study: Overview, colours: Mapping[str, str]) -> list["Artist"]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    jobs = [bar.job for bar in study.bars]
    named = [(study.structures[key], colour) for key, colour in colours.items()]
    if any(job.keys and job.keys[0] not in colours for job in jobs):
        named.append(("other structures", _OTHER_COLOUR))
    named += [entry for purpose, entry in _PURPOSES.items() if any(job.purpose is purpose for job in jobs)]
    handles: list[Artist] = [Patch(facecolor=colour, label=escape_math(label)) for label, colour in named]
    if packed := dict.fromkeys(key for job in jobs if len(job.keys) > 1 for key in job.keys):
        others = [study.structures[key] for key in packed if key not in colours]
        also = (
            f", also {', '.join(others[:_MAX_STRUCTURES])}{', …' * (len(others) > _MAX_STRUCTURES)}" if others else ""
        )
        label = escape_math(f"several structures{also}")
        handles.append(Patch(facecolor="white", edgecolor="0.3", hatch="////", label=label))
    if study.failures:
        handles.append(Line2D([], [], color=_FAILED, marker="x", linestyle="", label="failed"))
    return handles


def _draw_curve(axes: "Axes", study: Overview, seconds: float) -> None:
    curve = [(time / seconds, value) for time, value in study.curve if math.isfinite(value)]
    if curve:
        times, values = zip(*curve, strict=True)
        end = study.elapsed.total / seconds
        axes.step([*times, end], [*values, values[-1]], where="post", color="black", linewidth=1.2)
        axes.plot(times, values, ".", color="black", markersize=3)
        _clip(axes, curve)
    else:
        axes.text(0.5, 0.5, "no value yet", transform=axes.transAxes, ha="center", va="center", color="0.5", fontsize=9)
        axes.set_yticks([])
    name = printable(study.objectives[0].metric)
    axes.set_ylabel(escape_math(f"best {name if len(name) <= 18 else name[:17] + '…'}"), fontsize=8)
    axes.tick_params(axis="both", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def axis_limit(values: Sequence[float]) -> float | None:
    """End of an axis on the bad side, so that a few bad first values do not flatten the later ones.

    Args:
        values: Best value so far at each improvement, finite; the last one is the best.

    Returns:
        None if all values fit: the first is no more than ten times as far from the best as the one after the first
        third.
    """
    if len(values) < 3:
        return None
    first, third, best = values[0], values[len(values) // 3], values[-1]
    if abs(first / 10 - best / 10) <= abs(third - best):
        return None
    return best + 1.3 * (third - best)


def _clip(axes: "Axes", curve: Sequence[tuple[float, float]]) -> None:
    """End the axis at `axis_limit`, with an arrow at each value beyond it, and list these values."""
    end, best = axis_limit([value for _, value in curve]), curve[-1][1]
    if end is None:
        return
    axes.set_ylim(*sorted((end, best - 0.06 * (end - best))))
    beyond = [(time, value) for time, value in curve if (value - end) * (end - best) > 0]
    axes.plot(
        [time for time, _ in beyond],
        [end] * len(beyond),
        "^" if end > best else "v",
        color=_FAILED,
        markersize=5,
        clip_on=False,
    )
    axes.annotate(
        f"beyond the axis: {', '.join(rounded(value, 3) for _, value in beyond[:_MAX_VALUES])}"
        f"{', …' * (len(beyond) > _MAX_VALUES)}",
        (beyond[-1][0], end),
        (8, -1 if end > best else 1),
        textcoords="offset points",
        fontsize=7,
        color=_FAILED,
        va="top" if end > best else "bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )


def _unit(total: float) -> tuple[str, float]:
    """Return the unit in which times read well, and its seconds."""
    if total < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if total < 3 * 3600 else ("hours", 3600.0)


def _device_text(usage: Usage, height: float) -> str:
    name, kind = (text if len(text) <= 24 else text[:23] + "…" for text in (usage.device.name, usage.device.kind))
    return escape_math(f"{name}\n{kind}" if height >= 0.34 and kind else name)


def _title(study: Overview) -> str:
    states = study.state.states
    runs = study.state.pid is not None
    trials = ", ".join(f"{count} {state_text(state, runs)}" for state, count in states.items() if count) or "none yet"
    jobs = f"{len(study.bars)} jobs" if len(study.bars) != 1 else "1 job"
    return f"{study.name}: {jobs} in {duration_text(study.elapsed.total)}, trials: {trials}"
