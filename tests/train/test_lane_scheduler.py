"""The lane scheduler: the behaviour of each interleaving, and the choice of the fastest one, with a simulated clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from shoal.train.lane_scheduler import RULES, LaneScheduler

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class World:
    """Simulated clock that records which lane stepped last."""

    def __init__(self, switch: float = 0.0, fetch: float = 0.0, on_stream: float = 1.0) -> None:
        self.now = 0.0
        self.switch, self.fetch, self.on_stream = switch, fetch, on_stream
        self.last: object = None
        self.fetched: set[int] = set()
        self.newest: list[int] = []
        self.log: list[str] = []
        self.fetches = 0

    def clock(self) -> float:
        return self.now

    def spend(self, lane: "Fake") -> None:
        self.now += lane.cost * self.on_stream if FakeStream.used is not None else lane.cost
        if self.last is not lane:
            self.now += self.switch
        self.last = lane
        self.log.append(lane.name)
        for sample in range(lane.position, lane.position + lane.size):
            if sample not in self.fetched:  # another lane may have fetched it, not long ago
                self.now += self.fetch
                self.fetches += 1
                self.fetched.add(sample)
                self.newest = [*self.newest[-63:], sample]
        self.fetched = set(self.newest)


class FakeStream:
    """Fake CUDA stream that records which stream is in use, and how often one waited for another."""

    used: "FakeStream | None" = None

    def __init__(self, device: torch.device) -> None:
        self.waited = 0

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited += 1


@contextmanager
def use(stream: FakeStream) -> Iterator[None]:
    FakeStream.used = stream
    yield
    FakeStream.used = None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return a fake device with streams."""
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return GPU


@dataclass(eq=False)
class Fake:
    """A lane that moves the clock on.

    Args:
        walk: the pass over the data in which it keeps abreast of others, if it does.
        ends: position at which epochs end.
        idle: whether there is nothing for it to do.
        raises: position from which it raises.
    """

    world: World
    name: str
    size: int = 10
    cost: float = 0.001
    settled: bool = True
    walk: str | None = None
    ends: int = 10**9
    idle: bool = False
    raises: int | None = None
    position: int = 0

    @property
    def pass_position(self) -> tuple[str, int] | None:
        return None if self.walk is None else (self.walk, self.position % self.ends)

    def advance(self) -> bool:
        if self.idle:
            return False
        if self.raises is not None and self.position >= self.raises:
            raise ArithmeticError(f"{self.name} at {self.position}")
        self.world.spend(self)
        self.position += self.size
        return self.position % self.ends != 0


def never() -> bool:
    return False


def until_chosen(turns: LaneScheduler, lanes: list[Fake], rounds: int = 200) -> int:
    """Return the number of rounds until an interleaving was chosen."""
    for number in range(rounds):
        assert turns.round(lanes, never) == []
        if turns.interleaving is not None and turns.round_samples >= 64:
            return number + 1
    pytest.fail(f"nothing chosen after {rounds} rounds: {turns.seconds}")


@pytest.mark.parametrize(
    ("walk", "on_stream", "expected"),
    [
        pytest.param(None, 0.6, "streams", id="streams are faster"),
        pytest.param(None, 1.3, "turns", id="streams are slower"),
        pytest.param(None, 0.98, "turns", id="streams are hardly faster"),
        pytest.param("epoch", 0.6, "streams", id="lanes that keep abreast"),
        pytest.param("epoch", 1.3, "steps", id="lanes that keep abreast, one after another"),
    ],
)
def test_the_fastest_interleaving_is_chosen(
    walk: str | None, on_stream: float, expected: str, gpu: torch.device
) -> None:
    world = World(switch=1e-4, on_stream=on_stream)
    lanes = [Fake(world, str(i), walk=walk) for i in range(2)]
    turns = LaneScheduler(gpu, world.clock)
    until_chosen(turns, lanes)
    assert turns.interleaving == expected
    assert set(turns.seconds) == {"turns" if walk is None else "steps", "streams"}


@pytest.mark.parametrize(("walk", "expected"), [(None, "turns"), ("epoch", "steps")])
def test_a_single_interleaving_is_not_measured(walk: str | None, expected: str) -> None:
    world = World(fetch=3e-4)
    lanes = [Fake(world, str(i), walk=walk) for i in range(3)]
    turns = LaneScheduler(CPU, world.clock)
    turns.round(lanes, never)
    assert (turns.interleaving, turns.seconds) == (expected, {})


