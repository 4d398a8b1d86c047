"""What the engine writes for one job costs the same whatever the number of trials, counted in SQLite's instructions."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from journal_samples import create, group, job, report
from support.recorded import RecordedJournal

from shoal.core.trial import Decision, TrialState

WRITES: dict[str, Callable[[RecordedJournal], object]] = {
    "start of a job": lambda journal: journal.record_job_start(job("next", [5, 6]), "cpu:0"),
    "join": lambda journal: journal.record_join("0", "cpu:0", job("0", [5, 6]).arrays),
    "reports": lambda journal: journal.record_reports("0", [report(0, 1), report(1, 1, state=TrialState.PAUSED)]),
    "decisions": lambda journal: journal.record_decisions([Decision(0, TrialState.COMPLETE)]),
    "reasons": lambda journal: journal.record_waiting_reasons({5: "busy", 6: "busy"}),
    "kill": lambda journal: journal.record_kill("0", "hung", "no progress"),
    "trials that leave": lambda journal: journal.record_dropped_trials("0", [0], failed=False),
    "end of a job": lambda journal: journal.record_job_end("0", "finished", failed=False),
}


def instructions(journal: RecordedJournal, write: Callable[[RecordedJournal], object]) -> int:
    passed = count()
    journal.tables.connection.set_progress_handler(lambda: next(passed) < 0, 1)  # called at each instruction
    write(journal)
    journal.tables.connection.set_progress_handler(None, 0)
    return next(passed)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_takes_as_many_instructions_in_a_large_study(tmp_path: Path, name: str) -> None:
    taken = []
    for trials in (100, 2000):
        with create(tmp_path / str(trials)) as journal:
            journal.record_proposal(trials, [group(range(trials), 3)])
            for first in range(0, trials // 2, 2):
                if first != 4:
                    journal.record_job_start(job(f"{first}", [first, first + 1]), "cpu:0")
            taken.append(instructions(journal, WRITES[name]))
    assert taken[0] > 0
    assert taken[1] <= 1.2 * taken[0]
