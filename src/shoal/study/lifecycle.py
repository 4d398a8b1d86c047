"""Whether a study runs, is paused, ends or has ended."""

from collections.abc import Mapping
from typing import Any

from shoal.core.cause import Cause
from shoal.core.rows import StudyValue
from shoal.study.event import Shutdown

__all__ = ["Lifecycle"]


class Lifecycle:
    """Whether a study runs, is paused, ends or has ended, as its users, its trials or its failures decide.

    Args:
        study: Values of the study, from which it goes on.

    Attributes:
        paused: Whether a user has paused the study, so that no trials are requested or placed.
        devices_released: Whether a paused study has released its devices.
        end_requested: Whether a user or a trial has ended the study; its jobs may still be running.
        ended: Whether a study that a user or a trial has ended has no job any more.
        ended_because: Why a trial has ended the study; "" if none has.
        stopped: Common cause of failure of the first trials, which ends the study; None before.
        shutdown: The event that shuts down the study; None before.
    """

    def __init__(self, study: Mapping[str, Any]) -> None:
        self.paused: bool = study.get("paused", False)
        self.end_requested: bool = study.get("end_requested", False)
        self.ended: bool = study.get("ended", False)
        self.ended_because: str = study.get("ended_because", "")
        self.devices_released = False
        self.stopped: Cause | None = None
        self.shutdown: Shutdown | None = None
        self._values: list[StudyValue] = []

    @property
    def on_hold(self) -> bool:
        """Whether no job may run because of a user's request."""
        return self.paused or (self.end_requested and not self.ended)

    def pause(self) -> None:
        """Pause the study."""
        self.paused, self.devices_released = True, False
        self._put("paused", True)

    def release_devices(self) -> None:
        """Note that the devices of a paused study are released."""
        self.devices_released = True

    def resume(self) -> None:
        """Let a paused study go on."""
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