def test_lanes_abreast_have_each_sample_fetched_once() -> None:
    world = World(fetch=3e-4)
    lanes = [Fake(world, str(i), size=size, walk="epoch") for i, size in enumerate((8, 10, 20))]
    turns = LaneScheduler(CPU, world.clock)
    for _ in range(30):
        turns.round(lanes, never)
    assert world.fetches <= max(lane.position for lane in lanes)


def test_lanes_that_come_at_different_places_of_an_epoch_meet() -> None:
    world = World()
    ahead, behind = Fake(world, "ahead", position=200, walk="epoch"), Fake(world, "behind", walk="epoch")
    turns = LaneScheduler(CPU, world.clock)
    while behind.position < 200:
        turns.round([ahead, behind], never)
        assert ahead.position <= max(200, behind.position + 10)


@pytest.mark.parametrize(("walk", "joins", "together"), [("epoch", 0, 500), ("epoch", 160, 500), ("another", 0, 300)])
def test_a_lane_that_joins_catches_up_with_those_in_the_same_pass(walk: str, joins: int, together: int) -> None:
    """The lanes are level once the new lane is at sample 500; a lane in another pass starts level with the others."""
    world = World(fetch=3e-4)
    lanes = [Fake(world, str(i), position=200, walk="epoch") for i in range(2)]
    turns = LaneScheduler(CPU, world.clock)
    turns.round(lanes, never)
    level = lanes[0].position
    newcomer = Fake(world, "newcomer", position=joins, walk=walk)
    while newcomer.position < 500:
        turns.round([*lanes, newcomer], never)
    ahead = {"epoch": 0, "another": level}[walk]
    assert all(abs(lane.position - newcomer.position - ahead) <= turns.round_samples + 10 for lane in lanes)


def test_what_was_chosen_stays_and_costs_no_measuring(gpu: torch.device) -> None:
    world = World(switch=1e-4, on_stream=2.0)
    lanes = [Fake(world, "a"), Fake(world, "b")]
    turns = LaneScheduler(gpu, world.clock)
    until_chosen(turns, lanes)
    world.log.clear()
    for _ in range(3):
        turns.round(lanes, never)
    switches = sum(one != other for one, other in zip(world.log, world.log[1:], strict=False))
    assert len(world.log) > 50
    assert switches <= 6


def test_an_interleaving_is_tried_a_few_times(gpu: torch.device) -> None:
    world = World(switch=0.01)
    lanes = [Fake(world, "a"), Fake(world, "b")]
    turns = LaneScheduler(gpu, world.clock)
    rounds = until_chosen(turns, lanes)
    assert turns.interleaving == "turns"
    doubling = 10  # of the span, while a round is short
    assert rounds <= doubling + 2 * (RULES.min_runs + 1)


def test_lanes_end_each_round_side_by_side() -> None:
    world = World(switch=1e-4)
    lanes = [Fake(world, "a", size=20), Fake(world, "b", size=50, cost=0.004), Fake(world, "c", size=80)]
    turns = LaneScheduler(CPU, world.clock)
    for _ in range(60):
        turns.round(lanes, never)
        positions = [lane.position for lane in lanes]
        assert max(positions) - min(positions) < 80
    assert turns.round_samples > 1000


def test_single_steps_let_the_one_furthest_behind_go_first() -> None:
    world = World()
    sizes = {"a": 20, "b": 50, "c": 100}
    lanes = [Fake(world, name, size=size, settled=name != "a", walk="epoch") for name, size in sizes.items()]
    turns = LaneScheduler(CPU, world.clock)
    while len(world.log) < 17:
        turns.round(lanes, never)
    assert "".join(world.log).startswith("abcaabaab" + "c"[:1])
    assert turns.interleaving is None
    assert turns.seconds == {}


def test_one_lane_alone_runs_on_without_any_measuring(gpu: torch.device) -> None:
    world = World()
    lane = Fake(world, "a", ends=1000)
    turns = LaneScheduler(gpu, world.clock)
    turns.round([lane], never)
    assert turns.interleaving == "turns"
    assert turns.seconds == {}
    assert lane.position == 1000


def test_a_round_without_lanes_does_nothing() -> None:
    assert LaneScheduler(CPU).round([], never) == []


