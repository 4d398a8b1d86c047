"""The reports of a study's trials as a pandas data frame."""

import math
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError
from shoal.journal.check import named_trials
from shoal.journal.view import JournalView

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check_pandas", "history_frame"]


def check_pandas() -> None:
    """Raise a ShoalError if pandas is not installed."""
    if find_spec("pandas") is None:
        raise ShoalError("a data frame needs pandas. Install it with: pip install pandas")


def history_frame(journal: JournalView, number: int | None = None) -> "pd.DataFrame":
    """Return a row for each report of a trial, or of all trials; see `Study.history`."""
    check_pandas()
    import pandas as pd

    if number is not None:
        named_trials(journal, [number])
    step = "step" if journal.spec.opaque else "epoch"
    found = [row for row in journal.reports_after(0, sys.maxsize) if number in (None, row[2].trial)]
    reports = [report for _, _, report in found]
    columns: dict[str, Any] = {} if number is not None else {"trial": [report.trial for report in reports]}
    columns[step] = [report.epoch for report in reports]
    for name in dict.fromkeys(name for report in reports for name in report.metrics):
        column = name
        while column in (*columns, "trial", "seconds", "time"):
            column = f"metric.{column}"
        columns[column] = [report.metrics.get(name, math.nan) for report in reports]
    columns["seconds"] = [report.seconds for report in reports]
    columns["time"] = pd.to_datetime([time for _, time, _ in found], unit="s", utc=True)
    frame = pd.DataFrame(columns)
    return frame if number is not None else frame.sort_values(["trial", step], ignore_index=True)
