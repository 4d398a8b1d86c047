"""Aggregates over a whole study, computed by SQL, for progress displays and reports."""

import json
from collections.abc import Iterable
from itertools import pairwise

from shoal.core.job import Purpose
from shoal.core.rows import NOT_FAILED
from shoal.core.trial import FIRST_ADDED, TrialState
from shoal.journal.view import JournalView

__all__ = ["StudyStatistics"]

_LATELY = 500
"""Number of newest reports, over all jobs, that `StudyStatistics.rates` averages."""


class StudyStatistics:
    """Aggregates of a study; each method runs one query."""

    def __init__(self, journal: JournalView) -> None:
        self._tables = journal.tables

    def jobs(self) -> int:
        """Number of all jobs."""
        ((count,),) = self._tables.rows("SELECT count(*) FROM jobs")
        return int(count)

    def states(self) -> dict[TrialState, int]:
        """Number of trials in each state; every state is a key."""
        with self._tables.decoding("the state of a trial"):
            counts = {
                TrialState(state): count
                for state, count in self._tables.rows("SELECT state, count(*) FROM trials GROUP BY state")
            }
        return {state: counts.get(state, 0) for state in TrialState}

    def waiting(self, state: TrialState = TrialState.PENDING) -> dict[str, list[int]]:
        """Waiting reason -> numbers of its trials in a state, ascending; the most frequent reason first."""
        rows = self._tables.rows(
            "SELECT reason, group_concat(number) FROM trials WHERE state = ? "
            "GROUP BY reason ORDER BY count(*) DESC, reason",
            state,
        )
        return {reason: sorted(map(int, numbers.split(","))) for reason, numbers in rows}

    def training(self) -> dict[str, int]:
        """Id of each training job -> its present number of trials."""
        sql = "SELECT job, count(*) FROM trials WHERE state = ? GROUP BY job"
        return dict(self._tables.rows(sql, TrialState.RUNNING))

    def rates(self) -> dict[str, float]:
        """Id of each job among the newest reports -> epochs per second of all its trials."""
        rows = self._tables.rows(
            "SELECT job, count(*) / sum(seconds) FROM "
            f"(SELECT job, seconds FROM reports WHERE job <> '' ORDER BY seq DESC LIMIT {_LATELY}) "
            "WHERE seconds > 0 GROUP BY job"  # the final report of a trial may take no time
        )
        return dict(rows)

    def epochs(self) -> tuple[int, int]:
        """Sum of the trained epochs of all trials; and this sum plus the remaining epochs of unfinished trials."""
        ((done, open_),) = self._tables.rows(
            "SELECT coalesce(sum(epoch - start), 0), "
            "coalesce(sum(CASE WHEN state IN (?, ?) THEN max(target - epoch, 0) END), 0) FROM trials",
            TrialState.PENDING,
            TrialState.RUNNING,
        )
        return done, done + open_

    def continued_epochs(self, trial: int) -> frozenset[int]:
        """Epochs that a trial reported from another job than the epoch before, as after a resume or a suspension."""
        rows = self._tables.rows(
            "SELECT epoch, job, min(seq) FROM reports WHERE trial = ? AND state <> ? GROUP BY epoch ORDER BY epoch",
            trial,
            TrialState.FAILED,
        )
        return frozenset(epoch for (_, before, _), (epoch, job, _) in pairwise(rows) if job != before)

    def array_epochs(self) -> list[tuple[str, int, int, float]]:
        """(Id of a job, one of its trials, number of trials, seconds) for each epoch that an array of the job trained.

        Trials that report the same epoch at the same time are an array. A repeated epoch is left out.
        """
        return self._tables.rows(
            "SELECT job, min(trial) AS trial, count(*), sum(seconds) AS seconds FROM reports "
            "WHERE job <> '' AND NOT EXISTS (SELECT 1 FROM reports AS earlier WHERE earlier.trial = reports.trial "
            "AND earlier.epoch = reports.epoch AND earlier.seq < reports.seq) GROUP BY job, time, epoch"
        )

    def last_reports(self, jobs: Iterable[str]) -> dict[str, float]:
        """Id of each of some jobs with reports -> time of its last one, in seconds since 1970."""
        rows = self._tables.rows(
            "SELECT job, max(time) FROM reports WHERE job IN (SELECT value FROM json_each(?)) GROUP BY job",
            json.dumps(list(jobs)),
        )
        return dict(rows)

    def epochs_lost(self) -> int:
        """Number of requested epochs that failed trials have not trained."""
        rows = self._tables.rows("SELECT sum(max(target - epoch, 0)) FROM trials WHERE state = ?", TrialState.FAILED)
        return rows[0][0] or 0

    def added(self) -> tuple[int, int]:
        """Number of trials that users have added, and the sum of their budgets in epochs."""
        ((trials, epochs),) = self._tables.rows(
            "SELECT count(*), coalesce(sum(target - start), 0) FROM trials WHERE number >= ?", FIRST_ADDED
        )
        return trials, epochs

    def results(self) -> list[float]:
        """Times of reports, ends of jobs and carried out requests, ascending, in seconds since 1970."""
        return [
            moment
            for (moment,) in self._tables.rows(
                "SELECT time FROM reports UNION SELECT ended FROM jobs WHERE ended IS NOT NULL "
                "UNION SELECT time FROM interventions ORDER BY 1"
            )
        ]

    def unmeasured(self, since: float) -> list[tuple[int, str]]:
        """First trial and message of each failed profile job started from `since` on (seconds since 1970), ordered by
        trial.
        """
        return self._tables.rows(
            "SELECT json_extract(trials, '$[0]') AS trial, message FROM jobs WHERE purpose = ? AND started >= ? "
            f"AND outcome NOT IN ({', '.join('?' * len(NOT_FAILED))}) ORDER BY trial",
            *(Purpose.PROFILE, since, *NOT_FAILED),
        )

    def checked(self) -> list[tuple[str, int]]:
        """Key and number of each trial that has a row of checks."""
        return self._tables.rows("SELECT DISTINCT key, trial FROM checks")

    def deleted(self) -> dict[int, bool]:
        """Number of each trial of which checkpoints were deleted -> whether its weights were."""
        rows = self._tables.rows("SELECT trial, max(weights) FROM deletions GROUP BY trial")
        return {trial: bool(weights) for trial, weights in rows}

    def last_deleted(self) -> list[int]:
        """Numbers of the trials of the last step that deleted checkpoints."""
        newest = "SELECT time FROM deletions ORDER BY rowid DESC LIMIT 1"
        return [number for (number,) in self._tables.rows(f"SELECT trial FROM deletions WHERE time = ({newest})")]
