"""What company costs, seen, and what follows for the next: case by case."""

import pytest

from shoal.core.demand import Profile
from shoal.cost.crowding import crowded_scaling, with_crowding

PROFILE = Profile({1: 1.0}, 10, 0, base_memory=0, member_memory=1, compute=0.5, cores=1.0)


def test_what_was_seen_last_moves_what_is_known():
    once = with_crowding(PROFILE, 2, 1.5)
    assert once.crowding == {2: 1.5}
    twice = with_crowding(once, 2, 2.5)
    assert twice.crowding == {2: pytest.approx(1.8)}
    assert with_crowding(twice, 3, 4.0).crowding == {2: pytest.approx(1.8), 3: 4.0}


def test_what_is_nearly_known_is_not_written_again():
    assert with_crowding(with_crowding(PROFILE, 2, 1.5), 2, 1.6) is None


SCALINGS = {
    "nothing was seen": ({}, 2, None),
    "not of two": ({3: 1.0}, 2, (4, 1.0)),
    "one more than was seen": ({2: 1.0}, 1, (3, 1.0)),
    "as many as jobs ask for": ({2: 1.0}, 5, (5, 1.0)),
    "a second is worth little": ({2: 1.95}, 5, (1, 2.0)),
    "a third is worth nothing": ({2: 1.3, 3: 2.0}, 5, (2, 1.3)),
    "a gap is filled": ({2: 1.3, 4: 9.0}, 1, (2, 1.3)),
    "one more would not be worth its part (Lemma 4)": ({2: 1.6}, 5, (2, 1.6)),
    "noise": ({2: 0.9}, 2, (3, 1.0)),
}  # fmt: skip


@pytest.mark.parametrize(("crowding", "expected", "found"), SCALINGS.values(), ids=SCALINGS)
def test_how_many_are_to_share_a_device(crowding, expected, found):
    profile = PROFILE
    for jobs, factor in crowding.items():
        profile = with_crowding(profile, jobs, factor)
    scaling = crowded_scaling(profile, expected)
    assert (scaling and (scaling.sharing, pytest.approx(scaling.alpha))) == found
