"""A drawing of what an epoch of some configurations takes: apart, packed, fused, and as Shoal would have them."""

from pathlib import Path

from shoal.dry_run.result import PLANS, DryRun, percent
from shoal.reporting.drawing import literal, save
from shoal.reporting.dry_run_table import seconds_text, verdict

__all__ = ["draw_dry_run"]


def draw_dry_run(found: DryRun, path: Path, title: str) -> None:
    """Draw a bar for each plan.

    Args:
        found: of one array at least.
        path: a file that `check_drawing` accepts.
        title: over all.

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
