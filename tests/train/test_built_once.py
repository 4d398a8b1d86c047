"""A trial is built once in a process: a profile takes steps of copies, and training jobs take what it has built."""

import gc
import logging
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract_samples import CPU, SIZE, Small, search
from torch import Tensor, nn

import shoal
from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.event import MemoryMeasured, Reported
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.fuse.step import TrainingStep
from shoal.journal.view import JournalView
from shoal.plan.cost.cost import MIN_WORK_TO_MEASURE, Cost
from shoal.train import profile
from shoal.train.checkpoint import Checkpoint, load_newest
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.memory import MemoryMeter
from shoal.train.profile import FREE_SECONDS, PREVIEW_SECONDS, measure
from shoal.train.run import Trainer, _free_seconds
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

KEY = FusionKey("net", "data", SIZE)


class Counted(Small):
    """Counts the models that it builds, on itself, but for those of signatures, which have no values."""

    def __init__(self) -> None:
        self.counts = [0]

    @property
    def builds(self) -> int:
        return self.counts[0]

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        self.counts[0] += not next(model.parameters()).is_meta
        return model


class Noisy(nn.Module):
    """Has a generator of its own, a buffer that counts, and an attribute that its first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2)).double()
        self.generator = torch.Generator().manual_seed(int(torch.randint(0, 1000, ())))
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.shift = torch.rand((), generator=self.generator, dtype=torch.float64)
        if self.training:
            self.steps += 1
            x = x + 0.01 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return self.net(x) + self.shift


class Own(Counted):
    """A model with state of many kinds, and an optimizer with two tensors of state."""

    def model(self, config: Any) -> nn.Module:
        super().model(config)
        return Noisy()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Follows(nn.Module):
    """Has a frozen part that follows the trained one by writes to `.data`, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = nn.Linear(3, 2).double(), nn.Linear(3, 2).double().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.target.weight.data.lerp_(self.net.weight.data, 0.1)
        out: Tensor = self.net(x) + self.target(x)
        return out


class Momentum(Counted):
    def model(self, config: Any) -> nn.Module:
        super().model(config)
        return Follows()


class Keyed(Counted):
    """Keeps a factor of each model by the model's `id`, so that a copy has none."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[int, float] = {}

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        self.factors[id(model)] = 1.0 + config["lr"]
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * self.factors[id(model)]


class Uncopyable(Counted):
    """Its model refuses to be copied."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.handle = Handle()  # type: ignore[assignment]
        return model


class Handle:
    """What only one model can have."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a handle is not copied")


class Remembering(Counted):
    """Changes the model that it has returned last, whichever one takes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[Any] = [None]

    def model(self, config: Any) -> nn.Module:
        self.last[0] = super().model(config)
        return self.last[0]  # type: ignore[no-any-return]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            self.last[0][0].bias.mul_(0.5)
        return super().loss(model, batch)


class Hooked(Counted):
    """Scales outputs by a number that a hook counts in a variable that it closes over."""

    def model(self, config: Any) -> nn.Module:
        model, calls = super().model(config), 0

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            nonlocal calls
            calls += module.training
            return output * (1 + 0.01 * calls)

        model.register_forward_hook(hook)
        return model


class Patched(Counted):
    """Draws in a `forward` of its own from a generator that this closes over."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        forward, generator = model.forward, torch.Generator().manual_seed(1)
        model.forward = lambda x: forward(x) * torch.rand((), generator=generator)  # type: ignore[method-assign]
        return model


class HookedStep(Counted):
    """Changes the learning rate by a number that a hook of the optimizer counts on itself."""

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        optimizer = super().optimizer(model, config)

        def hook(one: Any, arguments: Any, named: Any) -> None:
            hook.steps += 1  # type: ignore[attr-defined]
            one.param_groups[0]["lr"] = config["lr"] / hook.steps  # type: ignore[attr-defined]

        hook.steps = 0  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(hook)
        return optimizer


class Heavy(Counted):
    """Its weights are most of what a step needs."""

    def model(self, config: Any) -> nn.Module:
        super().model(config)
        return nn.Sequential(nn.Linear(3, 512), nn.Linear(512, 512), nn.Linear(512, 2)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as on a device of which no share of time is known, as on a GPU."""
    monkeypatch.setattr(profile, "MEASURING_SHARE", {})
    monkeypatch.setattr(profile, "FIRST_SIZE", {})


