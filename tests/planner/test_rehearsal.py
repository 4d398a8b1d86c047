"""What an epoch of some configurations takes, apart and together, and what is said of it: all worked out by hand."""

import dataclasses

import pytest
from rehearsal_samples import DEVICE, company, measured, profile

from shoal.dry_run.parts import Parts, epoch, job, saved, together, total
from shoal.dry_run.reasons import Reasons
from shoal.dry_run.result import Company, Rehearsal
from shoal.planner.candidates import candidate
from shoal.planner.grouping import START_SECONDS, Grouping
from shoal.planner.packing.cost import Cost
from shoal.planner.packing.single import Single


def test_an_epoch_is_its_steps_the_samples_of_its_batches_and_the_change_to_it():
    known = dataclasses.replace(profile(0.01, 0.015, fetch=0.002, sharing="kept"), validation_steps=3)
    one = epoch(known, 1, switching=0.5)
    assert one.steps == pytest.approx(0.01 * (10 + 3 / 3))  # a validation step is a third of one
    assert one.preprocessing == pytest.approx(0.002 * 13)
    assert one.seconds == pytest.approx(0.11 + 0.026 + 0.5)
    assert epoch(known, 2, 0.0).steps == pytest.approx(0.015 * 11)


def test_samples_are_fetched_once_for_those_who_share_and_steps_go_at_their_pace():
    parts = [Parts(1.0, 4.0, 0.1), Parts(2.0, 4.0, 0.2)]
    assert total(parts) == Parts(3.0, 8.0, pytest.approx(0.3))
    assert together(parts, pace=0.5, fetches=1.0) == Parts(1.5, 4.0, pytest.approx(0.3))
    assert together(parts, pace=1.0, fetches=2.0).preprocessing == 8.0
    assert job(parts[0]).switching == pytest.approx(0.1 + START_SECONDS)


def test_impv_is_the_part_of_the_time_that_is_saved():
    assert saved(Parts(4.0), Parts(1.0)) == 0.75
    assert saved(Parts(2.0), Parts(3.0)) == -0.5
    assert saved(Parts(), Parts()) == 0.0


def test_totals_are_of_all_trials_alone_packed_fused_and_as_chosen():
    two = measured([0, 2], profile(0.01, 0.012, fetch=0.02, sharing="kept"))
    one = measured([1], profile(0.03, fetch=0.02, sharing="kept"), "cnn")
    lone = [dataclasses.replace(two.array, members=(member,)) for member in two.array.members]
    packed = company(two, one, way="steps", pace=0.5)
    everybody = Company((lone[0], one.array, lone[1]), "threads", 0.8)
    found = Rehearsal(DEVICE, (two, one), ((0, 1),), ("", ""), (packed,), (everybody,), ())
    (stream,) = found.streams
    assert stream.arrays == (0, 1)
    assert stream.apart == Parts(pytest.approx(0.1 + 0.1 + 0.3), pytest.approx(0.6), pytest.approx(3 * START_SECONDS))
    assert stream.packed == Parts(pytest.approx(0.8 * 0.5), pytest.approx(0.2), pytest.approx(START_SECONDS))
    assert stream.fused == Parts(pytest.approx(0.12 + 0.3), pytest.approx(0.4), pytest.approx(2 * START_SECONDS))
    assert stream.chosen == Parts(pytest.approx(0.5 * 0.42), pytest.approx(0.2), pytest.approx(START_SECONDS))
    assert found.in_all("chosen") == stream.chosen
    assert found.pays
    apart, chosen = 1.1 + 3 * START_SECONDS, 0.41 + START_SECONDS
    assert found.saves("chosen") == pytest.approx((apart - chosen) / apart)


def test_data_sets_are_apart_and_what_failed_in_company_is_one_after_another():
    ones = [measured([number], profile(), data=data) for number, data in enumerate(["a", "b", "a"])]
    failed = Company((ones[0].array, ones[2].array), error="RuntimeError: no")
    found = Rehearsal(DEVICE, tuple(ones), ((0,), (1,), (2,)), ("",) * 3, (failed,), (failed, company(ones[1])), ())
    assert [stream.arrays for stream in found.streams] == [(0, 2), (1,)]
    assert found.streams[0].packed == found.streams[0].apart
    assert found.saves("chosen") == 0.0
    assert not found.pays


