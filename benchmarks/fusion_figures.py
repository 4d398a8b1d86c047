"""What `fusion.py` makes of its measurements: a table, a plot, and what was asked for and not reached."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rivals.race import OUT_OF_MEMORY

__all__ = ["draw", "gains", "missed", "table"]

Row = dict[str, Any]
"""A workload at one B: its names, and for each rival what was found."""

OURS = ("Shoal", "Shoal eager")
"""What has to train every model; a step that cannot be compiled is a result like vmap's."""
NOISE = 0.97
AGREE = {"float32": 5e-3, "bfloat16": 1e-1}
"""Relative difference of losses over the first steps; updates amplify rounding."""


def table(row: Row, after: Row | None) -> str:
    """One line for each rival of a cell; before the first cell of a workload a heading.

    Args:
        row: the cell.
        after: the cell whose table was printed before.
    """
    lines = []
    if after is None:
        lines.append(f"{'B':>4}  {'':21} {'samples/s':>10} {'of serial':>9} {'peak MB':>8}")
    if after is None or after["workload"] != row["workload"]:
        lines.append(f"{row['title']}: {row['sizes']}")
    for name, finding in row["rivals"].items():
        place = f"{row['members']:4}  {name:21}"
        if "fails" in finding:
            lines.append(f"{place} fails: {finding['fails'][:90]}")
            continue
        memory = f"{finding['peak_bytes'] / 1e6:8.1f}" if "peak_bytes" in finding else f"{'':8}"
        speed = f"{finding['samples_per_second']:10.0f} {finding.get('of_serial', math.nan):9.2f}"
        lines.append(f"{place} {speed} {memory}  {finding.get('note', '')}".rstrip())
    return "\n".join(lines)


def gains(rows: Sequence[Row]) -> dict[str, dict[int, dict[str, float]]]:
    """Speed relative to serial by workload, B and rival."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in rows:
        mine = {name: round(gain, 3) for name in row["rivals"] if (gain := _gain(row, name)) is not None}
        found.setdefault(row["workload"], {})[row["members"]] = mine
    return found


def missed(rows: Sequence[Row], device: str, dtype: str, judge_speed: bool) -> list[str]:
    """What was asked for and is not so, in words; nothing is judged that was not measured."""
    faults = []
    for row in rows:
        place = f"{row['workload']} B={row['members']}"
        for name in OURS:
            finding = row["rivals"].get(name, {})
            if "fails" in finding and finding["fails"] != OUT_OF_MEMORY:
                faults.append(f"{place}: {name} fails: {finding['fails']}")
        for name in (*OURS, "Shoal compiled"):
            finding = row["rivals"].get(name, {})
            if finding.get("off", 0.0) > AGREE[dtype]:
                faults.append(f"{place}: losses of {name} differ from the serial ones by {finding['off']:.1e}")
    if not judge_speed:
        return faults
    for row in rows:
        place = f"{row['workload']} B={row['members']}"
        own, vmap = _gain(row, "Shoal"), _gain(row, "vmap")
        if own is not None and own < NOISE:
            faults.append(f"{place}: Shoal {own:.2f} times serial, asked {NOISE}")
        if own is not None and vmap is not None and own < NOISE * vmap:
            faults.append(f"{place}: Shoal {own:.2f} times serial, vmap {vmap:.2f}")
    for workload, rival, members, least in ON_CPU if device == "cpu" else _on_gpu(rows):
        judged = [row for row in rows if row["workload"] == workload and members(row["members"])]
        reached = [_gain(row, rival) or 0.0 for row in judged if {rival, "serial"} <= row["rivals"].keys()]
        if reached and max(reached) < least:
            faults.append(f"{workload}: {rival} {max(reached):.2f} times serial, asked {least}")
    return faults


Asked = tuple[str, str, Callable[[int], bool], float]
"""Workload, rival, at which B (the best of them counts), and how many times serial."""

ON_CPU: list[Asked] = [
    ("mlp", "Shoal eager", lambda members: members == 16, 3.5),
    ("mlp", "Shoal compiled", lambda members: members == 16, 6.0),
    ("transformer", "Shoal", lambda members: True, 1.5),
    ("bert-tiny", "Shoal compiled", lambda members: members == 8, 2.5),
    ("lora-ranks", "Shoal compiled", lambda members: members == 4, 1.5),
]


def _on_gpu(rows: Sequence[Row]) -> list[Asked]:
    return [(name, "Shoal", lambda members: True, 4.0) for name in dict.fromkeys(row["workload"] for row in rows)]


def _gain(row: Row, rival: str) -> float | None:
    gain: float | None = row["rivals"].get(rival, {}).get("of_serial")
    return gain


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """A panel for each workload: the rivals' speed relative to serial over B."""
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    rivals = list(dict.fromkeys(name for row in rows for name in row["rivals"]))
    sizes = sorted({row["members"] for row in rows})
    across = min(4, len(workloads))
    down = math.ceil(len(workloads) / across)
    figure, axes = plt.subplots(down, across, figsize=(3.4 * across, 2.7 * down + 0.9), squeeze=False)
    for axis, workload in zip(axes.flat, workloads, strict=False):
        mine = [row for row in rows if row["workload"] == workload]
        for number, rival in enumerate(rivals):
            points = [(row["members"], gain) for row in mine if (gain := _gain(row, rival)) is not None]
            look: dict[str, Any] = {"color": f"C{number}", "linewidth": 1.2, "marker": "."}
            look |= {"Shoal": {"color": "black", "linewidth": 2.5, "zorder": 3}}.get(rival, {})
            look |= {"serial": {"color": "0.6", "marker": "", "linestyle": "--"}}.get(rival, {})
            if points:
                axis.plot(*zip(*points, strict=True), label=rival, **look)
        axis.set_title(mine[0]["title"], fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, labels=sizes)
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(workloads) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("speed, serial = 1")
    for axis in axes[-1, :]:
        axis.set_xlabel("members B")
    labelled = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes.flat]
    handles = {label: handle for pairs in labelled for handle, label in pairs}
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=len(handles), frameon=False, fontsize=9)
    figure.text(0.5, 0.005, title, ha="center", fontsize=7, color="0.4")
    figure.tight_layout(rect=(0, 0.02, 1, 0.93))
    figure.savefig(path, dpi=110)
    plt.close(figure)
