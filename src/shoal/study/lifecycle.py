"""Whether a study runs, is paused, ends or has ended."""

from collections.abc import Mapping
from typing import Any

from shoal.core.cause import Cause
from shoal.core.rows import StudyValue
from shoal.study.event import Shutdown

__all__ = ["Lifecycle"]

RECORD_SECONDS = 5.0
"""Most seconds of a run that a kill makes its timeout forget."""


class Lifecycle:
    """Whether a study runs, is paused, ends or has ended, as its users, its trials or its failures decide.

    Args:
        study: Values of the study, from which it continues.
        timeout: Seconds that a new study may run; None: as long as it takes.

    Attributes:
        paused: Whether a user has paused the study, so that no trials are requested or placed.
        devices_released: Whether a paused study has released its devices.
        end_requested: Whether a user or a trial has ended the study; its jobs may still be running.
        ended: Whether a study that a user or a trial has ended has no job any more.
        ended_because: Why a trial has ended the study; "" if none has.
        stopped: Common cause of failure of the first trials, which ends the study; None before.
        shutdown: The event that shuts down the study; None before.
        time_left: Seconds until the study's timeout expires, in time that it runs; None without a timeout.
    """

    def __init__(self, study: Mapping[str, Any], timeout: float | None = None) -> None:
        self.paused: bool = study.get("paused", False)
        self.end_requested: bool = study.get("end_requested", False)
        self.ended: bool = study.get("ended", False)
        self.ended_because: str = study.get("ended_because", "")
        self.time_left: float | None = study.get("time_left", timeout)
        self._recorded_left = self.time_left
        self._counted_at: float | None = None
        self.devices_released = False
        self.stopped: Cause | None = None
        self.shutdown: Shutdown | None = None
        self._values: list[StudyValue] = []

    @property
    def on_hold(self) -> bool:
        """Whether no job may run because of a user's request."""
        return self.paused or (self.end_requested and not self.ended)

    @property
    def timed_out(self) -> bool:
        """Whether the timeout of the study has expired."""
        return self.time_left == 0

    def count_time(self, now: float, *, runs: bool) -> bool:
        """Count the seconds since the last call, if the study `runs`; return whether its timeout has just expired."""
        before, self._counted_at = self._counted_at, now
        if self.time_left is None or self.timed_out or before is None or not runs:
            return False
        self.time_left = max(0.0, self.time_left - (now - before))
        if self._recorded_left is None or self.timed_out or self._recorded_left - self.time_left >= RECORD_SECONDS:
            self.record_time()
        return self.timed_out

    def record_time(self) -> None:
        """Record what is left of the timeout, if that has changed."""
        if self.time_left != self._recorded_left:
            self._recorded_left = self.time_left
            self._put("time_left", self.time_left)

    def pause(self) -> None:
        """Pause the study."""
        self.paused, self.devices_released = True, False
        self._put("paused", True)

    def release_devices(self) -> None:
        """Note that the devices of a paused study are released."""
        self.devices_released = True

    def resume(self) -> None:
        """Let a paused study continue."""
        self.paused = False
        self._put("paused", False)

    def request_end(self, because: str = "") -> None:
        """End the study once its jobs have ended, because of a trial or at a user's request (`because` is "")."""
        self.paused, self.end_requested = False, True
        if because:
            self.ended_because = because
            self._put("ended_because", because)
        self._put("paused", False)
        self._put("end_requested", True)

    def end(self) -> None:
        """End a study that was to end, or that does not train."""
        self.ended = True
        self._put("ended", True)

    def stop(self, cause: Cause, trials: list[int]) -> None:
        """End the study because its first trials failed with one cause; `trials` are those of all such ends."""
        self.stopped = cause
        self._put("stopped", {"text": cause.text, "trials": cause.trials, "log": cause.log})
        self._put("common_failure_trials", trials)

    def take_rows(self) -> list[StudyValue]:
        """The values that have changed since the last call."""
        values, self._values = self._values, []
        return values

    def _put(self, key: str, value: object) -> None:
        self._values.append(StudyValue(key, value))