def test_a_lane_that_ends_an_epoch_is_left_alone_for_the_round() -> None:
    world = World()
    short, long = Fake(world, "short", ends=100), Fake(world, "long")
    turns = LaneScheduler(CPU, world.clock)
    for _ in range(20):
        before = short.position
        turns.round([short, long], never)
        assert short.position // 100 <= before // 100 + 1
        assert long.position >= short.position
    assert turns.round_samples > 100, "a round would lead over the end, but for the one that ends there"


def test_a_lane_with_nothing_to_do_stops_nobody() -> None:
    world = World()
    waits, goes = Fake(world, "waits", idle=True), Fake(world, "goes")
    turns = LaneScheduler(CPU, world.clock)
    for _ in range(5):
        turns.round([waits, goes], never)
    assert waits.position == 0
    assert goes.position >= 50


def test_who_joins_starts_level_and_the_set_is_measured_anew(gpu: torch.device) -> None:
    world = World(switch=1e-4, on_stream=2.0)
    first, second = Fake(world, "a"), Fake(world, "b")
    turns = LaneScheduler(gpu, world.clock)
    until_chosen(turns, [first, second])
    joined = Fake(world, "c")
    level = min(first.position, second.position)
    turns.round([first, second, joined], never)
    assert turns.interleaving is None
    until_chosen(turns, [first, second, joined])
    assert abs(joined.position - (first.position - level)) <= 10
    turns.round([first, second], never)
    assert turns.interleaving == "turns", "what was known of the set of before is known still"


def test_lanes_that_are_not_settled_put_measuring_off_and_what_was_known_is_dropped(gpu: torch.device) -> None:
    world = World(switch=1e-4, on_stream=2.0)
    lanes = [Fake(world, "a"), Fake(world, "b")]
    turns = LaneScheduler(gpu, world.clock)
    until_chosen(turns, lanes)
    lanes[1].settled = False
    turns.round(lanes, never)
    assert turns.interleaving is None
    lanes[1].settled = True
    assert until_chosen(turns, lanes) > 1


def test_a_dropped_lane_is_forgotten() -> None:
    world = World(switch=1e-4)
    lanes = [Fake(world, "a"), Fake(world, "b")]
    turns = LaneScheduler(CPU, world.clock)
    until_chosen(turns, lanes)
    del lanes[1]
    world.last = None
    lanes += [Fake(world, "c")]
    turns.round(lanes, never)
    assert len(turns._lanes) == 2
    assert len(turns._searches) == 1


@pytest.mark.parametrize("interleaving", ["turns", "streams"])
def test_who_raises_is_named_and_the_others_go_on(interleaving: str, gpu: torch.device) -> None:
    world = World(on_stream=0.5 if interleaving == "streams" else 2.0)
    good, bad = Fake(world, "good"), Fake(world, "bad")
    turns = LaneScheduler(gpu, world.clock)
    until_chosen(turns, [good, bad])
    assert turns.interleaving == interleaving
    bad.raises = bad.position + 30
    before = good.position
    (failure,) = turns.round([bad, good], never)
    assert failure.lane is bad
    assert isinstance(failure.error, ArithmeticError)
    assert bad.position == bad.raises
    assert good.position >= before + 60
    assert turns.round([good], lambda: True) == []


def test_all_who_raise_are_named(gpu: torch.device) -> None:
    world = World(on_stream=0.5)
    lanes = [Fake(world, name) for name in "abc"]
    turns = LaneScheduler(gpu, world.clock)
    until_chosen(turns, lanes)
    for lane in lanes[:2]:
        lane.raises = lane.position
    failures = turns.round(lanes, never)
    assert {failure.lane for failure in failures} == set(lanes[:2])


@pytest.mark.parametrize("interleaving", ["turns", "streams"])
def test_an_interruption_ends_the_round_after_the_step_under_way(interleaving: str, gpu: torch.device) -> None:
    world = World(on_stream=0.5 if interleaving == "streams" else 2.0)
    lanes = [Fake(world, name) for name in "ab"]
    turns = LaneScheduler(gpu, world.clock)
    until_chosen(turns, lanes)
    assert turns.interleaving == interleaving
    world.log.clear()
    turns.round(lanes, lambda: len(world.log) >= 5)
    assert len(world.log) == 5
