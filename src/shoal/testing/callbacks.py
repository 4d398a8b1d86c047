"""Conformance suite for callbacks: calls one as the follower of an invented study does."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from shoal.callbacks.base import Callback, EpochReport, StudyInfo, TrialResult
from shoal.core.objective import Objective
from shoal.core.trial import TrialState
from shoal.host.pickling import loaded

__all__ = ["check_callback"]

CONFIGS: dict[int, dict[str, Any]] = {
    0: {"lr": 0.1, "optimizer": {"name": "sgd", "nesterov": True}, "widths": [64, 32], "none": None},
    1: {"lr": 0.2, "optimizer": {"name": "adam"}, "widths": [], "none": None},
    2: {"lr": 0.3},
    1_000_000: {"lr": 1e-300},
}
"""Configs by number of the trial; the last trial was added by a user."""


def check_callback(make: Callable[[], Callback], directory: Path) -> None:
    """Run the whole suite on a callback, which is called in this process.

    The invented study has two runs, as if the first had been killed: the second has a new object, and begins with a
    repetition of the last batch. Trials end in each state, also without any report; values are NaN and infinite; a
    failed trial is tried again.

    Args:
        make: Factory of new callbacks with the same settings.
        directory: Empty directory for what the callback writes below the study's directory.

    Raises:
        AssertionError: the contract of `shoal.Callback` is broken.
        Exception: any error of the callback.
    """
    callback = make()
    assert isinstance(callback, Callback), f"{callback!r} is not a shoal.Callback"
    content = cloudpickle.dumps(callback)
    loss, accuracy = Objective("loss", "min"), Objective("accuracy", "max")
    study = StudyInfo("5e1f0123abc", directory.name, directory, (loss, accuracy), resumed=False, finished=False)
    first = _InventedRun(loaded(content), study)
    first.begin(0, 1, 2)
    first.report(0, 1, 0.5)
    first.report(1, 1, math.nan)
    first.batch_ends()
    first.report(0, 2, math.inf)
    first.end(2, TrialState.FAILED, epoch=0)
    first.batch_ends()
    first.batch_ends()
    first.run_ends(finished=False)
    second = _InventedRun(loaded(content), replace(study, resumed=True))
    second.report(0, 2, math.inf)  # at least once
    second.end(2, TrialState.FAILED, epoch=0)
    second.begin(1_000_000)
    second.batch_ends()
    second.report(2, 1, 0.25)
    second.report(1_000_000, 3, 0.125)
    for number, state in ((0, TrialState.COMPLETE), (1, TrialState.STOPPED), (2, TrialState.COMPLETE)):
        second.end(number, state, epoch=2)
    second.end(1_000_000, TrialState.STOPPED, epoch=3)
    second.batch_ends()
    second.run_ends(finished=True)
    third = _InventedRun(loaded(content), replace(study, resumed=True))
    third.run_ends(finished=True)  # nothing is left to deliver


class _InventedRun:
    """The calls of one run, each checked to leave its arguments as they are."""

    def __init__(self, callback: Callback, study: StudyInfo) -> None:
        self._callback, self._study = callback, study
        self._call("on_study_begin", study)

    def begin(self, *trials: int) -> None:
        for trial in trials:
            self._call("on_trial_begin", trial, copy.deepcopy(CONFIGS[trial]))

    def report(self, trial: int, epoch: int, value: float) -> None:
        metrics = {"loss": value, "accuracy": -value}
        report = EpochReport(epoch, metrics, 0.5, 1.7e9 + epoch)
        self._call("on_report", trial, copy.deepcopy(CONFIGS[trial]), report)

    def end(self, trial: int, state: TrialState, epoch: int) -> None:
        """A trial ends; without an epoch it has no values."""
        values = {"loss": 0.5, "accuracy": 0.25} if epoch else {}
        reason = "" if state is TrialState.COMPLETE else "raised:\nZeroDivisionError"
        result = TrialResult(state, reason, epoch, values, values, 0.5 * epoch)
        self._call("on_trial_end", trial, copy.deepcopy(CONFIGS[trial]), result)

    def batch_ends(self) -> None:
        self._call("flush")

    def run_ends(self, *, finished: bool) -> None:
        self._call("on_study_end", replace(self._study, finished=finished))

    def _call(self, name: str, *arguments: object) -> None:
        before = copy.deepcopy(arguments)
        getattr(self._callback, name)(*arguments)
        assert repr(arguments) == repr(before), f"{name} changed its arguments: {before!r} became {arguments!r}"
