"""What is said of a structure, and of a trial: fused or plain, why, and what was proven."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.recorded import RecordedJournal
from timeline_samples import Clock, trial

from shoal.core.array import FusionKey
from shoal.core.event import Proven
from shoal.core.trial import Budget, Check, TrialGroup
from shoal.journal.view import JournalView
from shoal.look.overview import notebook_html, overview, overview_json
from shoal.look.snapshot import snapshot, trial_verdicts, verdicts
from shoal.look.table import snapshot_json, status_table
from shoal.look.text import trial_verdict_text, verdict_text, verdict_texts
from shoal.spec import StudySpec

NET = FusionKey("net", "d", 32)
WHY = "gradient of `block.0.weight`\nhas norm 0 in the array, and 0.48 alone"
FIRST, ALL, ONE = {0: 0}, dict.fromkeys(range(12), 0), {7: 0}


def steps(number: int, *differences: float, mode: str = "eager") -> tuple[Check, ...]:
    return tuple(Check(number, 0, step, f"step, {mode}", x) for step, x in enumerate(differences, start=1))


CASES = {
    "fused": (
        [Proven("1", NET, ALL, (*steps(0, 0.0, 3.3e-16), Check(11, 0, 40, "validation", 1e-16)))],
        ["fused, 12 members (trials 0, 1, 2, …); equal to plain PyTorch at 3 checks, largest difference 3e-16"],
    ),
    "equal to the last bit": (
        [Proven("1", NET, {0: 0, 1: 0}, steps(0, 0.0))],
        ["fused, 2 members (trials 0, 1); equal to plain PyTorch at 1 check, largest difference 0"],
    ),
    "arrays of several sizes": (
        [Proven("1", NET, {0: 0, 1: 0}, steps(0, 1e-7)), Proven("2", NET, {1: 3, 2: 3, 3: 3}, steps(2, 2e-7, 1e-7))],
        ["fused, 3 members (trials 0, 1, 2, …); equal to plain PyTorch at 3 checks, largest difference 2e-7"],
    ),
    "refused at once": (
        [Proven("1", NET, ALL, (), WHY)],
        ["plain, 12 members (trials 0, 1, 2, …): gradient of `block.0.weight` has norm 0 in the array, and 0.48 alone"],
    ),
    "fused, then refused": (
        [Proven("1", NET, ALL, steps(0, 0.0)), Proven("1", NET, dict.fromkeys(ALL, 2), steps(0, 0.0), WHY, 11)],
        [
            "plain, 12 members (trials 0, 1, 2, …), fused for 11 steps of epoch 3: "
            "gradient of `block.0.weight` has norm 0 in the array, and 0.48 alone"
        ],
    ),
    "refused in the first step of a later job": (
        [Proven("1", NET, ALL, steps(0, 0.0)), Proven("2", NET, dict.fromkeys(ALL, 2), (), "no")],
        ["plain, 12 members (trials 0, 1, 2, …), fused before epoch 3: no"],
    ),
    "refused in one job, fused in others": (
        [
            Proven("1", NET, {0: 0, 1: 0}, (), "no"),
            Proven("2", NET, {2: 0, 3: 0}, steps(2, 0.0)),
            Proven("3", NET, {4: 0, 5: 0}, (), "never"),
        ],
        ["plain, 2 members (trials 0, 1, 2, …), fused before epoch 1: no"],
    ),
    "slower as an array": (
        [
            Proven(
                "1", NET, ALL, (*steps(0, 1e-16), *steps(0, 0.0, 0.0, mode="plain"), Check(0, 0, 40, "validation", 0))
            )
        ],
        [
            "plain, as that is faster, 12 members (trials 0, 1, 2, …); equal to plain PyTorch at 4 checks, "
            "largest difference 1e-16"
        ],
    ),
    "a larger array is faster": (
        [Proven("1", NET, {0: 0, 1: 0}, steps(0, 0.0, mode="plain")), Proven("2", NET, {0: 1, 1: 1}, steps(1, 0.0))],
        ["fused, 2 members (trials 0, 1); equal to plain PyTorch at 2 checks, largest difference 0"],
    ),
    "not compared": (
        [Proven("1", NET, ALL)],
        ["an array of 12 members (trials 0, 1, 2, …); not compared with plain PyTorch"],
    ),
    "alone": ([Proven("1", NET, FIRST, steps(0, 0.0, mode="plain"))], []),
    "refused alone": ([Proven("1", NET, FIRST, (), "no")], ["plain, 1 member (trial 0): no"]),
    "nothing was trained": ([], []),
    "several structures, those that were refused first": (
        [
            Proven("1", NET, {0: 0, 1: 0}, steps(0, 0.0)),
            Proven("1", FusionKey("other", "d", 32), {2: 0, 3: 0}, steps(2, 0.0, mode="plain")),
            Proven("1", FusionKey("net", "d", 64), {4: 0, 5: 0}, (), "no"),
        ],
        [
            "plain, 2 members (trials 4, 5): no",
            "plain, as that is faster, 2 members (trials 2, 3); equal to plain PyTorch at 1 check, "
            "largest difference 0",
            "fused, 2 members (trials 0, 1); equal to plain PyTorch at 1 check, largest difference 0",
        ],
    ),
}


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[RecordedJournal]:
    study = StudySpec(metric="accuracy", mode="max")
    with RecordedJournal.create(tmp_path / "study", study, task=b"", algorithm=b"", clock=Clock()) as journal:
        journal.record_proposal(12, [TrialGroup(tuple(map(trial, range(12))), Budget(3))])
        yield journal


def record(journal: JournalView, events: list[Proven]) -> None:
    assert isinstance(journal, RecordedJournal)
    for event in events:
        journal.record_checks(event)


@pytest.mark.parametrize(("events", "lines"), CASES.values(), ids=CASES)
def test_each_structure_has_a_verdict(journal: RecordedJournal, events: list[Proven], lines: list[str]) -> None:
    record(journal, events)
    assert list(map(verdict_text, verdicts(journal))) == lines


@pytest.mark.parametrize("case", ["fused", "fused, then refused", "several structures, those that were refused first"])
def test_status_page_report_and_notebook_say_the_same(journal: RecordedJournal, case: str) -> None:
    events, lines = CASES[case]
    record(journal, events)
    seen = snapshot(journal, 2000.0)
    assert [each["text"] for each in snapshot_json(seen)["arrays"]] == lines
    assert [each["text"] for each in overview_json(overview(journal, 2000.0))["arrays"]] == lines
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_table(seen))
    html = notebook_html(overview(journal, 2000.0))
    for line in lines:
        assert line in capture.get()
        assert line in html


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("finished", "complete"),
        ("timeout", "ended by its timeout"),
        ("ended by a user", "ended by a user"),
        ("", "not running"),
    ],
)
def test_a_notebook_says_how_a_study_without_a_process_ended(journal: RecordedJournal, end: str, shown: str) -> None:
    found = overview(journal, 2000.0)
    html = notebook_html(replace(found, state=replace(found.state, pid=None, end=end)))
    assert f"; {shown}</td>" in html


def test_a_verdict_as_plain_values(journal: RecordedJournal) -> None:
    record(journal, CASES["fused, then refused"][0])
    (found,) = snapshot_json(snapshot(journal, 2000.0))["arrays"]
    assert found == {
        "key": "net x 32",
        "trials": [0, 1, 2, 3],
        "members": 12,
        "checks": 2,
        "difference": 0.0,
        "newest": "step, eager",
        "refusal": WHY,
        "epoch": 2,
        "step": 11,
        "is_plain": True,
        "text": CASES["fused, then refused"][1][0],
    }


def test_many_structures_are_cut_short(journal: RecordedJournal) -> None:
    record(journal, [Proven("1", FusionKey(f"{x}", "d", 32), {x: 0, x + 1: 0}, steps(x, 0.0)) for x in range(9)])
    *lines, last = verdict_texts(verdicts(journal))
    assert [line.partition(";")[0] for line in lines] == [f"fused, 2 members (trials {x}, {x + 1})" for x in range(6)]
    assert last == "3 more, see shoal status --json"


OF_TRIALS = {
    "compared itself": ("fused", 0, "fused: equal at 2 checks, largest difference 3e-16"),
    "others were compared": ("fused", 5, "fused: others of its structure equal at 3 checks, largest difference 3e-16"),
    "refused": ("refused at once", 3, "plain: gradient of `block.0.weight` has norm 0 in the array, and 0.48 alone"),
    "refused later": (
        "fused, then refused",
        0,
        "plain, fused for 11 steps of epoch 3: gradient of `block.0.weight` has norm 0 in the array, and 0.48 alone",
    ),
    "slower": ("slower as an array", 0, "plain, as that is faster: equal at 4 checks, largest difference 1e-16"),
    "not compared": ("not compared", 0, "in an array, not compared"),
    "alone": ("alone", 0, "alone: equal at 1 check, largest difference 0"),
    "in no array": ("alone", 1, None),
}


@pytest.mark.parametrize(("case", "number", "text"), OF_TRIALS.values(), ids=OF_TRIALS)
def test_each_trial_of_an_array_has_a_verdict(
    journal: RecordedJournal, case: str, number: int, text: str | None
) -> None:
    record(journal, CASES[case][0])
    found = trial_verdicts(journal).get(number)
    assert (None if found is None else trial_verdict_text(found)) == text
