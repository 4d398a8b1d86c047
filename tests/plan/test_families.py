"""Which trials of several structures are planned as one partially fused array."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from planner_samples import KnownCosts, classes_of

from shoal.core.array import FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.trial import Trial
from shoal.plan.families import by_family, families
from shoal.plan.waiting import WaitingClass, round_robin


def key(structure: str, family: str = "adapters", data: str = "d") -> FusionKey:
    return FusionKey(structure, data, 8, family=family)


def profile(step: dict[int, float], epoch_steps: int = 100) -> Profile:
    return Profile(step, epoch_steps, 0, base_memory=0, member_memory=1, compute=1.0, cores=1.0)


def waiting(*keys: FusionKey, epochs: int = 10) -> list[tuple[Member, FusionKey]]:
    return [(Member(Trial(number, {}, seed=0, data_seed=0), 0, epochs), each) for number, each in enumerate(keys)]


def fused_keys(classes: Sequence[WaitingClass]) -> dict[int, FusionKey]:
    return {member.trial.number: each.fused_key for each in classes for member in each.members}


R4, R8 = key("r4"), key("r8")
FAMILY = R4.family_key
SLOW = {R4: profile({1: 0.1, 4: 0.4}), R8: profile({1: 0.1, 4: 0.4})}
"""An epoch of a trial takes 10 s."""
SLOW_ON_A_CPU = {key: replace(one, first_size=8) for key, one in SLOW.items()}
FAST = profile({1: 0.1, 4: 0.2})
DEAR = profile({1: 0.1, 4: 0.39})
FOUR = (R4, R8, R4, R8)

CASES: dict[str, tuple[dict[FusionKey, Profile], dict[str, Any], bool]] = {
    "one array is faster": ({**SLOW, FAMILY: FAST}, {}, True),
    "one array gains too little": ({**SLOW, FAMILY: DEAR}, {}, False),
    "members of the family are faster alone": ({**SLOW, FAMILY: profile({1: 0.05, 4: 0.3})}, {}, False),
    "packing gains as much": ({**SLOW, FAMILY: FAST}, {"relative_time": lambda keys: 0.5}, False),
    "the family is still to be measured": (SLOW, {}, True),
    "there is too little work to measure it for": (SLOW, {"epochs": 0.01}, False),
    "a GPU would time a single member": (SLOW, {"epochs": 1}, False),
    "a CPU has enough work": (SLOW_ON_A_CPU, {"epochs": 1}, True),
    "it cannot be measured": (SLOW, {"unmeasurable": {(FAMILY, "cpu")}}, False),
    "a structure is still to be measured": ({R4: SLOW[R4], FAMILY: FAST}, {}, False),
    "failed trials keep their keys": ({**SLOW, FAMILY: FAST}, {"excluded": {0, 1, 2, 3}}, False),
    "the remaining trials have one structure": ({**SLOW, FAMILY: FAST}, {"excluded": {1, 3}}, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_one_array_where_that_is_measured_to_gain(name: str) -> None:
    known, more, shared = CASES[name]
    more = dict(more)
    some = classes_of(waiting(*FOUR, epochs=more.pop("epochs", 10)), more.pop("excluded", frozenset()))
    found = by_family(some, KnownCosts(lambda key, kind: known.get(key)), ["cpu"], **more)
    assert fused_keys(found) == dict(enumerate([FAMILY] * 4 if shared else FOUR))


def test_every_kind_of_device_on_which_it_is_known_must_gain() -> None:
    known = {("a", FAMILY): FAST, ("b", FAMILY): DEAR}
    both = KnownCosts(lambda key, kind: known.get((kind, key), SLOW.get(key)))
    some = classes_of(waiting(*FOUR))
    assert by_family(some, both, ["a"])[0].fused_key == FAMILY
    assert by_family(some, both, ["a", "b"])[0].fused_key == R4


def test_families_agree_on_data_and_batches() -> None:
    some = waiting(R4, R8, key("r8", data="other"), key("net", ""), key("other net", ""), key("r4", "of another"))
    assert {family: len(classes) for family, classes in families(classes_of(some)).items()} == {FAMILY: 2}


def test_members_come_in_turns_of_their_structures() -> None:
    some = classes_of(waiting(R4, R4, R4, R8, key("r16"), R8))
    assert [member.trial.number for member in round_robin(some, 9)] == [0, 3, 4, 1, 5, 2]
    assert [member.trial.number for member in round_robin(some, 4)] == [0, 3, 4, 1]
