"""Delivery of new journal entries to one callback, in batches; the callback's position is saved after each batch."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.callbacks.base import Callback, EpochReport, StudyInfo, TrialResult
from shoal.core.errors import ShoalError
from shoal.core.trial import Config
from shoal.journal.rows import TrialRow
from shoal.journal.view import JournalView

__all__ = ["Delivery", "Positions", "study_info"]

BATCH = 1000
"""Largest number of reports in a batch."""


@dataclass
class Position:
    """The part of a journal that was delivered to a callback."""

    seq: int = 0
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class Positions:
    """The positions of a study's callbacks, in the file `callbacks.json` of its directory.

    Args:
        directory: Directory of the study.
        count: Number of callbacks.

    Raises:
        ShoalError: the file is damaged.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self._path = directory / "callbacks.json"
        self._all = [Position() for _ in range(count)]
        try:
            if self._path.exists():
                saved = json.loads(self._path.read_bytes())
                self._all = [Position(x["seq"], set(x["begun"]), set(x["ended"])) for x in saved]
            _ = self._all[count - 1]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise ShoalError(
                f"{self._path} is damaged ({type(error).__name__}: {error}), so no callback is called; remove it, and "
                "after a resume all callbacks are called from the beginning of the study"
            ) from error

    def __getitem__(self, index: int) -> Position:
        return self._all[index]

    def save(self) -> None:
        """Replace the file atomically, so that a kill leaves the old or the new content."""
        text = json.dumps([{"seq": x.seq, "begun": sorted(x.begun), "ended": sorted(x.ended)} for x in self._all])
        partial = self._path.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._path)


class Delivery:
    """Calls one callback with the new entries of a journal.

    Args:
        callback: The callback.
        journal: Journal of the study.
        positions: Positions of all callbacks of the study.
        index: Index of this callback in `positions`.
    """

    def __init__(self, callback: Callback, journal: JournalView, positions: Positions, index: int) -> None:
        self._callback, self._journal = callback, journal
        self._positions, self._position = positions, positions[index]
        self._configs: dict[int, Config] = {}  # of trials that have begun and not ended

    def deliver(self) -> None:
        """Make all calls that are due, then flush the callback and save its position, batch by batch.

        Raises:
            Exception: any error of the callback; its position is still that of the last batch.
        """
        position, more = self._position, True
        while more:
            states = (
                self._journal.begun_states()
            )  # read before the reports, so that a trial's end is delivered after its reports
            reports = self._journal.reports_after(position.seq, BATCH)
            more = len(reports) == BATCH
            reported = {report.trial for _, _, report in reports}
            final = {number for number, state in states.items() if state.final}
            retried = position.ended & (reported | (states.keys() - final))
            due = set() if more else final - (position.ended - retried)
            rows = self._rows(sorted(reported | (states.keys() - position.begun) | due))
            begun = set(self._begin(rows.values()))
            for _, time, report in reports:
                sent = EpochReport(report.epoch, report.metrics, report.seconds, time)
                self._callback.on_report(report.trial, self._configs[report.trial], sent)
            ended = set(self._end(rows[number] for number in sorted(due)))
            if not (reports or begun or ended or retried):
                return
            self._callback.flush()
            position.seq = reports[-1][0] if reports else position.seq
            position.begun |= begun
            position.ended = position.ended - retried | ended
            self._positions.save()

    def _rows(self, numbers: Iterable[int]) -> Mapping[int, TrialRow]:
        """The trials with these numbers; their configs are kept until they end."""
        rows = {row.number: row for row in self._journal.trials(numbers)}
        self._configs |= {number: row.config for number, row in rows.items()}
        return rows

    def _begin(self, rows: Iterable[TrialRow]) -> Iterator[int]:
        for row in rows:
            if row.number not in self._position.begun:
                self._callback.on_trial_begin(row.number, row.config)
                yield row.number

    def _end(self, rows: Iterable[TrialRow]) -> Iterator[int]:
        for row in rows:
            if row.state.final:  # else a user has retried it since its state was read
                result = TrialResult(row.state, row.reason, row.epoch, row.metrics, row.best, row.seconds)
                self._callback.on_trial_end(row.number, self._configs.pop(row.number), result)
                yield row.number


def study_info(journal: JournalView) -> StudyInfo:
    """Describe the study of a journal for its callbacks."""
    first, *later = journal.runs()
    with JournalView.read(journal.directory) as now:  # `journal.study` is read once, when the view is opened
        finished = bool(now.study.get("finished"))
    return StudyInfo(
        id=f"{int(first.started * 1e6):x}{first.pid:x}",
        name=journal.directory.name,
        directory=journal.directory,
        objectives=journal.objectives,
        resumed=bool(later),
        finished=finished,
    )
