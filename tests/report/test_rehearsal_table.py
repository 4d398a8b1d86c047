"""What is printed and drawn of what was measured before a search."""

import json

import pytest
from rich.console import Console

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.trial import Trial
from shoal.dry_run.result import Company, Failed, Measured, Rehearsal
from shoal.report.rehearsal_plot import draw_rehearsal
from shoal.report.rehearsal_table import RehearsalTable, rehearsal_json, seconds_text, verdict


def measured(numbers, width, fetch=0.1, data="pictures", steps=None, batch_size=16):
    profile = Profile(
        steps or {1: 0.01, 4: 0.02}, 10, 0, 10**9, 5 * 10**7, 1.0, 1.0, fetch_seconds=fetch, sharing="kept"
    )
    trials = [
        Trial(number, {"lr": number / 8, "width": width, "batch_size": batch_size}, number, 0) for number in numbers
    ]
    array = Array(FusionKey(f"{width}", data, batch_size), tuple(Member(trial, 0, 1) for trial in trials), profile)
    return Measured(array, profile, 0.004, 0.02)


def rehearsal(**changes):
    """Two arrays that share their samples, one of other data, and a trial that raises."""
    arrays = (measured([0, 1, 2, 5], 64), measured([4], 128), measured([6], 256, 0.0, "table"))
    lanes = tuple(each.array for each in arrays[:2])
    lone = [Array(each.array.key, (member,)) for each in arrays for member in each.array.members]
    fields = {
        "device": Device("cpu:0", "cpu/2", 4_200_000_000),
        "arrays": arrays,
        "groups": ((0, 1), (2,)),
        "decided": ("fused: 4 trials, 2.0x; packed with 2", "packed with 1", "by itself: it reads other data"),
        "companies": (Company(lanes, "threads", 0.834, 12e-6),),
        "unfused": (Company(tuple(lone[:5])), Company((lone[5],))),
        "failed": (Failed((3,), "ValueError: no [such] width"),),
    }
    return Rehearsal(**fields | changes)


def printed(found, width):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(RehearsalTable(found))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [40, 60])
def test_figures_are_folded_and_not_cut_where_it_is_narrow(width):
    lines = printed(rehearsal(), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines[: lines.index("")])


