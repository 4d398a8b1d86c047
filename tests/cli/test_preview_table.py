"""What is printed of what a search would do, before a search."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from shoal.cli.profile import PreviewTable, preview_json, seconds_text, verdict
from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.trial import Trial
from shoal.study.preview import TOO_FEW_STEPS, Failed, PlannedArray, Preview


def planned(numbers, width, job, packed_with, decided, fetch=0.1, batch_size=16):
    profile = Profile({1: 0.01, 4: 0.02}, 10, 0, 10**9, 5 * 10**7, 1.0, 1.0, fetch_seconds=fetch, sample_sharing="kept")
    trials = [
        Trial(number, {"lr": number / 8, "width": width, "batch_size": batch_size}, number, 0) for number in numbers
    ]
    array = Array(FusionKey(f"{width}", "data", batch_size), tuple(Member(trial, 0, 1) for trial in trials), profile)
    return PlannedArray(array, job, packed_with, 0.33, 0.13 * len(trials), decided)


def preview(**changes):
    """Two arrays that share a process, one by itself, and a trial that raises."""
    fields = {
        "device": Device("cpu:0", "cpu/2", 4_200_000_000),
        "arrays": (
            planned([0, 1, 2, 5], 64, 1, (1,), "4 trials fused; packed with 2: saves 31 %"),
            planned([4], 128, 1, (0,), "packed with 1: saves 31 %"),
            planned([6], 256, 2, (), "by itself: no other array has its data", 0.0),
        ),
        "totals": {"apart": 5.8, "packed": 1.7, "fused": 2.55, "chosen": 1.47},
        "failed": (Failed((3,), "ValueError: no [such] width"),),
    }
    return Preview(**fields | changes)


def printed(found, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(PreviewTable(found))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [40, 60])
def test_figures_are_folded_and_not_cut_where_it_is_narrow(width):
    lines = printed(preview(), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


def test_a_table_that_does_not_quite_fit_cuts_no_column():
    one = planned([0, 1, 2, 3, 4], 64, 1, (), "5 trials fused", batch_size=32)
    profile = replace(one.array.profile, step_seconds={1: 0.000953, 4: 0.00243, 8: 0.00486}, sample_sharing="resident")
    found = preview(arrays=(replace(one, array=replace(one.array, profile=profile), seconds=0.0353),))
    lines = printed(found, 76)
    text = "\n".join(lines)
    assert "planned" in text
    assert "0.0353" in text
    assert max(map(len, lines)) <= 76


def test_a_wide_table_has_all_of_an_array_on_a_line():
    lines = printed(preview(), 200)
    assert lines[0] == verdict(preview())
    first, second, third, failed = lines[-4:]
    assert first.split()[:5] == ["1", "0,", "1,", "2,", "5"]
    assert first.split()[5:15] == ["16", "10", "5,", "2.0x", "1.2", "GB", "91", "%", "kept", "0.52"]
    assert first.endswith("0.33  width=64: 4 trials fused; packed with 2: saves 31 %")
    assert second.endswith("0.13           width=128: packed with 1: saves 31 %"), "seconds of a job stand once"
    assert third.endswith("0.33  width=256: by itself: no other array has its data")
    assert failed.split() == ["3", "ValueError:", "no", "[such]", "width"]


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_one_cuts_nothing(width):
    lines = printed(preview(), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert any("91 %" in line and "kept" in below for line, below in pairwise(lines)), "a word stands below its figure"
    assert any("s an epoch" in line and "planned" in below for line, below in pairwise(lines))
    shown = (
        "0, 1, 2, 5",
        "5, 2.0x",
        "2: width=128: packed with 1",
        "trials 3: ValueError: no [such] width",
    )
    assert [each for each in shown if each not in text] == []
    assert "…" not in text


def test_many_trials_are_counted():
    found = preview(arrays=(planned(range(9), 64, 1, (), ""),), failed=())
    assert next(line for line in printed(found, 120) if "9 trials" in line).split()[:4] == ["1", "9", "trials", "16"]


def test_the_verdict_says_whether_sharing_pays_and_what_fusing_and_packing_do():
    assert verdict(preview()) == (
        "Sharing pays: expect 3.9 times the speed of one trial at a time; one epoch of 6 configurations takes 1.47 s "
        "instead of 5.8 s one after another (fusing alone saves 56 %, packing alone saves 71 %)."
    )
    one = preview(arrays=preview().arrays[1:2], failed=())
    assert verdict(one) == "Sharing does not pay here: there is but one configuration."
    little = preview(totals={"apart": 2.3, "packed": 2.3, "fused": 2.3, "chosen": 2.2})
    expected = "expect 1.0 to 1.1 times the speed of one trial at a time"
    assert verdict(little).startswith(
        f"Sharing does not pay here: {expected}; one epoch of 6 configurations takes 2.2 s"
    )
    assert not preview_json(little)["pays"]


def test_nothing_is_expected_of_arrays_that_were_not_timed():
    first, *others = preview().arrays
    profile = replace(first.array.profile, step_seconds={1: 0.01}, expected_epochs=9)
    found = preview(arrays=(replace(first, array=replace(first.array, profile=profile)), *others))
    assert verdict(found) == (
        "Not measured yet: only single trials were timed, as timing arrays takes long beside the expected epochs; "
        "training tries arrays in its first steps, and one epoch of 6 configurations takes at most 1.47 s."
    )


def test_little_work_is_not_called_measured():
    first, *_ = preview().arrays
    profile = replace(first.array.profile, step_seconds={1: 0.01}, expected_epochs=9, first_size=8)
    arrays = [
        replace(first, array=replace(first.array, members=(member,), profile=profile), decision=TOO_FEW_STEPS)
        for member in first.array.members
    ]
    found = preview(arrays=tuple(arrays), totals=dict.fromkeys(preview().totals, 1.47))
    assert verdict(found) == (
        "Not measured: one epoch of 4 configurations has too few steps to try sharing, and takes 1.47 s; a search of "
        "more steps tries it."
    )


def test_json_has_everything():
    found = json.loads(json.dumps(preview_json(preview())))
    assert [(each["array"], each["job"], each["packed_with"]) for each in found["arrays"]] == [
        (1, 1, [2]), (2, 1, [1]), (3, 2, [])
    ]  # fmt: skip
    first = found["arrays"][0]
    assert first["trials"] == [0, 1, 2, 5]
    assert first["configs"][3] == {"lr": 0.625, "width": 64, "batch_size": 16}
    assert (first["gain"], first["seconds_apart"], first["job_seconds"]) == (2.0, 0.52, 0.33)
    assert found["failed"] == [{"trials": [3], "reason": "ValueError: no [such] width"}]
    assert found["totals"]["chosen"] == {"seconds": 1.47, "impv": pytest.approx(0.7466, abs=1e-3)}
    assert found["pays"]


def test_nothing_measured_is_a_table_of_reasons():
    lines = printed(preview(arrays=(), totals=dict.fromkeys(("apart", "packed", "fused", "chosen"), 0.0)), 120)
    assert lines[-1] == "trials 3: ValueError: no [such] width"


@pytest.mark.parametrize(("seconds", "text"), [(12.34, "12.3 s"), (1.0, "1 s"), (0.0456, "45.6 ms")])
def test_seconds_are_told_as_a_person_reads_them(seconds, text):
    assert seconds_text(seconds) == text