def members(count: int, target: int = 2) -> tuple[Member, ...]:
    trials = [Trial(b, {"lr": 0.01 * (b + 1)}, seed=b, data_seed=0) for b in range(count)]
    return tuple(Member(trial, 0, target) for trial in trials)


def state_of(task: Counted, directory: Path) -> WorkerState:
    directory.mkdir(parents=True, exist_ok=True)
    return WorkerState(task, DataSets(task, CPU), TrialCache(), CPU, directory)


def measured(state: WorkerState, count: int, free_seconds: float = inf, **fields: Any) -> Profile:
    found = measure(state, Array(KEY, members(count), **fields), 10**10, free_seconds)
    state.outside.restore_first()
    return found


def train(state: WorkerState, count: int) -> dict[int, Checkpoint]:
    """Train trials in one array; return their last checkpoints."""
    job = Job("job", (Array(KEY, members(count)),))
    builder = SignatureBuilder(state.task, state.sets)
    control, context = JobControl(prompt=True), WorkerContext(state.directory, b"")
    reports = [one for event in Trainer(job, state, builder, control, context).run() if isinstance(event, Reported)
               for one in event.reports]  # fmt: skip
    assert {report.trial for report in reports} == set(range(count))
    return {number: load_newest(state.directory, number) for number in range(count)}  # type: ignore[misc]


def assert_equal(found: dict[int, Checkpoint], wanted: dict[int, Checkpoint]) -> None:
    for number, want in wanted.items():
        got = found[number]
        assert (got.epoch, got.step, got.lost) == (want.epoch, want.step, want.lost)
        for mine, other in ((got.model, want.model), (got.optimizer, want.optimizer), (got.scheduler, want.scheduler)):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)
        wanted_metrics = [pytest.approx(dict(report.metrics), rel=1e-9) for report in want.reports]
        assert [dict(report.metrics) for report in got.reports] == wanted_metrics


@pytest.mark.parametrize("waiting", [8, pytest.param(32, marks=pytest.mark.thorough)])
def test_a_profile_and_the_training_after_it_build_each_trial_once(waiting: int, tmp_path: Path) -> None:
    state = state_of(task := Counted(), tmp_path)
    assert max(measured(state, waiting).step_seconds) >= 8
    train(state, waiting)
    assert task.builds == waiting


def test_what_is_not_measured_is_not_built(tmp_path: Path) -> None:
    state = state_of(task := Counted(), tmp_path)
    assert measured(state, 8, free_seconds=0.0, expected_epochs=1).step_seconds.keys() == {1}
    assert task.builds == 1


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("trials", [1, 5])
@pytest.mark.parametrize("kind", [Counted, Own, Uncopyable, Remembering, Hooked, Patched, HookedStep])
def test_a_trial_of_a_profile_learns_what_one_built_to_train_learns(
    kind: type[Counted], trials: int, tmp_path: Path
) -> None:
    wanted = train(state_of(kind(), tmp_path / "wanted"), trials)
    state = state_of(kind(), tmp_path / "found")
    assert measured(state, trials).step_seconds.keys() == {size for size in (1, 4, 5) if size <= trials}
    assert_equal(train(state, trials), wanted)


def test_a_build_is_not_kept_if_a_copy_has_written_to_its_large_frozen_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.fuse.frozen.MIN_SHARED_BYTES", 1)
    wanted = train(state_of(Momentum(), tmp_path / "wanted"), 1)
    state = state_of(Momentum(), tmp_path / "found")
    measured(state, 1)
    assert_equal(train(state, 1), wanted)


