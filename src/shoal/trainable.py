"""What a training that is a program of its own calls: a function that `tune` was given, or any Python program.

In a study the environment says where reports go (`SHOAL_REPORT`, a socket), which directory is the trial's own
(`SHOAL_CHECKPOINT`) and how many reports its contents have behind them (`SHOAL_STEP`).
"""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.core.errors import MetricNameError, ShoalError, TaskError
from shoal.core.objective import metric_fault

__all__ = ["TrainingStopped", "checkpoint", "report", "step"]


class TrainingStopped(SystemExit):
    """Ends a function or program whose trial goes no further now; a program that lets it pass exits with status 0."""


_made: int | None = None
"""Reports of the trial; None until somebody asks."""


def report(metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Tell the study what the trial has reached; budgets count these reports, as they count the epochs of a `Task`.

    What is in the directory of `checkpoint` at that moment is the trial's state after this report: a copy of it is put
    aside, wholly or not at all, if anything there has changed. The call returns when that is done. If the trial has
    reached its budget, or is to stop, it does not return but ends the function or program, as `sys.exit()` does: so
    save first, then report. Only one process of a program may report.

    Outside of a study it prints a line of JSON.

    Args:
        metrics: name to number; a tensor or array of one element is a number.
        step: how many reports the trial has made with this one: 1, 2, 3, ... By default one more than `step()`.

    Raises:
        MetricNameError: a metric is named by what is no string.
        TaskError: a metric is no number, or the step is not the next one.
        ShoalError: the study is gone.
    """
    global _made
    if not isinstance(metrics, Mapping):
        raise TaskError(f"`metrics` of a report must be a mapping of names to numbers, got {metrics!r}")
    number = _step(step)
    values = {name: _number(name, value) for name, value in metrics.items()}
    if address := os.environ.get("SHOAL_REPORT"):
        answer = _ask(address, {"metrics": values, "step": number})
        if refusal := answer.get("refused"):
            raise TaskError(refusal)
        if not answer["go_on"]:
            raise TrainingStopped(0)
    else:
        print(json.dumps({**values, "step": number}), flush=True)
    _made = number


def checkpoint() -> Path:
    """The directory in which a trial keeps what it wants to go on from.

    It holds what it held at the last report before which something in it was changed, whatever became of the process,
    the job or the machine's other programs since; of a new trial it is empty. `step()` says which report that was.

    Raises:
        ShoalError: outside of a study.
    """
    place = os.environ.get("SHOAL_CHECKPOINT")
    if not place:
        raise ShoalError(
            "shoal.checkpoint() was called outside of a study; start the program with `shoal run --space ... -- ...` "
            "or shoal.tune(function, ...), or name a directory in SHOAL_CHECKPOINT"
        )
    path = Path(place)
    path.mkdir(parents=True, exist_ok=True)
    return path


def step() -> int:
    """How many reports the trial has behind it, so `for epoch in range(shoal.step(), epochs)` goes on where it was.

    At the start it is the number of the report of which `checkpoint` holds the state: 0 where it holds nothing.
    """
    return int(os.environ.get("SHOAL_STEP", "0")) if _made is None else _made


def _step(given: int | None) -> int:
    if given is None:
        return step() + 1
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise TaskError(f"`step` of shoal.report must be a whole number, at least 1, got {given!r}")
    return given


def _number(name: object, value: Any) -> float:
    single = value.item() if getattr(value, "size", None) == 1 or _elements(value) == 1 else value
    if not isinstance(single, (str, bytes)):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            single = float(single)
    if fault := metric_fault(name, single):
        raise TaskError(fault) if isinstance(name, str) else MetricNameError(fault)
    return float(single)


def _elements(value: Any) -> object:
    """Of a tensor."""
    count = getattr(value, "numel", None)
    return count() if callable(count) else None


def _ask(address: str, message: Mapping[str, object]) -> dict[str, Any]:
    """What the worker answers to a message."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
    except OSError as error:
        raise ShoalError(
            f"the study that this program reports to is gone ({error}); resume it: shoal resume"
        ) from error
    if not line:
        raise ShoalError("the study that this program reports to is gone; resume it: shoal resume")
    answer: dict[str, Any] = json.loads(line)
    return answer
