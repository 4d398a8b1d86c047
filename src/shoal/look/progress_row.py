"""The bar of a study with its epochs and times, which fits any width."""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from shoal.look.snapshot import Snapshot
from shoal.look.text import duration_text, epochs_text, left_text, timeout_text

__all__ = ["ProgressRow"]

_BAR_WIDTH, _MIN_BAR_WIDTH = 30, 1
_GAP = 2


@dataclass(frozen=True)
class ProgressRow:
    """Rich output: a bar, the epochs, the times, on one line; where it is narrow, the times stand below."""

    snapshot: Snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        snapshot = self.snapshot
        bar = ProgressBar(max(snapshot.epochs_total, 1), snapshot.epochs_done + snapshot.epochs_begun)
        progress = epochs_text(snapshot)
        left = left_text(snapshot) or timeout_text(snapshot)
        times = f"{duration_text(snapshot.elapsed)} elapsed{left and f', {left}'}"
        below = _MIN_BAR_WIDTH + len(progress) + len(times) + 2 * _GAP > options.max_width
        table = Table.grid(padding=(0, _GAP))
        table.add_column(max_width=_BAR_WIDTH)  # shrinks where the line does not fit
        table.add_column(no_wrap=True)
        if not below:
            table.add_column(no_wrap=True)
        table.add_row(bar, progress, *[times] * (not below))
        yield table
        if below:
            yield times
