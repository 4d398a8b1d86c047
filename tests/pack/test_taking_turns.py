"""How lanes take turns: the choice between the ways, and what each way does, with a clock that the lanes move on."""

import threading
from dataclasses import dataclass, field

import pytest
import torch

from shoal.core.errors import PackError
from shoal.pack.search import RULES
from shoal.pack.threads import Threads
from shoal.pack.turns import Turns

CPU = torch.device("cpu")
MAIN = threading.main_thread()


class World:
    """A clock, and who stepped last."""

    def __init__(self, switch: float = 0.0, fetch: float = 0.0, in_thread: float = 1.0) -> None:
        self.now = 0.0
        self.switch, self.fetch, self.in_thread = switch, fetch, in_thread
        self.last: object = None
        self.fetched: set[int] = set()
        self.newest: list[int] = []
        self.lock = threading.Lock()
        self.log: list[str] = []
        self.fetches = 0

    def clock(self) -> float:
        return self.now

    def spend(self, lane: "Fake") -> None:
        with self.lock:
            alone = threading.current_thread() is MAIN
            self.now += lane.cost if alone else lane.cost * self.in_thread
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
    threadable: bool = False
    walk: str | None = None
    ends: int = 10**9
    idle: bool = False
    raises: int | None = None
    position: int = 0
    threads: set[int] = field(default_factory=set)

    @property
    def place(self) -> tuple[str, int] | None:
        return None if self.walk is None else (self.walk, self.position % self.ends)

    def advance(self) -> bool:
        if self.idle:
            return False
        if self.raises is not None and self.position >= self.raises:
            raise ArithmeticError(f"{self.name} at {self.position}")
        self.threads.add(threading.get_ident())
        self.world.spend(self)
        self.position += self.size
        return self.position % self.ends != 0


def never() -> bool:
    return False


def until_chosen(turns: Turns, lanes: list[Fake], rounds: int = 200) -> int:
    """Rounds that it took."""
    for number in range(rounds):
        assert turns.round(lanes, never) == []
        if turns.way is not None and turns.span >= 64:
            return number + 1
    pytest.fail(f"nothing chosen after {rounds} rounds: {turns.seconds}")


@pytest.mark.parametrize(
    ("world", "sizes", "threadable", "expected"),
    [
        pytest.param(World(switch=1e-4, in_thread=0.6), (10, 10), True, "threads", id="threads are faster"),
        pytest.param(World(switch=1e-4, in_thread=1.3), (10, 10), True, "turns", id="threads are slower"),
        pytest.param(World(switch=1e-4, in_thread=0.98), (10, 10), True, "turns", id="threads are hardly faster"),
    ],
)
def test_the_fastest_way_is_chosen(world: World, sizes: tuple[int, ...], threadable: bool, expected: str) -> None:
    lanes = [Fake(world, str(i), size=size, threadable=threadable) for i, size in enumerate(sizes)]
    turns = Turns(CPU, world.clock, threads=2)
    until_chosen(turns, lanes)
    assert turns.way == expected
    assert set(turns.seconds) == {"turns", "threads"}


@pytest.mark.parametrize(
    ("walk", "threadable", "expected"),
    [
        pytest.param(None, False, "turns", id="steps that may not be taken in threads"),
        pytest.param("epoch", False, "steps", id="lanes that keep abreast"),
        pytest.param("epoch", True, "steps", id="also if they could run in threads"),
    ],
)
def test_where_there_is_one_way_nothing_is_measured(walk: str | None, threadable: bool, expected: str) -> None:
    world = World(fetch=3e-4)
    lanes = [Fake(world, str(i), walk=walk, threadable=threadable) for i in range(3)]
    turns = Turns(CPU, world.clock, threads=2)
    turns.round(lanes, never)
    assert (turns.way, turns.seconds) == (expected, {})


def test_lanes_abreast_have_each_sample_fetched_once() -> None:
    world = World(fetch=3e-4)
    lanes = [Fake(world, str(i), size=size, walk="epoch") for i, size in enumerate((8, 10, 20))]
    turns = Turns(CPU, world.clock)
    for _ in range(30):
        turns.round(lanes, never)
    assert world.fetches <= max(lane.position for lane in lanes)


def test_lanes_that_come_at_different_places_of_an_epoch_meet() -> None:
    world = World()
    ahead, behind = Fake(world, "ahead", position=200, walk="epoch"), Fake(world, "behind", walk="epoch")
    turns = Turns(CPU, world.clock)
    while behind.position < 200:
        turns.round([ahead, behind], never)
        assert ahead.position <= max(200, behind.position + 10)


