"""A study of 10,000 trials stays quick. The limits leave a slow, shared machine a factor of ten."""

import time

import pytest
from journal_samples import create, group, report

from shoal.core.trial import TrialState
from shoal.journal.statistics import StudyStatistics

N = 10_000


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    with create(tmp_path_factory.mktemp("study")) as journal:
        yield journal


def test_ten_thousand_trials(journal):
    begin = time.perf_counter()
    journal.record_proposal(N, [group(range(N), 1)])
    asked = time.perf_counter()
    journal.record_waiting_reasons(dict.fromkeys(range(N), "all devices are busy"))
    waiting = time.perf_counter()
    for start in range(0, N, 10):
        journal.record_reports(
            "1", [report(number, 1, number / N, TrialState.PAUSED) for number in range(start, start + 10)]
        )
    reported = time.perf_counter()
    rows = journal.trials()
    read = time.perf_counter()
    best, states, epochs = journal.best(), StudyStatistics(journal).states(), StudyStatistics(journal).epochs()
    summed = time.perf_counter()

    assert len(rows) == N
    assert best.number == N - 1
    assert states[TrialState.PAUSED] == N
    assert epochs == (N, N)
    seconds = {
        "asked": asked - begin,
        "waiting": waiting - asked,
        "reported": reported - waiting,
        "read": read - reported,
        "summed": summed - read,
    }
    limits = {"asked": 3.0, "waiting": 1.0, "reported": 0.0002 * N * 10, "read": 3.0, "summed": 0.3}
    assert {name for name, value in seconds.items() if value > limits[name]} == set(), seconds
