"""The open runs of a tracker: a few at a time, as each holds threads and files."""

from collections.abc import Callable
from typing import Generic, TypeVar

from shoal.core.trial import Config

__all__ = ["OpenRuns", "run_name"]

_Run = TypeVar("_Run")


class OpenRuns(Generic[_Run]):
    """Runs of trials, opened when they are needed; beyond a number of them the longest unused one is closed."""

    def __init__(
        self, opened: Callable[[int, Config], _Run], closed: Callable[[_Run], object], most: int = 128
    ) -> None:
        self._opened, self._closed, self._most = opened, closed, most
        self._runs: dict[int, _Run] = {}  # the longest unused one first

    def get(self, trial: int, config: Config) -> _Run:
        """The open run of a trial."""
        run = self._runs.pop(trial, None)
        if run is None:
            if len(self._runs) >= self._most:
                self.close(next(iter(self._runs)))
            run = self._opened(trial, config)
        self._runs[trial] = run
        return run

    def close(self, trial: int) -> None:
        """Close the run of a trial, if it is open."""
        if trial in self._runs:
            self._closed(self._runs.pop(trial))

    def close_all(self) -> None:
        """Close all runs."""
        for trial in list(self._runs):
            self.close(trial)

    def each(self) -> list[_Run]:
        """The open runs."""
        return list(self._runs.values())


def run_name(trial: int) -> str:
    """Name of a trial's run, which sorts by number."""
    return f"trial-{trial:06d}"
