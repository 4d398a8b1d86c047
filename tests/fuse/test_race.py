"""The choice of the fastest of several candidates: who runs when, which runs count, who is dropped, who wins."""

from collections.abc import Callable, Iterator
from itertools import chain, groupby, repeat

import pytest

from shoal.fuse.race import Race, RaceRules, choose_fastest

LONG, SHORT = 0.1, 0.001


def run(race: Race[str], seconds: dict[str, float | Iterator[float]], max_runs: int = 500) -> list[str]:
    """Let a race continue until it is over; returns who ran."""
    ran = []
    while race.winner is None:
        assert len(ran) < max_runs, f"no winner after {max_runs} runs: {race.seconds}"
        name = race.next
        ran.append(name)
        took = seconds[name]
        race.note(took if isinstance(took, float) else next(took))
    return ran


def bursts(ran: list[str]) -> list[tuple[str, int]]:
    return [(name, len(list(runs))) for name, runs in groupby(ran)]


@pytest.mark.parametrize(
    ("seconds", "margin", "winner"),
    [
        ({"a": 0.2, "b": 0.1}, 1.0, "b"),
        ({"a": 0.1, "b": 0.1}, 1.0, "a"),
        ({"a": 0.1, "b": 0.098}, 1.03, "a"),
        ({"a": 0.1, "b": 0.096}, 1.03, "b"),
        ({"a": 0.002, "b": 0.003, "c": 0.001}, 1.0, "c"),
        ({"a": 0.1}, 1.0, "a"),
    ],
    ids=["faster", "equal", "faster by less than the margin", "by more", "of three", "single"],
)
def test_the_fastest_wins(seconds: dict[str, float | Iterator[float]], margin: float, winner: str) -> None:
    race = Race(seconds, RaceRules(margin=margin))
    run(race, seconds)
    assert (race.winner, race.next, race.seconds) == (winner, winner, seconds)


def test_short_runs_come_in_bursts_of_which_the_first_does_not_count() -> None:
    cold = chain([9.0], repeat(SHORT))
    race = Race("ab", RaceRules(min_runs=6, max_runs=6))
    assert bursts(run(race, {"a": cold, "b": SHORT})) == [("a", 1), ("b", 4), ("a", 4), ("b", 4), ("a", 4)]
    assert race.seconds == {"a": SHORT, "b": SHORT}


def test_long_runs_take_turns_and_the_very_first_does_not_count() -> None:
    race = Race("ab")
    ran = run(race, {"a": chain([9.0], repeat(LONG)), "b": LONG})
    assert "".join(ran) == "ab" * 4


def test_a_burst_of_one_counts_every_run_but_the_first() -> None:
    race = Race("ab", RaceRules(min_runs=2, max_runs=2, burst=1))
    assert "".join(run(race, {"a": SHORT, "b": SHORT})) == "ababab"


def test_short_runs_are_counted_until_they_took_long_enough() -> None:
    race = Race("a", RaceRules(min_runs=3, max_runs=1000, enough_seconds=0.05))
    assert len(run(race, {"a": 0.006})) == 1 + 9


def test_slow_candidates_are_dropped_and_the_last_one_needs_no_more_runs() -> None:
    race = Race("abc", RaceRules(drop_ratio=3.0, drop_after_seconds=0.02))
    ran = run(race, {"a": LONG, "b": 5 * LONG, "c": 2 * LONG})
    assert (ran.count("b"), ran.count("c")) == (2, 4)
    race = Race("ab", RaceRules(drop_ratio=3.0, drop_after_seconds=0.02))
    assert "".join(run(race, {"a": 5 * LONG, "b": LONG})) == "abab"
    assert race.winner == "b"


def test_a_candidate_is_dropped_only_after_drop_after_seconds() -> None:
    """Steps of what has just been made become shorter for a while."""
    race = Race("ab", RaceRules(drop_ratio=1.5, drop_after_seconds=1.0, min_runs=8))
    run(race, {"a": LONG, "b": chain([LONG, 0.3, 0.3, 0.3], repeat(0.05))})
    assert race.winner == "b"


def test_one_fast_run_does_not_replace_the_incumbent() -> None:
    race = Race("ab", RaceRules(drop_ratio=10))
    run(race, {"a": LONG, "b": chain([LONG, 0.05], repeat(0.12))})
    assert race.winner == "a"


def test_over_budget_one_run_of_each_decides() -> None:
    race = Race("ab", RaceRules(budget_seconds=2.0))
    assert "".join(run(race, {"a": 5.0, "b": 4.0})) == "abab"
    assert race.winner == "b"


def test_costs_are_seconds_per_unit_of_work() -> None:
    race = Race("ab")
    while race.winner is None:
        race.note(LONG, work=1 if race.next == "a" else 2)
    assert (race.winner, race.seconds) == ("b", {"a": LONG, "b": LONG / 2})


@pytest.mark.parametrize(("compiled", "winner"), [(0.09, "compiled"), (0.097, "serial")])
def test_an_added_candidate_races_against_the_leader_timed_anew(compiled: float, winner: str) -> None:
    eager, serial = repeat(0.3), chain([0.2] * 4, repeat(0.1))
    race = Race(["eager", "serial"])
    run(race, {"eager": eager, "serial": serial})
    assert race.winner == "serial"
    race.add("compiled", margin=1.05)
    assert race.winner is None
    assert run(race, {"serial": serial, "compiled": compiled}) == ["serial", "compiled"] * 4
    assert (race.winner, race.seconds["serial"]) == (winner, 0.1)


def test_a_race_can_be_stopped() -> None:
    race = Race("ab")
    race.stop()
    assert race.winner == "a", "nobody was timed"
    race = Race("ab")
    for seconds in (1.0, 1.0, 1.0, 0.5):
        race.note(seconds)
    race.stop()
    assert race.winner == "b"
    race.note(0.1)
    assert race.seconds == {"a": 1.0, "b": 0.5}


def test_a_race_has_candidates() -> None:
    with pytest.raises(ValueError, match="at least one candidate"):
        Race([])


def fails() -> float:
    raise RuntimeError("not for these shapes")


@pytest.mark.parametrize("candidates", [{"a": lambda: LONG, "b": fails}, {"a": lambda: LONG, "b": fails, "c": fails}])
def test_candidates_that_cannot_run_are_dropped(candidates: dict[str, Callable[[], float]]) -> None:
    race = choose_fastest(candidates, expected_errors=(RuntimeError,))
    assert (race.winner, set(race.seconds) - {"a"}) == ("a", set())


def test_an_error_of_the_first_candidate_is_raised() -> None:
    with pytest.raises(RuntimeError, match="not for these shapes"):
        choose_fastest({"b": fails, "a": lambda: LONG}, expected_errors=(RuntimeError,))
