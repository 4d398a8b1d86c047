"""Base class of callbacks, and the arguments of their methods."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.core.objective import Objective
from shoal.core.trial import Config, TrialState

__all__ = ["Callback", "EpochReport", "StudyInfo", "TrialResult"]


@dataclass(frozen=True)
class StudyInfo:
    """The study that a callback follows.

    Args:
        id: Name that no other study has, of letters and digits; equal in all runs of the study.
        name: Name of the study's directory.
        directory: Directory of the study.
        objectives: Objectives that trials are compared by.
        resumed: Whether this run continues an earlier one.
        finished: Whether the study has ended, so that no further trial begins.
    """

    id: str
    name: str
    directory: Path
    objectives: tuple[Objective, ...]
    resumed: bool
    finished: bool


@dataclass(frozen=True)
class EpochReport:
    """The report of a trial at the end of an epoch; a function reports in place of epochs.

    Args:
        epoch: Epochs finished since the trial began.
        metrics: Name -> value, NaN and infinities allowed.
        seconds: The trial's share of the wall time since its previous report.
        time: Time at which the report was recorded, in seconds since 1970.
    """

    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    time: float


@dataclass(frozen=True)
class TrialResult:
    """The end of a trial.

    Args:
        state: COMPLETE, STOPPED or FAILED.
        reason: Reason why it was stopped or has failed; "" if there is none.
        epoch: Epochs reported.
        metrics: Name -> last value; empty without any report.
        best: Name -> best value, never NaN; see `shoal.core.rows.TrialRow`.
        seconds: Sum of the seconds of its reports.
    """

    state: TrialState
    reason: str
    epoch: int
    metrics: Mapping[str, float]
    best: Mapping[str, float]
    seconds: float


class Callback:
    """Base class of callbacks: overwrite the methods that are needed.

    **Who calls.** A process of its own, the follower, which reads the study's journal. So each event is recorded before
    a callback gets it, and a slow callback delays no training. `tune(callbacks=[...])` pickles callbacks by cloudpickle
    into the study's directory; each run of the study (`tune`, then each `resume`) has a follower that unpickles them.
    It calls the callbacks of a study one after another, from one thread. An object that cannot be pickled (an open
    file, a connection) is made in `on_study_begin`. What a callback prints goes to `logs/callbacks.log` in the study's
    directory. The follower has a low priority (nice 10), and a Ctrl-C does not reach it.

    **Order.** `on_study_begin` comes first in each run, and `on_study_end` last, also in a run that was interrupted or
    whose engine was killed; only a kill of the follower itself leaves it out. Between them, for each trial:
    `on_trial_begin` once, `on_report` for each epoch in ascending order, and `on_trial_end`. A trial that never trains
    begins as it ends. A trial that has failed and is tried again has further reports and a further end, and no further
    beginning. Reports of different trials come in the order in which the journal recorded them.

    **Delivery.** Calls come in batches, and `flush` ends each. After it the position of the callback is saved in the
    study's directory (`callbacks.json`). So after `resume` nothing is left out and nothing is sent twice, even if the
    engine was killed: the follower delivers the rest and ends. If the follower itself was killed, or the callback
    raised, the batch that was not flushed comes again: delivery is then at least once, in the same order.

    **Results.** Methods may return anything, which is ignored. A callback cannot change a study: the interventions of
    `shoal.Study(study.directory)` do. It must not change its arguments.

    **What may be raised.** Anything. The engine warns once with the name of the callback and the place (logger
    `shoal.callbacks`), the study continues, and this callback is left out until the study is resumed; then it continues
    from its position. A callback that cannot work raises `ShoalError` with a remedy, which is shown without a place.

    Check a callback with `shoal.testing.check_callback`.
    """

    def on_study_begin(self, study: StudyInfo) -> None:
        """Open what the callback needs; called first in each run of the study.

        Args:
            study: The study, with `resumed` true in all runs but the first.
        """

    def on_trial_begin(self, trial: int, config: Config) -> None:
        """Handle the first start of a trial.

        Args:
            trial: Number of the trial, unique in the study.
            config: Configuration of the trial.
        """

    def on_report(self, trial: int, config: Config, report: EpochReport) -> None:
        """Handle the report of an epoch.

        Args:
            trial: Number of the trial. Its beginning may have been in an earlier run, with another object.
            config: Configuration of the trial.
            report: The report.
        """

    def on_trial_end(self, trial: int, config: Config, result: TrialResult) -> None:
        """Handle the end of a trial.

        Args:
            trial: Number of the trial.
            config: Configuration of the trial.
            result: State and last values of the trial.
        """

    def flush(self) -> None:
        """Deliver what the callback has buffered; called after each batch of calls, before the position is saved."""

    def on_study_end(self, study: StudyInfo) -> None:
        """Close what `on_study_begin` opened; called last in each run of the study.

        Args:
            study: The study; `finished` is false if it was interrupted or killed and can be resumed.
        """