@pytest.mark.parametrize(("walk", "joins", "together"), [("epoch", 0, 500), ("epoch", 160, 500), ("another", 0, 300)])
def test_a_lane_that_joins_catches_up_with_those_in_the_same_pass(walk: str, joins: int, together: int) -> None:
    """They are level once the newcomer is at sample 500; one in another pass counts from where the others are."""
    world = World(fetch=3e-4)
    lanes = [Fake(world, str(i), position=200, walk="epoch") for i in range(2)]
    turns = Turns(CPU, world.clock)
    turns.round(lanes, never)
    level = lanes[0].position
    newcomer = Fake(world, "newcomer", position=joins, walk=walk)
    while newcomer.position < 500:
        turns.round([*lanes, newcomer], never)
    ahead = {"epoch": 0, "another": level}[walk]
    assert all(abs(lane.position - newcomer.position - ahead) <= turns.span + 10 for lane in lanes)


def test_what_was_chosen_stays_and_costs_no_measuring() -> None:
    world = World(switch=1e-4, in_thread=2.0)
    lanes = [Fake(world, "a", threadable=True), Fake(world, "b", threadable=True)]
    turns = Turns(CPU, world.clock, threads=2)
    until_chosen(turns, lanes)
    world.log.clear()
    for _ in range(3):
        turns.round(lanes, never)
    switches = sum(one != other for one, other in zip(world.log, world.log[1:], strict=False))
    assert len(world.log) > 50
    assert switches <= 6


def test_a_way_is_tried_a_few_times() -> None:
    world = World(switch=0.01)
    lanes = [Fake(world, "a", threadable=True), Fake(world, "b", threadable=True)]
    turns = Turns(CPU, world.clock, threads=2)
    rounds = until_chosen(turns, lanes)
    assert turns.way == "turns"
    doubling = 10  # of the span, while a round is short
    assert rounds <= doubling + 2 * (RULES.rounds + 1)


def test_lanes_end_each_round_side_by_side() -> None:
    world = World(switch=1e-4)
    lanes = [Fake(world, "a", size=20), Fake(world, "b", size=50, cost=0.004), Fake(world, "c", size=80)]
    turns = Turns(CPU, world.clock)
    for _ in range(60):
        turns.round(lanes, never)
        positions = [lane.position for lane in lanes]
        assert max(positions) - min(positions) < 80
    assert turns.span > 1000


def test_single_steps_let_the_one_furthest_behind_go_first() -> None:
    world = World()
    sizes = {"a": 20, "b": 50, "c": 100}
    lanes = [Fake(world, name, size=size, settled=name != "a", walk="epoch") for name, size in sizes.items()]
    turns = Turns(CPU, world.clock)
    while len(world.log) < 17:
        turns.round(lanes, never)
    assert "".join(world.log).startswith("abcaabaab" + "c"[:1])
    assert turns.way is None
    assert turns.seconds == {}


@pytest.mark.parametrize("threadable", [False, True])
def test_one_lane_alone_runs_on_without_any_measuring(threadable: bool) -> None:
    world = World()
    lane = Fake(world, "a", ends=1000, threadable=threadable)
    turns = Turns(CPU, world.clock, threads=2)
    turns.round([lane], never)
    assert turns.way == "turns"
    assert turns.seconds == {}
    assert lane.position == 1000
    assert lane.threads == {threading.get_ident()}


def test_no_lane_at_all_is_no_round() -> None:
    assert Turns(CPU).round([], never) == []


def test_a_lane_that_ends_an_epoch_is_left_alone_for_the_round() -> None:
    world = World()
    short, long = Fake(world, "short", ends=100), Fake(world, "long")
    turns = Turns(CPU, world.clock)
    for _ in range(20):
        before = short.position
        turns.round([short, long], never)
        assert short.position // 100 <= before // 100 + 1
        assert long.position >= short.position
    assert turns.span > 100, "a round would lead over the end, but for the one that ends there"


def test_a_lane_with_nothing_to_do_stops_nobody() -> None:
    world = World()
    waits, goes = Fake(world, "waits", idle=True), Fake(world, "goes")
    turns = Turns(CPU, world.clock)
    for _ in range(5):
        turns.round([waits, goes], never)
    assert waits.position == 0
    assert goes.position >= 50


def test_who_joins_starts_level_and_the_set_is_measured_anew() -> None:
    world = World(switch=1e-4, in_thread=2.0)
    first, second = Fake(world, "a", threadable=True), Fake(world, "b", threadable=True)
    turns = Turns(CPU, world.clock, threads=2)
    until_chosen(turns, [first, second])
    joined = Fake(world, "c", threadable=True)
    level = min(first.position, second.position)
    turns.round([first, second, joined], never)
    assert turns.way is None
    until_chosen(turns, [first, second, joined])
    assert abs(joined.position - (first.position - level)) <= 10
    turns.round([first, second], never)
    assert turns.way == "turns", "what was known of the set of before is known still"


