"""The trials of a study, and their reports, as pandas data frames."""

import math
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError
from shoal.core.rows import TrialRow, Verdict
from shoal.core.space import flatten
from shoal.journal.check import named_trials
from shoal.journal.view import JournalView
from shoal.look.text import trial_state_text, trial_verdict_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check_pandas", "dataframe", "history_frame"]

_LAST_COLUMNS = ("violation", "best_epoch", "epochs", "seconds", "device", "job", "proof", "reason")


def check_pandas() -> None:
    """Raise a ShoalError if pandas is not installed."""
    if find_spec("pandas") is None:
        raise ShoalError("a data frame needs pandas. Install it with: pip install pandas")


def dataframe(
    rows: Sequence[TrialRow],
    *,
    runs: bool = True,
    proof: Mapping[int, Verdict] = MappingProxyType({}),
    constrained: bool = False,
) -> "pd.DataFrame":
    """Return a pandas data frame with a row for each trial.

    Columns: `trial`, `state` in the words of `shoal trials`, `config.<dotted name>` for every value in any config,
    each metric by its name (its last value) and `<name>.best` (of any epoch), `violation` of the constraints if the
    study has any, `best_epoch`, `epochs`, `seconds`, `device`, `job`, `proof`, `reason`. A config value that a trial
    does not have, like a metric it has not reported, is NaN. A metric whose name is that of another column, or of the
    best of another metric, is called `metric.<name>`. `proof` holds the verdicts of trials that were in an array.
    """
    check_pandas()
    import pandas as pd

    configs = [{f"config.{name}": value for name, value in flatten(row.config).items()} for row in rows]
    columns: dict[str, list[Any]] = {
        "trial": [row.number for row in rows],
        "state": [trial_state_text(row, runs) for row in rows],
    }
    for name in _names(configs):
        columns[name] = [config.get(name, math.nan) for config in configs]
    metrics = _names([row.metrics for row in rows])
    bests = {f"{name}.best" for name in metrics}
    for name in metrics:
        column = name
        while column in columns or column in _LAST_COLUMNS or column in bests or f"{column}.best" in columns:
            column = f"metric.{column}"
        columns[column] = [row.metrics.get(name, math.nan) for row in rows]
        columns[f"{column}.best"] = [row.best.get(name, math.nan) for row in rows]
    if constrained:
        columns["violation"] = [row.violation for row in rows]
    columns["best_epoch"] = [math.nan if row.best_epoch is None else row.best_epoch for row in rows]
    columns["epochs"] = [row.epoch for row in rows]
    for name in ("seconds", "device", "job"):
        columns[name] = [getattr(row, name) for row in rows]
    columns["proof"] = [trial_verdict_text(proof[row.number]) if row.number in proof else "" for row in rows]
    columns["reason"] = [row.reason for row in rows]
    return pd.DataFrame(columns)


def history_frame(journal: JournalView, number: int | None = None) -> "pd.DataFrame":
    """Return a row for each report of a trial, or of all trials; see `Study.history`."""
    check_pandas()
    import pandas as pd

    if number is not None:
        named_trials(journal, [number])
    step = "step" if journal.spec.opaque else "epoch"
    found = journal.reports_after(0, sys.maxsize, number)
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


def _names(rows: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))
