"""Functions that a training function or program calls: `report`, `checkpoint` and `step`.

In a study, environment variables give the socket for reports (`SHOAL_REPORT`), the directory of the trial
(`SHOAL_CHECKPOINT`), and the number of the report after which its contents were made (`SHOAL_STEP`).
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.core.errors import MetricNameError, ShoalError, TaskError
from shoal.core.objective import metric_fault
from shoal.core.plain import plain

__all__ = [
    *("TrainingStopped", "checkpoint", "connected", "end_study", "forget_reports", "report", "report_before_return"),
    *("report_returned", "step"),
]


class TrainingStopped(SystemExit):
    """Raised to end a function or program whose trial stops. A program that does not catch it exits with status 0."""

    reached = False
    """Whether the trial has reached its budget."""


_report_count: int | None = None
"""Number of reports of the trial; None before the first one of this process."""


def report(metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Report metrics of the trial to the study. Budgets count reports as they count the epochs of a `Task`.

    The contents of the `checkpoint` directory are the trial's state after this report: if anything there has changed,
    a complete copy is made before the call returns. If the trial has reached its budget, or must stop, the call does
    not return but ends the function or program, as `sys.exit()` does. So save first, then report. Only one process of
    a program may report.

    Outside of a study it prints a line of JSON.

    Args:
        metrics: Name -> number; a tensor or array of one element is a number.
        step: Number of this report: 1, 2, 3, ... By default one more than `step()`.

    Raises:
        MetricNameError: The name of a metric is not a string.
        TaskError: A metric is not a number, or the step is not the next one.
        ShoalError: The study has ended.
    """
    _report(metrics, step, {})


def report_before_return(metrics: Mapping[str, Any]) -> bool:
    """Report as `report` does from a function whose return value replaces its last report; return whether all of the
    budget is reported, so that the next report ends the function.
    """
    return _report(metrics, None, {"returns": False})


def report_returned(metrics: Mapping[str, Any]) -> None:
    """Replace the metrics of the last report by those of the value that the function returns."""
    _report(metrics, step(), {"returns": True})


def end_study(*, before: bool = False) -> None:
    """Ask the study to begin no trial after the running ones; or say that one was asked so `before` this trial began,
    which then waits again.
    """
    if address := os.environ.get("SHOAL_REPORT"):
        with connected(address) as connection:
            connection.sendall(json.dumps({"ends_study": not before}).encode() + b"\n")


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    """Connect to the worker of this program, whatever `socket.setdefaulttimeout` the program has called."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(None)
        connection.connect(address)
        yield connection


def _report(metrics: Mapping[str, Any], step: int | None, kind: Mapping[str, bool]) -> bool:
    """Report; return whether all of the budget is reported."""
    global _report_count
    if not isinstance(metrics, Mapping):
        raise TaskError(f"`metrics` of a report must be a mapping of names to numbers, got {metrics!r}")
    number, reached = _step(step), False
    values = {name: _number(name, value) for name, value in metrics.items()}
    if address := os.environ.get("SHOAL_REPORT"):
        answer = _send_report(address, {"metrics": values, "step": number, **kind})
        reached = bool(answer.get("reached"))
        if refusal := answer.get("refused"):
            raise TaskError(refusal)
        if not answer["go_on"]:
            stopped = TrainingStopped(0)
            stopped.reached = reached
            raise stopped
    else:
        print(json.dumps({**values, "step": number}), flush=True)
    _report_count = number
    return reached


def forget_reports() -> None:
    """Count reports from `SHOAL_STEP` again, in a fork of a process that may have reported."""
    global _report_count
    _report_count = None


def checkpoint() -> Path:
    """Return the directory for the checkpoint of the trial.

    At the start it has the contents of the last report that changed them, even if the process or the job was killed
    since; for a new trial it is empty. `step()` is the number of that report.

    Raises:
        ShoalError: The program runs outside of a study.
    """
    place = os.environ.get("SHOAL_CHECKPOINT")
    if not place:
        raise ShoalError(
            "shoal.checkpoint() was called outside of a study; start the program with `shoal run --space ... -- ...` "
            "or shoal.tune(function, ...), or name a directory in SHOAL_CHECKPOINT"
        )
    path = Path(place)
    path.mkdir(parents="SHOAL_REPORT" not in os.environ, exist_ok=True)  # that of a study was moved if it is not there
    return path


def step() -> int:
    """Return the number of reports so far, so that `for epoch in range(shoal.step(), epochs)` continues where the trial
    was.

    At the start it is the number of the report whose state `checkpoint` has; 0 if it has none.
    """
    return int(os.environ.get("SHOAL_STEP", "0")) if _report_count is None else _report_count


def _step(given: int | None) -> int:
    if given is None:
        return step() + 1
    number = plain(given)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise TaskError(f"`step` of shoal.report must be a whole number, at least 1, got {given!r}")
    return number


def _number(name: object, value: Any) -> float:
    single = value.item() if getattr(value, "size", None) == 1 or _element_count(value) == 1 else value
    if not isinstance(single, (str, bytes)):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            single = float(single)
    if fault := metric_fault(name, single):
        raise TaskError(fault) if isinstance(name, str) else MetricNameError(fault)
    return float(single)


def _element_count(value: Any) -> object:
    count = getattr(value, "numel", None)
    return count() if callable(count) else None


def _send_report(address: str, message: Mapping[str, object]) -> dict[str, Any]:
    """Send a message to the worker and return its answer."""
    try:
        with connected(address) as connection:
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