def test_trials_take_the_steps_of_a_profile_themselves_where_copies_cannot(tmp_path: Path) -> None:
    state, refusals = state_of(Keyed(), tmp_path), list[str]()
    found = measure(state, Array(KEY, members(5)), 10**10, inf, refusals.append)
    assert found.step_seconds.keys() == {1, 4, 5}
    assert [reason[:8] for reason in refusals] == ["KeyError"], "together, as by an array in training"
    assert not any(state.built.take(member) for member in members(5))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(
    ("kind", "kept"),
    [(Own, 5), (Uncopyable, 0), (Remembering, 0), (Hooked, 0), (Patched, 0), (HookedStep, 0)],
)
def test_only_trials_that_nothing_has_changed_are_kept(
    kind: type[Counted], kept: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(kind(), tmp_path)
    with caplog.at_level(logging.INFO, "shoal.train"):
        measured(state, 5)
    assert sum(state.built.take(member) is not None for member in members(5)) == kept
    assert ("a handle is not copied" in caplog.text) == (kind is Uncopyable)


def test_a_trial_is_taken_once_and_only_with_its_config(tmp_path: Path) -> None:
    state = state_of(Counted(), tmp_path)
    measured(state, 5)
    first, second, *_ = members(5, target=7)
    taken = state.built.take(first)
    assert taken is not None
    assert taken.member.target == 7
    assert state.built.take(first) is None
    assert state.built.take(Member(Trial(1, {"lr": 1.0}, seed=1, data_seed=0), 0, 2)) is None
    assert state.built.take(second) is None, "the trial has another config by now"


def test_the_oldest_are_dropped_beyond_the_limit_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_of(Counted(), tmp_path)
    measured(state, 5)
    monkeypatch.setattr("shoal.train.worker_state.CPU_CACHE_BYTES", 2 * state.built.bytes // 5)
    state = state_of(Counted(), tmp_path)
    measured(state, 5)
    assert [state.built.take(member) is not None for member in members(5)] == [False] * 3 + [True] * 2


@pytest.mark.parametrize("stops", [False, True])
def test_those_that_train_elsewhere_are_not_counted_and_not_kept(
    stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(Counted(), tmp_path)
    measured(state, 5)
    each = state.built.bytes // 5
    assert each > 0
    monkeypatch.setattr("shoal.train.memory.own_memory", lambda: 10**9)
    control = JobControl()
    job, context = Job("job", (Array(KEY, members(2)),)), WorkerContext(state.directory, b"")
    peaks = []
    for event in Trainer(job, state, SignatureBuilder(state.task, state.sets), control, context).run():
        if isinstance(event, MemoryMeasured):
            peaks.append(event.memory)
            if stops:
                control.stop()
    assert peaks == [10**9 - 3 * each]
    assert state.built.bytes == 0
    assert not any(state.built.take(member) for member in members(5))


class Clock:
    """A clock that only builds advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(
            profile, "time", SimpleNamespace(perf_counter=lambda: self.now, process_time=lambda: self.now / 2)
        )
        monkeypatch.setattr(profile, "_step_seconds", self.step)

    def step(self, stepper: Any, batches: Any, tick: int) -> float:
        stepper.train_step(batches, [tick] * len(batches))
        self.now += 0.001
        return 0.001


@pytest.mark.parametrize(
    ("build_seconds", "sizes", "builds"),
    [(0.0, {1, 4, 5}, 5), (0.2, {1, 4}, 4), (2.0, {1}, 2)],
    ids=["at once", "two more of four are worth it", "no more"],
)
def test_building_counts_as_a_cost_of_measuring(
    build_seconds: float, sizes: set[int], builds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of four members cost 0.12 s, of five 0.15 s; there is 0.6 s."""
    clock = Clock(monkeypatch)

    class Slow(Counted):
        def model(self, config: Any) -> nn.Module:
            clock.now += build_seconds
            return super().model(config)

    state = state_of(task := Slow(), tmp_path)
    assert measured(state, 5, free_seconds=0.6, expected_epochs=1).step_seconds.keys() == sizes
    assert task.builds == builds, "the first build may load code, so a second one says what a build takes"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("work", "sizes"), [(0.9 * MIN_WORK_TO_MEASURE, {1}), (1.1 * MIN_WORK_TO_MEASURE, {1, 4, 16, 32})]
)
def test_on_a_gpu_little_work_begins_at_once_with_all_that_wait(
    work: float, sizes: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    state = state_of(task := Counted(), tmp_path)
    found = measured(state, 32, free_seconds=0.0, expected_epochs=work / 0.001 / 3)
    assert found.epoch_steps == 3
    assert found.step_seconds.keys() == sizes
    assert task.builds == (1 if sizes == {1} else 32)
    assert Cost(found).best_size(32) == 32
    assert (found.expected_epochs is None) == (sizes != {1})


def test_a_profile_neither_captures_nor_compiles_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each size would otherwise record a graph that no training uses."""
    asked: list[tuple[str, bool]] = []
    prepare = TrainingStep._prepare

    def noted(step: TrainingStep, mode: Any, batch: Any) -> bool:
        asked.append((mode, prepare(step, mode, batch)))
        return asked[-1][1]

    monkeypatch.setattr(TrainingStep, "_prepare", noted)
    assert measured(state_of(Counted(), tmp_path), 8).fused_gain, "both modes of uncaptured steps were timed"
    assert not [mode for mode, prepared in asked if mode == "captured" or prepared]


@pytest.mark.parametrize(
    ("device", "trains", "seconds"),
    [("cpu", True, FREE_SECONDS), ("cpu", False, FREE_SECONDS), ("cuda", True, 0.0), ("cuda", False, PREVIEW_SECONDS)],
)
def test_a_gpu_has_free_seconds_only_in_a_study_that_does_not_train(device: str, trains: bool, seconds: float) -> None:
    assert _free_seconds(torch.device(device), trains) == seconds


def live_bytes() -> int:
    """Return the bytes of all live tensors."""
    gc.collect()
    plain = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    memories = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain}
    return sum(memories.values())


@pytest.fixture
def counted_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a process used no memory but that of its live tensors, which a step has most of when it ends."""
    gc.collect()
    gc.freeze()

    def during(meter: MemoryMeter, step: Any) -> tuple[Any, int]:
        before = live_bytes()
        return step(), live_bytes() - before

    monkeypatch.setattr(MemoryMeter, "used", lambda meter: live_bytes())
    monkeypatch.setattr(MemoryMeter, "during", during)
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("counted_memory")
@pytest.mark.parametrize("waiting", [1, 8, pytest.param(16, marks=pytest.mark.thorough)])
def test_the_memory_of_a_member_is_that_of_an_array_in_training(waiting: int, tmp_path: Path) -> None:
    """Members of other sizes and trials that are only kept are alive in a profile, and do not count."""
    task = Heavy()
    state = state_of(task, tmp_path)
    state.sets.of(members(1)[0].trial.config)
    before = live_bytes()
    found = measured(state, waiting)
    assert abs(found.base_memory - before) < 0.1 * found.member_memory
    state = state_of(task, tmp_path / "training")
    state.sets.of(members(1)[0].trial.config)
    before = live_bytes()
    peak = [0]

    class Watching(JobControl):
        def beat(self, settled: bool = True) -> None:
            peak[0] = max(peak[0], live_bytes())

    job = Job("job", (Array(KEY, members(waiting)),))
    builder = SignatureBuilder(state.task, state.sets)
    task.exact = False  # type: ignore[misc]  # plain copies for comparison are memory of their own
    for _ in Trainer(job, state, builder, Watching(prompt=True), WorkerContext(tmp_path / "training", b"")).run():
        pass
    member = (peak[0] - before) / waiting
    assert member / 1.3 < found.member_memory < 1.3 * member


@pytest.mark.usefixtures("counted_memory")
def test_what_the_first_step_of_a_process_leaves_is_memory_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the workspaces of cuBLAS, which the first array has and later ones use."""
    held: list[Tensor] = []
    take = profile._step_seconds

    def first_with_workspace(stepper: Any, batches: Any, tick: int) -> float:
        if not held:
            held.append(torch.empty(10**8, dtype=torch.uint8))
        return take(stepper, batches, tick)

    plain = measured(state_of(Heavy(), tmp_path), 8)
    monkeypatch.setattr(profile, "_step_seconds", first_with_workspace)
    found = measured(state_of(Heavy(), tmp_path), 8)
    assert found.base_memory - plain.base_memory == pytest.approx(10**8, rel=0.1)
    assert found.member_memory == pytest.approx(plain.member_memory, rel=0.1)


class Based(Heavy):
    """Trains a head on a large frozen base."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        nn.init.eye_(model[1].requires_grad_(False).weight)
        nn.init.zeros_(model[1].bias)
        return model


class BasedOwnStep(Based):
    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        return super().step(model, batch, optimizer)


class Unfreezing(Based):
    """Trains the base, too, from the second step of a model on."""

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        model[1].requires_grad_(True)
        return loss


class Writing(Based):
    """Writes to the base in each step."""

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        with torch.no_grad():
            model[1].weight.mul_(0.5)
        return super().step(model, batch, optimizer)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize(("kind", "kept"), [(Based, 5), (BasedOwnStep, 5), (Unfreezing, 0), (Writing, 0)])
def test_a_base_that_copies_share_is_trained_as_one_of_the_trial_alone(
    kind: type[Based], kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.fuse.frozen.MIN_SHARED_BYTES", 8 * 512 * 512)
    wanted = train(state_of(kind(), tmp_path / "wanted"), 5)
    state = state_of(kind(), tmp_path / "found")
    measured(state, 5)
    assert len(state.built._built) == kept
    assert_equal(train(state, 5), wanted)


@pytest.mark.usefixtures("counted_memory")
def test_a_large_frozen_base_is_memory_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = 8 * 512 * 513
    monkeypatch.setattr("shoal.fuse.frozen.MIN_SHARED_BYTES", base)
    state = state_of(task := Based(), tmp_path)
    state.sets.of(members(1)[0].trial.config)
    before = live_bytes()
    found = measured(state, 8)
    head = 8 * (512 * 4 + 512 * 2 + 2)
    assert base <= found.base_memory - before < 1.1 * base
    assert 4 * head <= found.member_memory < 6 * head
    assert state.built.bytes < 0.1 * base
    train(state, 8)
    assert task.builds == 8


@pytest.mark.usefixtures("on_a_gpu")
def test_a_short_search_on_a_gpu_trains_all_configurations_in_one_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.train.run._free_seconds", lambda device, trains: 0.0)
    study = search(Counted(), {"lr": shoal.loguniform(1e-3, 1e-1)}, tmp_path / "study",
                   algorithm=shoal.Random(32, epochs=2), devices="cpu:1")  # fmt: skip
    with JournalView.read(study.directory) as journal:
        jobs = [(job.purpose, len(job.trials)) for job in journal.jobs()]
    assert jobs == [(Purpose.SIGNATURE, 32), (Purpose.PROFILE, 16), (Purpose.TRAIN, 32)]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("backend", ["inline", "local"])
@pytest.mark.parametrize(
    ("algorithm", "trials"),
    [(shoal.Random(8, epochs=2), 8), (shoal.SuccessiveHalving(n=9, max_epochs=4, eta=2), 9)],
    ids=["random", "halving"],
)
def test_a_search_builds_each_trial_once(backend: str, algorithm: Any, trials: int, tmp_path: Path) -> None:
    class Listed(Small):
        def model(self, config: Any) -> nn.Module:
            model = super().model(config)
            if not next(model.parameters()).is_meta:
                with (tmp_path / "builds").open("a") as file:
                    file.write(".")
            return model

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return F.mse_loss(model(batch[0]), batch[1])

    search(Listed(), {"lr": shoal.loguniform(1e-3, 1e-1)}, tmp_path / "study", algorithm=algorithm,
           backend=backend, devices="cpu:1")  # fmt: skip
    assert len((tmp_path / "builds").read_text()) == trials