def test_a_wide_table_has_all_of_an_array_on_a_line():
    lines = printed(rehearsal(), 200)
    first, second, third, failed = lines[2:6]
    assert first.split()[:6] == ["1", "0,", "1,", "2,", "5", "16"]
    figures = ["10", "5,", "2.0x", "1.1", "GB", "1.2", "GB", "91", "%", "kept", "20", "width=64"]
    assert first.split()[6:18] == figures
    assert first.endswith("fused: 4 trials, 2.0x; packed with 2")
    assert second.split()[3:6] == ["10", "–", "1.1"]
    assert third.endswith("width=256  by itself: it reads other data")
    assert failed.split() == ["3", "could", "not", "be", "measured:", "ValueError:", "no", "[such]", "width"]


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_one_cuts_nothing(width):
    lines = printed(rehearsal(), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for shown in ("0, 1, 2, 5", "5, 2.0x", "91 % kept", "width=128", "by itself: it reads other data", "ValueError"):
        assert shown in text
    assert "…" not in text


def test_totals_are_those_of_the_parts():
    lines = [line.split() for line in printed(rehearsal(), 120)]
    # five trials of 10 steps of 0.01 s and one; 5 fetch a second each; six changes and six starts
    assert ["one", "after", "another", "5.8", "0.6", "5", "0.204"] in lines
    # 0.834 * (0.2 + 0.1) + 0.1; one fetches for all; three changes to an array and two starts
    assert ["Shoal's", "choice", "1.47", "75", "%", "0.35", "1", "0.12"] in lines
    assert ["arrays", "1,", "2", "threads", "0.83", "12", "1"] in lines


def test_what_could_not_be_measured_or_not_in_time_or_was_undone_says_so():
    found = rehearsal()
    lanes = found.companies[0].lanes
    undone = rehearsal(groups=((0,), (1,), (2,)), companies=(Company(lanes, error="RuntimeError: no"),))
    text = " ".join(" ".join(printed(undone, 100)).split())
    assert "arrays 1, 2, undone could not be measured: RuntimeError: no" in text
    assert "5 trials, none fused not found in time 1 – 1" in text


def test_many_trials_are_counted():
    found = rehearsal(arrays=(measured(range(9), 64),), groups=((0,),), decided=("",), companies=(), unfused=())
    assert printed(found, 80)[2].split()[:4] == ["1", "9", "trials", "16"]


def test_the_verdict_says_whether_sharing_pays_and_what_fusing_and_packing_do():
    assert verdict(rehearsal()) == (
        "Sharing pays: one epoch of 6 configurations takes 1.47 s instead of 5.8 s one after another, 75 % less "
        "(fusing alone saves 56 %, packing alone saves 71 %)."
    )
    one = {"groups": ((0,),), "decided": ("",), "companies": (), "failed": ()}
    lone = measured([0], 64)
    assert verdict(rehearsal(arrays=(lone,), unfused=(Company((lone.array,)),), **one)) == (
        "Sharing does not pay here: there is but one configuration."
    )
    two = (measured([0], 64, data="a"), measured([1], 64, data="b"))
    apart = rehearsal(
        arrays=two,
        groups=((0,), (1,)),
        decided=("", ""),
        companies=(),
        unfused=tuple(Company((each.array,)) for each in two),
    )
    assert verdict(apart).startswith("Sharing does not pay here: one epoch of 2 configurations takes 2.3 s")
    assert not rehearsal_json(apart)["pays"]


def test_json_has_everything():
    found = json.loads(json.dumps(rehearsal_json(rehearsal())))
    first = found["arrays"][0]
    assert (first["array"], first["trials"], first["packed_with"]) == (1, [0, 1, 2, 5], [2])
    assert (first["step_seconds_alone"], first["step_seconds_fused"], first["gain"]) == (0.01, 0.005, 2.0)
    assert (first["memory_alone"], first["memory"], first["sharing"]) == (1_050_000_000, 1_200_000_000, "kept")
    assert first["configs"][1] == {"lr": 0.125, "width": 64, "batch_size": 16}
    assert found["packs"] == [
        {
            "arrays": [1, 2],
            "trials": [0, 1, 2, 5, 4],
            "way": "threads",
            "pace": 0.834,
            "sample_seconds": 12e-6,
            "fetches": 1.0,
            "error": None,
        }
    ]
    assert found["failed"] == [{"trials": [3], "reason": "ValueError: no [such] width"}]
    assert [each["arrays"] for each in found["data"]] == [[1, 2], [3]]
    assert found["totals"]["apart"]["seconds"] == pytest.approx(5.804)
    assert found["totals"]["chosen"]["impv"] == pytest.approx(1 - 1.4702 / 5.804)
    assert found["pays"]


@pytest.mark.parametrize(("seconds", "text"), [(12.34, "12.3 s"), (0.0456, "45.6 ms"), (1.0, "1 s"), (0.0, "0 ms")])
def test_seconds_are_told_in_the_unit_that_reads_well(seconds, text):
    assert seconds_text(seconds) == text


def test_the_plot_names_what_it_shows(tmp_path):
    path = tmp_path / "plot.svg"
    draw_rehearsal(rehearsal(), path, "digits.py: $weird$ title")
    drawn = path.read_text()
    for text in ("weird", "Shoal's choice", "arrays 1, 2", "array 3", "preprocessing", "IMPV 7"):
        assert f"<!-- {text}" in drawn or text in drawn
    draw_rehearsal(rehearsal(), tmp_path / "plot.png", "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
