"""The trials of a study as a pandas data frame."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ShoalError
from shoal.core.space import flatten
from shoal.journal.rows import TrialRow
from shoal.reporting.text import state_name

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["dataframe"]

_FIRST = ("trial", "state")
_LAST = ("epochs", "seconds", "device", "array", "reason")


def dataframe(rows: Sequence[TrialRow], *, runs: bool = True) -> "pd.DataFrame":
    """One row a trial.

    Columns: `trial`, `state`, `config.<dotted name>` for every value in any config, each metric by its name (its last
    value) and `<name>.best`, `epochs`, `seconds`, `device`, `array`, `reason`. A config value that a trial does not
    have, like a metric it has not reported, is NaN. A metric that bears the name of another column, be it that of the
    best of another metric, is called `metric.<name>`.

    Args:
        rows: as read from the journal.
        runs: whether a process runs the study; if none does, what was running is "interrupted".

    Raises:
        ShoalError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise ShoalError("a data frame needs pandas. Install it with: pip install 'shoal[report]'") from error
    configs = [{f"config.{name}": value for name, value in flatten(row.config).items()} for row in rows]
    columns: dict[str, list[Any]] = {
        "trial": [row.number for row in rows],
        "state": [state_name(row.state, runs) for row in rows],
    }
    for name in _names(configs):
        columns[name] = [config.get(name, math.nan) for config in configs]
    metrics = _names([row.metrics for row in rows])
    bests = {f"{name}.best" for name in metrics}
    for name in metrics:
        column = name
        while column in columns or column in _LAST or column in bests or f"{column}.best" in columns:
            column = f"metric.{column}"
        columns[column] = [row.metrics.get(name, math.nan) for row in rows]
        columns[f"{column}.best"] = [row.best.get(name, math.nan) for row in rows]
    columns["epochs"] = [row.epoch for row in rows]
    columns["seconds"] = [row.seconds for row in rows]
    columns["device"] = [row.device for row in rows]
    columns["array"] = [row.job for row in rows]
    columns["reason"] = [row.reason for row in rows]
    return pd.DataFrame(columns)


def _names(rows: Sequence[Any]) -> list[str]:
    """All keys, in the order in which they first come."""
    return list(dict.fromkeys(name for row in rows for name in row))