def test_lanes_that_are_not_settled_put_measuring_off_and_what_was_known_is_dropped() -> None:
    world = World(switch=1e-4, in_thread=2.0)
    lanes = [Fake(world, "a", threadable=True), Fake(world, "b", threadable=True)]
    turns = Turns(CPU, world.clock, threads=2)
    until_chosen(turns, lanes)
    lanes[1].settled = False
    turns.round(lanes, never)
    assert turns.way is None
    lanes[1].settled = True
    assert until_chosen(turns, lanes) > 1


def test_a_dropped_lane_is_forgotten() -> None:
    world = World(switch=1e-4)
    lanes = [Fake(world, "a"), Fake(world, "b")]
    turns = Turns(CPU, world.clock)
    until_chosen(turns, lanes)
    del lanes[1]
    world.last = None
    lanes += [Fake(world, "c")]
    turns.round(lanes, never)
    assert len(turns._lanes) == 2
    assert len(turns._searches) == 1


@pytest.mark.parametrize("threadable", [False, True], ids=["one thread", "threads"])
def test_who_raises_is_named_and_the_others_go_on(threadable: bool) -> None:
    world = World(in_thread=0.5)
    good, bad = Fake(world, "good", threadable=threadable), Fake(world, "bad", threadable=threadable)
    turns = Turns(CPU, world.clock, threads=2)
    until_chosen(turns, [good, bad])
    assert turns.way == ("threads" if threadable else "turns")
    bad.raises = bad.position + 30
    before = good.position
    (failure,) = turns.round([bad, good], never)
    assert failure.lane is bad
    assert isinstance(failure.error, ArithmeticError)
    assert bad.position == bad.raises
    assert good.position >= before + 60
    assert turns.round([good], lambda: True) == []


def test_all_who_raise_in_threads_are_named() -> None:
    world = World(in_thread=0.5)
    lanes = [Fake(world, name, threadable=True) for name in "abc"]
    turns = Turns(CPU, world.clock, threads=2)
    until_chosen(turns, lanes)
    for lane in lanes[:2]:
        lane.raises = lane.position
    failures = turns.round(lanes, never)
    assert {failure.lane for failure in failures} == set(lanes[:2])


@pytest.mark.parametrize("threadable", [False, True], ids=["one thread", "threads"])
def test_an_interruption_ends_the_round_after_the_steps_under_way(threadable: bool) -> None:
    world = World(in_thread=0.5)
    lanes = [Fake(world, name, threadable=threadable) for name in "ab"]
    turns = Turns(CPU, world.clock, threads=2)
    until_chosen(turns, lanes)
    world.log.clear()
    turns.round(lanes, lambda: len(world.log) >= 5)
    assert 5 <= len(world.log) <= (6 if threadable else 5)


def test_threads_share_out_the_cores_and_the_caller_keeps_its_own() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    lanes = [Seeing(World(in_thread=0.5), "a", seen), Seeing(World(), "b", seen)]
    world = World(in_thread=0.5)
    for lane in lanes:
        lane.world = world
    turns = Turns(CPU, world.clock, threads=4)
    until_chosen(turns, lanes)
    assert turns.way == "threads"
    seen.clear()
    turns.round(lanes, never)
    assert set(seen) == {2}, "of four cores for two threads"
    assert torch.get_num_threads() == before
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert others == [before]


class Seeing(Fake):
    """Notes how many threads torch would use where it steps."""

    def __init__(self, world: World, name: str, seen: list[int]) -> None:
        super().__init__(world, name, threadable=True)
        self.seen = seen

    def advance(self) -> bool:
        self.seen.append(torch.get_num_threads())
        return super().advance()


@pytest.mark.parametrize("before", [1, 2, 3])
def test_threads_keep_their_own_number(before: int) -> None:
    now = torch.get_num_threads()
    torch.set_num_threads(before)
    threads = Threads(2, 4)
    seen: list[int] = []
    threads.run(lambda: seen.append(torch.get_num_threads()), lambda: None)
    threads.close()
    assert seen == [2, 2]
    assert torch.get_num_threads() == before
    torch.set_num_threads(now)


def test_an_interrupt_of_the_program_ends_all_threads_and_comes_out() -> None:
    threads = Threads(2, 2)
    stopped = threading.Event()
    first = threading.Lock()

    def work() -> None:
        if first.acquire(blocking=False):
            raise KeyboardInterrupt
        assert stopped.wait(20)

    with pytest.raises(KeyboardInterrupt):
        threads.run(work, stopped.set)
    ran: list[int] = []
    threads.run(lambda: ran.append(threading.get_ident()), stopped.set)
    assert len(ran) == 2
    threads.close()


@pytest.mark.parametrize("threads", [0, -1])
def test_a_wrong_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(PackError, match=rf"`threads` must be at least 1, got {threads}"):
        Turns(CPU, threads=threads)
