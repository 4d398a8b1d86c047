"""The clock of a study: its running time, without the gaps between its runs, and its span from the first start on."""

from collections.abc import Sequence
from itertools import pairwise

from shoal.core.rows import Run
from shoal.journal.view import JournalView

__all__ = ["Elapsed"]


class Elapsed:
    """Running time of a study at a moment, without the time in which no process ran it.

    A process that died counts as running until its last event.

    Args:
        last_event: Time of the last event, in seconds since 1970; None before the first.
        now: The present time, in seconds since 1970, if the study is running; else None.

    Attributes:
        total: Running time until now or the end, in seconds; at least a millisecond.
        span: Seconds from the first start until now or the end, with the gaps.
        resumes: Running time at each resume, in seconds.
    """

    def __init__(self, runs: Sequence[Run], last_event: float | None, now: float | None) -> None:
        self._begin = runs[0].started
        self._gaps = [
            (min(max(run.before or 0.0, before.started), run.started), run.started) for before, run in pairwise(runs)
        ]
        self.resumes = [self(begin) for begin, _ in self._gaps]
        end = max(runs[-1].started, last_event or 0.0) if now is None else now
        self.total = max(self(end), 1e-3)
        self.span = max(end - self._begin, self.total)

    @classmethod
    def of(cls, journal: JournalView, now: float) -> "Elapsed":
        """The clock of a study, whose journal says whether it is running."""
        return cls(journal.runs(), journal.last_moment(), None if journal.writer() is None else now)

    def __call__(self, moment: float) -> float:
        """Seconds of running time at a moment, given in seconds since 1970."""
        stopped = sum(min(moment, end) - begin for begin, end in self._gaps if moment > begin)
        return max(moment - self._begin - stopped, 0.0)