HUGE = profile(base=4_000_000_000, member=5_100_000_000)
SLOW = profile(0.001, fetch=0.05, sharing="window")
KEPT = profile(1.0, fetch=0.05, sharing="kept")
LARGE = profile(0.1, base=10, member=3_000_000_000)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        pytest.param([measured([0], profile())], "by itself: there is nobody else", id="nobody"),
        pytest.param([measured([0, 1], profile(0.021, 0.02))], "fused: 2 trials, 2.1x", id="all fused"),
        pytest.param(
            [measured([0], profile()), measured([1], profile(), data="other")],
            "by itself: it reads other data",
            id="other data",
        ),
        pytest.param(
            [measured([0], profile(1.0)), measured([1], profile(1.0), "cnn")],
            "by itself: sharing would save 0 %, at least 5 % is asked",
            id="saves too little",
        ),
        pytest.param(
            [measured([0], KEPT), measured([1], KEPT, "cnn")],
            "by itself: sharing would save 0 %, at least 5 % is asked; samples are kept for all jobs of a process",
            id="what it could share is there",
        ),
        pytest.param(
            [measured([0], HUGE), measured([1], profile(), "cnn")],
            "by itself: 9.1 GB, cpu:0 has 4.2 GB",
            id="does not fit",
        ),
        pytest.param(
            [measured([0], LARGE), measured([1], LARGE, "cnn")],
            "by itself: with another 6.0 GB, cpu:0 has 4.2 GB",
            id="does not fit with another",
        ),
        pytest.param(
            [measured([0], profile(1.0)), measured([1], profile(1.0))],
            "not fused: together no faster; by itself: sharing would save 0 %, at least 5 % is asked",
            id="fusing is slower",
        ),
    ],
)
def test_an_array_by_itself_has_a_reason(arrays, expected):
    assert reasons(arrays).of(0) == expected


def test_a_packed_array_says_with_whom_and_what_that_saves():
    arrays = [measured([0, 1], SLOW), measured([2], SLOW, "cnn")]
    found = dataclasses.replace(reasons(arrays), companies=[company(*arrays, way="turns")])
    # 0.02 + 0.01 + 2 * 0.5 + 2 starts against 0.03 + 0.5 + a start
    share = f"{100 * (0.5 + START_SECONDS) / (1.03 + 2 * START_SECONDS):.0f}"
    assert found.of(0) == f"fused: 2 trials, 1.0x; packed with 2: saves {share} % (samples are fetched once)"
    assert found.of(1) == f"packed with 1: saves {share} % (samples are fetched once)"


def test_what_takes_the_steps_less_time_is_said_to():
    arrays = [measured([0], profile(0.1)), measured([1], profile(0.1), "cnn")]
    found = dataclasses.replace(reasons(arrays), groups=[(0, 1)], companies=[company(*arrays, way="threads", pace=0.6)])
    assert found.of(0).endswith("(their steps take 40 % less)")


def test_other_reasons_are_those_of_the_study_and_of_what_went_wrong():
    twins = [measured([0], profile()), measured([1], profile())]
    unfused = dataclasses.replace(reasons(twins), fuse=False, packing=Single(), groups=[(0,), (1,)])
    assert unfused.of(0).startswith("not fused: fuse=False; by itself: Single() has it so, company would save up to ")
    others = [measured([0], SLOW), measured([1], SLOW, "cnn")]
    wrong = dataclasses.replace(
        reasons(others), groups=[(0,), (1,)], companies=[company(*others, error="RuntimeError: no")]
    )
    assert wrong.of(1) == "by itself: in company it could not be measured: RuntimeError: no"


def reasons(arrays):
    """What decides when a search plans the arrays."""
    profiles = {id(each.array.key): each.profile for each in arrays}
    grouping = Grouping(Cost())
    fields = [each.array for each in arrays]

    def known(key, kind):
        return profiles[id(key)]

    candidates = [candidate(array, known, [DEVICE]) for array in fields]
    groups = grouping.groups(fields, known, [DEVICE], {}, frozenset())
    indices = [tuple(fields.index(array) for array in group) for group in groups]
    return Reasons(arrays, candidates, indices, [], grouping.scene(candidates, [DEVICE], {}), Cost(), DEVICE, True)
