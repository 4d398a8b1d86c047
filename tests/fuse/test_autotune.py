"""The autotuner takes the fastest lowering, stores it, and has no other visible effect."""

import json
import logging
import multiprocessing
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from twins import check

from shoal.fuse import autotune
from shoal.fuse.autotune import TuningBudget, TuningCache, autotuning, fastest, forced_lowerings, without_autotuning

X = torch.ones(3, 2, dtype=torch.float64)


class Clock:
    """The clock by which lowerings are timed here: only what `takes` time does, so no other program disturbs."""

    seconds = 0.0


def takes(milliseconds: float) -> None:
    Clock.seconds += milliseconds / 1e3


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.fuse.autotune._now", lambda device: Clock.seconds)


class Lowerings(dict[str, Callable[[Tensor], Tensor]]):
    """Lowerings of doubling a tensor, each of which takes some milliseconds; remembers which of them ran."""

    def __init__(self, **milliseconds: float) -> None:
        self.ran: list[str] = []
        super().__init__({name: self._lowering(name, wait) for name, wait in milliseconds.items()})

    def _lowering(self, name: str, wait: float) -> Callable[[Tensor], Tensor]:
        def lowering(x: Tensor) -> Tensor:
            self.ran.append(name)
            takes(wait)
            return x * 2

        return lowering


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Autotuning is on, with this file."""
    path = tmp_path / "cache" / "lowerings.jsonl"
    with autotuning(path):
        yield path


def last(lowerings: Lowerings, x: Tensor = X, settings: Any = ()) -> str:
    """The lowering that is taken in the end."""
    assert torch.equal(fastest("double", lowerings, [x], settings), x * 2)
    return lowerings.ran[-1]


@pytest.mark.usefixtures("path")
def test_the_fastest_lowering_is_taken_and_measured_once() -> None:
    lowerings = Lowerings(slow=8, fast=1, slowest=12)
    assert last(lowerings) == "fast"
    before = len(lowerings.ran)
    assert before > 3 * 3
    assert last(lowerings) == "fast"
    assert len(lowerings.ran) == before + 1


@pytest.mark.usefixtures("path")
def test_the_first_lowering_stays_where_others_gain_little() -> None:
    assert last(Lowerings(first=10, second=9.8)) == "first"


@pytest.mark.usefixtures("path")
def test_a_hopeless_lowering_is_soon_given_up() -> None:
    lowerings = Lowerings(first=1, hopeless=80)
    last(lowerings)
    assert lowerings.ran.count("hopeless") == 2


@pytest.mark.usefixtures("path")
def test_what_the_time_depends_on_is_measured_apart() -> None:
    lowerings = Lowerings(first=2, second=1)

    def races(x: Tensor, settings: Any = ()) -> bool:
        before = len(lowerings.ran)
        last(lowerings, x, settings)
        return len(lowerings.ran) > before + 1

    assert races(X)
    assert not races(X + 1)
    assert not races(torch.ones(4, 2, dtype=torch.float64)), "nearly the same size"
    assert races(torch.ones(5, 4, dtype=torch.float64))
    assert races(torch.ones(5, 4, dtype=torch.float64).T)
    assert races(X.float())
    assert races(X.clone().requires_grad_())
    assert races(X, settings=(1, "same"))
    with torch.no_grad():
        assert races(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert races(X)
        assert not races(X)


def test_the_file_has_findings_for_each_number_of_threads_and_a_process_keeps_its_own(path: Path) -> None:
    last(lowerings := Lowerings(first=2, second=1))
    torch.set_num_threads(2)
    try:
        measured = len(lowerings.ran)
        last(lowerings)
        assert len(lowerings.ran) == measured + 1
        with autotuning(path):
            last(again := Lowerings(first=2, second=1))
        assert len(again.ran) > 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("path")
def test_the_backward_pass_counts() -> None:
    class SlowBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            takes(10)
            return grad * 2

    lowerings: dict[str, Callable[[Tensor], Tensor]] = {
        "forward": lambda x: SlowBackward.apply(x),
        "both": lambda x: (takes(3), x * 2)[1],
    }
    leaf = X.clone().requires_grad_()
    assert fastest("double", lowerings, [leaf]).grad_fn.name() == "MulBackward0"
    assert leaf.grad is None


def test_findings_are_read_by_the_next_process(path: Path) -> None:
    last(Lowerings(slow=8, fast=1))
    with autotuning(path):
        lowerings = Lowerings(slow=8, fast=1)
        assert last(lowerings) == "fast"
        assert lowerings.ran == ["fast"]
    with autotuning(path):
        assert last(Lowerings(slow=8, other=1)) == "other"  # the lowering that was found is gone


def test_the_file_says_what_was_measured(path: Path) -> None:
    last(Lowerings(slow=8, fast=1), settings=(3, "same"))
    (line,) = filter(None, path.read_text().splitlines())
    entry = json.loads(line)
    assert entry["lowering"] == "fast"
    assert entry["seconds"]["slow"] > entry["seconds"]["fast"] > 0
    assert torch.__version__ in entry["key"]
    assert "(3, 'same')" in entry["key"]


@pytest.mark.parametrize("rest", ['{"key": "half', "\x00\xff\x00", '{"key": "a"}', "[]", "no json"])
def test_a_torn_file_costs_its_torn_lines(path: Path, rest: str, caplog: pytest.LogCaptureFixture) -> None:
    last(Lowerings(slow=8, fast=1))
    with path.open("a") as file:
        file.write(rest)  # without an end of line
    with autotuning(path), caplog.at_level(logging.WARNING, "shoal.fuse"):
        lowerings = Lowerings(slow=8, fast=1)
        assert last(lowerings) == "fast"
        assert lowerings.ran == ["fast"]
        assert last(Lowerings(slow=8, fast=1), X.float()) == "fast"
    assert "cannot be read; their lowerings are measured anew" in caplog.text
    found = TuningCache(path)
    assert found.get("half") is None
    assert len([line for line in path.read_text(errors="replace").splitlines() if '"lowering": "fast"' in line]) == 2


def test_a_file_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    with autotuning(tmp_path / "cache" / "lowerings.jsonl"), caplog.at_level(logging.WARNING, "shoal.fuse"):
        assert last(Lowerings(slow=8, fast=1)) == "fast"
        lowerings = Lowerings(slow=8, fast=1)
        assert last(lowerings) == "fast"
        assert lowerings.ran == ["fast"]
        last(Lowerings(slow=2, fast=1), X.float())
    assert len(caplog.records) == 1
    assert "kept in memory only" in caplog.text


def append(path: Path, writer: int) -> None:
    findings = TuningCache(path)
    for number in range(50):
        findings.put(f"{writer} {number}", f"lowering of {writer}", {"lowering": 0.1})


def test_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lowerings.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append, args=(path, writer)) for writer in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    found = TuningCache(path)
    assert all(found.get(f"{w} {n}") == f"lowering of {w}" for w in range(4) for n in range(50))


class Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def trace(run: Callable[[Tensor], Tensor]) -> Tensor:
    return make_fx(run)(X)(X)


def fake(run: Callable[[Tensor], Tensor]) -> Tensor:
    with FakeTensorMode() as mode:
        run(mode.from_tensor(X))
    return X * 2


def watched(run: Callable[[Tensor], Tensor]) -> Tensor:
    with Idle():
        return run(X)


def on_meta(run: Callable[[Tensor], Tensor]) -> Tensor:
    run(X.to("meta"))
    return X * 2


def mapped(run: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.func.vmap(run)(X)


def checkpointed(run: Callable[[Tensor], Tensor]) -> Tensor:
    leaf = X.clone().requires_grad_()
    out = checkpoint(run, leaf, use_reentrant=False)
    out.sum().backward()
    return out.detach()


PLACES = {f.__name__: f for f in (trace, fake, watched, on_meta, mapped, checkpointed)}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_measured_where_that_would_be_seen(place: str) -> None:
    lowerings = Lowerings(slow=2, fast=1)
    result = PLACES[place](lambda x: fastest("double", lowerings, [x]))
    assert torch.equal(result, X * 2)
    assert set(lowerings.ran) == {"slow"}
    assert len(lowerings.ran) <= 2


@pytest.mark.usefixtures("path")
def test_a_trace_uses_what_is_known() -> None:
    lowerings = Lowerings(slow=8, fast=1)
    last(lowerings)
    lowerings.ran.clear()
    trace(lambda x: fastest("double", lowerings, [x]))
    assert lowerings.ran == ["fast"]


@pytest.mark.usefixtures("path")
def test_measuring_is_not_seen() -> None:
    class Seen(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.relu
            return func(*args, **(kwargs or {}))

    def noisy(x: Tensor) -> Tensor:
        torch.rand(3)
        takes(1)  # it is never the fastest, whose draws would be seen
        return torch.relu(x)

    leaf = X.clone().requires_grad_()
    lowerings: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "noisy": noisy}
    torch.manual_seed(5)
    with Seen() as seen:
        fastest("relu", lowerings, [leaf])
    assert seen.count == 1
    torch.manual_seed(5)
    state = torch.get_rng_state()
    fastest("relu", lowerings, [leaf * 1])
    assert torch.equal(state, torch.get_rng_state())
    assert leaf.grad is None


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_gradients_of_any_type_are_raced(dtype: torch.dtype) -> None:
    lowerings = Lowerings(slow=4, fast=1)
    assert last(lowerings, torch.ones(3, 2, dtype=dtype, requires_grad=True)) == "fast"


@pytest.mark.usefixtures("path")
def test_a_lowering_that_is_clearly_beaten_is_tried_a_few_times_only() -> None:
    lowerings = Lowerings(first=1, beaten=60)
    last(lowerings)
    assert lowerings.ran.count("beaten") <= 1 + 2 < lowerings.ran.count("first")


@pytest.mark.thorough
def test_a_race_imports_no_sympy(tmp_path: Path) -> None:
    """Nor is any variable asked for, that there are races."""
    code = (
        "import sys, torch\n"
        "from shoal.fuse.autotune import fastest\n"
        "fastest('name', {'a': torch.neg, 'b': torch.neg}, [torch.ones(2, requires_grad=True)])\n"
        "sys.exit('sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"SHOAL_CACHE": str(tmp_path)})
    assert (tmp_path / "lowerings-2.jsonl").exists()


@pytest.mark.usefixtures("path")
def test_a_lowering_that_fails_is_out_but_not_the_first() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("not for these shapes")

    lowerings = Lowerings(first=2)
    assert torch.equal(fastest("double", {**lowerings, "fails": fails}, [X]), X * 2)
    with pytest.raises(RuntimeError, match="not for these shapes"):
        fastest("fail", {"fails": fails, **lowerings}, [X])


def test_off_takes_the_first_lowering() -> None:
    lowerings = Lowerings(slow=2, fast=1)
    with without_autotuning():
        assert last(lowerings) == "slow"
    assert lowerings.ran == ["slow"]


def test_forced_takes_a_lowering_by_name() -> None:
    lowerings = Lowerings(slow=2, fast=1)
    with forced_lowerings({"double": "fast"}):
        assert last(lowerings) == "fast"
    with forced_lowerings({"double": "another", "other": "fast"}):
        assert last(lowerings) == "slow"
    assert len(lowerings.ran) == 2


@pytest.mark.parametrize(("value", "active"), [("0", False), ("1", True), (None, True)])
def test_the_environment_turns_it_off(
    value: str | None, active: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read where the module begins, which a copy of it does here."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setenv("SHOAL_AUTOTUNE", "to be restored")
    if value is None:
        monkeypatch.delenv("SHOAL_AUTOTUNE")
    else:
        monkeypatch.setenv("SHOAL_AUTOTUNE", value)
    begun_anew = runpy.run_path(str(autotune.__file__))
    begun_anew["fastest"]("name", {"a": torch.neg, "b": torch.neg}, [torch.ones(2)])
    assert (tmp_path / "lowerings-2.jsonl").exists() == active


@pytest.mark.usefixtures("path")
def test_an_array_that_is_tuned_equals_its_members() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, stride=2)),
            *(nn.ConvTranspose2d(4, 3, 3), nn.Flatten(), nn.Linear(75, 8), nn.Tanh(), nn.Linear(8, 2)),
        )

    check(make, torch.randn(4, 3, 16, 16, dtype=torch.float64), members=3, steps=3)


def test_a_tuned_array_keeps_its_findings(path: Path) -> None:
    check(lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3)), torch.randn(2, 4, 8).double(), members=2)
    entries = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert [set(entry["seconds"]) for entry in entries] == [{"one", "loop"}, {"grouped", "bmm", "loop"}]
    assert F.conv1d.__name__ in entries[0]["key"]


class BudgetClock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class LoweringsOfRows(dict[str, Callable[[Tensor], Tensor]]):
    """Lowerings of doubling a tensor: one is the faster for up to 100 rows, one for more.

    Args:
        clock: of the budget; shows more with every run.
        seconds: how much.
    """

    def __init__(self, clock: BudgetClock, seconds: float) -> None:
        self.ran: list[str] = []
        super().__init__({name: self._lowering(name, clock, seconds) for name in ("few", "many")})

    def _lowering(self, name: str, clock: BudgetClock, seconds: float) -> Callable[[Tensor], Tensor]:
        def lowering(x: Tensor) -> Tensor:
            self.ran.append(name)
            clock.now += seconds
            takes(0.5 if (name == "few") == (len(x) <= 100) else 3)
            return x * 2

        return lowering

    def last(self, x: Tensor) -> str:
        """The lowering that is taken in the end."""
        assert torch.equal(fastest("double", self, [x]), x * 2)
        return self.ran[-1]

    def races(self, x: Tensor) -> bool:
        """Whether it was measured first."""
        before = len(self.ran)
        self.last(x)
        return len(self.ran) > before + 1


def rows(count: int) -> Tensor:
    return torch.ones(count, 2)


def test_races_take_an_allowance_and_then_a_share_of_the_time(tmp_path: Path) -> None:
    clock = BudgetClock()
    lowerings = LoweringsOfRows(clock, 0.3)
    with autotuning(tmp_path / "lowerings.jsonl", TuningBudget(clock)):
        measured = [lowerings.races(rows(2**count)) for count in range(20)]
        assert 1 < sum(measured) < 15
        assert measured == sorted(measured, reverse=True)
        assert lowerings.races(rows(2**20).double()), "nothing is known of the like"
        clock.now += 1000
        assert lowerings.races(rows(2**21))
        assert not lowerings.races(rows(2**19)), "what was taken over stays"


def test_a_new_shape_runs_by_the_lowering_of_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "lowerings.jsonl"
    clock = BudgetClock()
    lowerings = LoweringsOfRows(clock, 0.0)
    with autotuning(path, TuningBudget(clock)):
        assert lowerings.last(rows(4)) == "few"
        assert lowerings.last(rows(1000)) == "many"
        assert LoweringsOfRows(clock, 10.0).races(rows(1000).double())  # takes more than there is
        written = path.read_text()
        nearest = {1: "few", 40: "few", 90: "many", 5000: "many"}  # 4 and 1000 are equally far from 63
        assert {count: lowerings.last(rows(count)) for count in nearest} == nearest
        assert path.read_text() == written


def test_a_lowering_that_is_not_offered_is_not_taken_over(tmp_path: Path) -> None:
    clock = BudgetClock()
    with autotuning(tmp_path / "lowerings.jsonl", TuningBudget(clock)):
        assert LoweringsOfRows(clock, 10.0).last(rows(4)) == "few"
        others = LoweringsOfRows(clock, 10.0)
        others["other"] = others.pop("few")
        assert others.races(rows(5))


def test_what_is_read_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lowerings.jsonl"
    clock = BudgetClock()
    with autotuning(path, TuningBudget(clock)):
        LoweringsOfRows(clock, 0.1).last(rows(4))
    with autotuning(path, TuningBudget(clock)):
        lowerings = LoweringsOfRows(clock, 10.0)
        assert not lowerings.races(rows(4))
        assert not lowerings.races(rows(5)), "nearly the same size"
        assert lowerings.races(rows(8))
        assert not lowerings.races(rows(16))


@pytest.mark.parametrize(("spent", "passed", "left"), [(0, 0, True), (19, 0, True), (30, 0, False), (30, 201, True)])
def test_budget(spent: float, passed: float, left: bool) -> None:
    clock = BudgetClock()
    budget = TuningBudget(clock)
    assert budget.left()
    with budget.charged():
        clock.now += spent
    clock.now += passed
    assert budget.left() == left
