"""Reports of a program keep their steps; gaps and repeated steps are detected."""

from typing import Any

import pytest

from shoal.core.trial import Report
from shoal.programs.reports import ProgramReport, ProgramReports


def known(count: int) -> list[Report]:
    return [Report(0, step, {"loss": float(step)}) for step in range(1, count + 1)]


def said(step: Any, loss: Any = 0.5) -> ProgramReport:
    return ProgramReport({"loss": loss, "note": "fine"}, step)


@pytest.mark.parametrize(
    ("reports", "step", "taken"),
    [
        pytest.param(ProgramReports(0, [], 0, ["loss"]), 1, 1, id="the first"),
        pytest.param(ProgramReports(0, [], 0, ["loss"]), None, 1, id="the first, without a step"),
        pytest.param(ProgramReports(0, known(5), 5, ["loss"], own_state=True), 6, 6, id="continues"),
        pytest.param(ProgramReports(0, known(5), 5, ["loss"], own_state=True), None, 6, id="continues without a step"),
        pytest.param(ProgramReports(0, known(5), 5, ["loss"], own_state=True), 5, 5, id="prints the last one again"),
        pytest.param(ProgramReports(0, known(5), 5, ["loss"], own_state=True), 2, 2, id="goes back"),
        pytest.param(ProgramReports(0, known(5), 0, ["loss"]), None, 1, id="begins again"),
        pytest.param(ProgramReports(0, [], 0, ["loss"], recorded=3), 4, 4, id="knows by itself how far it was"),
        pytest.param(
            ProgramReports(0, known(5), 5, ["loss"], own_state=True), 7, None, id="further than it has reported"
        ),
        pytest.param(ProgramReports(0, known(5), 5, ["loss"], own_state=True), 11, None, id="much further"),
    ],
)
def test_a_report_is_of_the_step_that_it_says(reports: ProgramReports, step: Any, taken: int | None) -> None:
    assert reports.find_error(said(step)) == ""
    assert reports.leaves_gap(said(step)) == (taken is None)
    if taken is not None:
        assert reports.add(said(step), 0.1) == Report(0, taken, {"loss": 0.5}, 0.1)
        assert [report.epoch for report in reports.reports][-1] == reports.last == taken
        assert "after" in reports.find_error(said(taken + 2))
        assert reports.find_error(said(taken + 1)) == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        pytest.param(said(2), "after 0 came 2", id="a step is missing"),
        pytest.param(said(0), "at least 1, got 0", id="0"),
        pytest.param(said(True), "got True", id="a bool"),
        pytest.param(said(1.0), "got 1.0", id="a float"),
        pytest.param(said(1, "low"), "the metric 'loss' must be a number, got 'low'", id="a word"),
        pytest.param(said(1, 10**400), "too large for a float; report its logarithm", id="too large"),
    ],
)
def test_what_is_wrong_is_said(message: ProgramReport, words: str) -> None:
    assert words in ProgramReports(0, [], 0, ["loss"]).find_error(message)
