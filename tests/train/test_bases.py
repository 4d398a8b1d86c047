"""A base model is built once in a process; models on it use its memory, and train as those with a base of their own."""

import os
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.core.array import Member
from shoal.core.errors import ShoalError
from shoal.core.trial import Trial
from shoal.fuse.frozen import is_lent
from shoal.task import Task
from shoal.train.bases import Bases, bases_of
from shoal.train.checkpoint import CheckpointWriter, load_newest
from shoal.train.data.datasets import DataSets
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.trial_runtime import TrialRuntime, build

CPU = torch.device("cpu")
WIDTH, OUTPUTS = 16, 3


class Body(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(depth)))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, OUTPUTS, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x).tanh()))


class Tuned(nn.Module):
    """A body with a low-rank addition to each layer, and a head of its own."""

    def __init__(self, body: Body, rank: int) -> None:
        super().__init__()
        self.body = body
        body.head = nn.Linear(WIDTH, OUTPUTS, dtype=torch.float64)
        self.down = nn.Parameter(torch.randn(rank, WIDTH, dtype=torch.float64) / 4)
        self.up = nn.Parameter(torch.zeros(WIDTH, rank, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x + F.linear(F.linear(x, self.down), self.up))


class Owned(Task):
    """Builds the base for each model."""

    calls: Counter[str]

    def data(self, config: Any) -> Any:
        x = torch.randn(40, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        y = x[:, :OUTPUTS].argmax(1)
        return TensorDataset(x[:32], y[:32]), TensorDataset(x[32:], y[32:])

    def body(self, config: Any) -> Body:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Body(config.get("depth", 2)).requires_grad_(False)

    def model(self, config: Any, *base: Any) -> nn.Module:
        return Tuned(self.body(config), config.get("rank", 2))

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=config["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)


class Lent(Owned):
    """Builds it once, and appends the process to a file."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    def base(self, config: Any) -> Body:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return Body(config.get("depth", 2))

    def model(self, config: Any, *base: Any) -> nn.Module:
        assert isinstance(base[0], Body)
        return Tuned(base[0], config.get("rank", 2))


SPACE = {"lr": shoal.loguniform(1e-3, 1e-1), "rank": shoal.choice([2, 3]), "batch_size": 8}


def searched(task: Task, directory: Path, trials: int = 6, **options: Any) -> shoal.Study:
    return shoal.tune(
        task, SPACE, metric="valid_loss", mode="min", algorithm=shoal.Random(trials, epochs=2), directory=directory,
        **{"backend": "inline", "devices": "cpu:1", **options},
    )  # fmt: skip


def losses(study: shoal.Study) -> dict[int, float]:
    return {trial.number: trial.metrics["valid_loss"] for trial in study.trials}


def member(number: int, **config: Any) -> Member:
    return Member(Trial(number, {"lr": 0.01, "batch_size": 8, **config}, seed=number, data_seed=0), 0, 2)


def test_trials_on_a_base_equal_those_with_their_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lent, owned = searched(Lent(log), tmp_path / "lent"), searched(Owned(), tmp_path / "owned")
    assert losses(lent) == pytest.approx(losses(owned), rel=1e-9)
    assert log.read_text().split() == [str(os.getpid())]


def test_each_process_builds_a_base_once_in_32_trials(tmp_path: Path) -> None:
    log = tmp_path / "log"
    study = shoal.tune(
        Lent(log), SPACE, metric="valid_loss", mode="min", directory=tmp_path / "study", devices="cpu:1",
        algorithm=shoal.SuccessiveHalving(n=32, min_epochs=1, max_epochs=4, eta=4),
    )  # fmt: skip
    assert len(study.trials) == 32
    builds = Counter(log.read_text().split())
    assert set(builds.values()) == {1}


def test_models_use_the_memory_of_the_base() -> None:
    task = Lent()
    one, two = (build(task, member(number), CPU).model for number in (0, 1))
    assert one.get_parameter("body.layers.0.weight").data_ptr() == two.get_parameter("body.layers.0.weight").data_ptr()
    assert is_lent(one.get_parameter("body.layers.0.weight"))
    assert one.get_buffer("body.norm.running_mean").data_ptr() != two.get_buffer("body.norm.running_mean").data_ptr()


def test_the_best_model_has_a_base_of_its_own(tmp_path: Path) -> None:
    study = searched(Lent(), tmp_path, trials=2)
    best, other = study.best_model(), study.best_model()
    with torch.no_grad():
        best.get_parameter("body.layers.0.weight").zero_()
    found = Lent().loss(other, Lent().data({})[1].tensors)
    assert study.best_trial.ranked["valid_loss"] == pytest.approx(found.item(), rel=1e-9)


def saved(task: Task, directory: Path) -> TrialRuntime:
    """Return a trial that was trained for a step and saved."""
    runtime = build(task, member(0), CPU)
    x, y = task.data({})[0][:8]
    task.step(runtime.model, (x, y), runtime.optimizer)
    runtime.step = 1
    with closing(CheckpointWriter(directory)) as writer:
        runtime.save(writer)
        writer.flush()
    return runtime


def test_a_checkpoint_does_not_hold_the_base_and_is_restored_without(tmp_path: Path) -> None:
    trained = saved(Lent(), tmp_path).model.state_dict()
    state = load_newest(tmp_path, 0)
    assert state is not None
    assert trained.keys() - state.model.keys() == {
        f"body.layers.{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")
    } | {"body.norm.weight", "body.norm.bias"}
    runtime = build(Lent(), member(0), CPU)
    base = runtime.model.get_parameter("body.layers.0.weight")
    version = base._version
    runtime.restore(tmp_path, steps_of=lambda epoch: 4)
    assert runtime.step == 1
    assert base._version == version
    for name, tensor in runtime.model.state_dict().items():
        assert torch.equal(tensor, trained[name]), name


def test_a_checkpoint_of_another_model_is_refused_in_words(tmp_path: Path) -> None:
    class Renamed(Lent):
        def model(self, config: Any, *base: Any) -> nn.Module:
            model = super().model(config, *base)
            model.extra = nn.Parameter(torch.zeros(2))
            return model

    saved(Lent(), tmp_path)
    with pytest.raises(ShoalError, match="only one of model and checkpoint has extra"):
        build(Renamed(), member(0), CPU).restore(tmp_path, steps_of=lambda epoch: 4)


def test_a_base_is_kept_while_it_is_used(tmp_path: Path) -> None:
    task = Lent(tmp_path / "log")

    def builds() -> int:
        return len((tmp_path / "log").read_text().split())

    bases = Bases(task, CPU)
    deep = bases.model({"depth": 3, "lr": 0.1})
    for depth in (1, 2, 2, 3, 3):
        assert len(bases.model({"depth": depth, "lr": 0.1}).body.layers) == depth
    assert builds() == 3, "that of depth 3 was in use"
    for depth in (1, 2):
        bases.key({"depth": depth})
        assert bases.model({"depth": depth, "lr": 0.1}, meta=True).body.head.weight.is_meta is False
    assert builds() == 3, "models on the meta device need no values"
    bases.model({"depth": 1, "lr": 0.1})
    assert builds() == 4, "that of depth 1 was dropped when the one of depth 2 was built"
    del deep
    assert bases_of(task, CPU) is bases_of(task, CPU)


def test_trials_of_different_bases_form_no_array() -> None:
    task = Lent()
    builder = SignatureBuilder(task, DataSets(task, CPU))
    keys = [builder.key(member(n, **config).trial) for n, config in enumerate(({}, {"depth": 2}, {"depth": 2}))]
    assert keys[0].structure != keys[1].structure
    assert keys[1] == keys[2]
    one, other = (builder.key(member(n, rank=n).trial) for n in (2, 3))
    assert one.family == other.family


class Greedy(Lent):
    def base(self, config: Any) -> Body:
        return super().base({**config})


@pytest.mark.parametrize(("kind", "noted"), [(Greedy, True), (Lent, False)])
def test_a_base_that_reads_the_whole_config_is_noted(kind: type[Lent], noted: bool) -> None:
    task = kind()
    trials = [member(n, rank=n).trial for n in (2, 3)]
    keys, _, note = SignatureBuilder(task, DataSets(task, CPU)).find_keys(trials)
    assert ("`base` reads all of the config" in note) is noted
    assert ("read only the names that it needs" in note) is noted
    assert len({key.family for key in keys.values()}) == 1 + noted


def write(model: Any) -> None:
    model.body.layers[0].weight.data.mul_(2)


def write_row(model: Any) -> None:
    with torch.no_grad():
        model.body.layers[1].weight[0, 1:].add_(1)


def unfreeze(model: Any) -> None:
    model.body.layers[1].bias.requires_grad_(True)


@pytest.mark.parametrize(("change", "name"), [(write, "layers.0.weight"), (write_row, "layers.1.weight")])
def test_a_model_that_writes_to_the_base_is_refused(change: Any, name: str) -> None:
    class Changing(Lent):
        def model(self, config: Any, *base: Any) -> nn.Module:
            model = super().model(config, *base)
            if config.get("change"):
                change(model)
            return model

    task = Changing()
    kept = build(task, member(0), CPU).model
    before = kept.get_parameter("body.layers.0.weight").clone()
    with pytest.raises(ShoalError, match=f"`model` writes to '{name}' of the task's `base`"):
        build(task, member(1, change=True), CPU)
    assert torch.equal(kept.get_parameter("body.layers.0.weight"), before)


def test_what_a_model_unfreezes_is_its_own(tmp_path: Path) -> None:
    class Unfreezing:
        def model(self, config: Any, *base: Any) -> nn.Module:
            model = super().model(config, *base)  # type: ignore[misc]
            unfreeze(model)
            return model  # type: ignore[no-any-return]

    lent, owned = (type("Both", (Unfreezing, kind), {})() for kind in (Lent, Owned))
    found = losses(searched(lent, tmp_path / "lent", trials=3))
    assert found == pytest.approx(losses(searched(owned, tmp_path / "owned", trials=3)), rel=1e-9)


class InStep(Lent):
    def step(self, model: Any, batch: Any, optimizer: Any, *config: Any, **_: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        with torch.no_grad():
            model.body.layers[0].weight.mul_(0.9)
        return loss


class InMetrics(Lent):
    def metrics(self, model: Any, batch: Any) -> Any:
        model.body.layers[0].weight.data.mul_(0.9)
        return {}


class Later(Lent):
    """Writes to it in the second epoch, and asks for a number, so that it trains in plain PyTorch."""

    def step(self, model: Any, batch: Any, optimizer: Any, *config: Any, **_: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        model.calls = getattr(model, "calls", 0) + int(loss.item() > 0)
        if model.calls > 6:
            with torch.no_grad():
                model.body.layers[0].weight.mul_(0.9)
        return loss


class InEndEpoch(Lent):
    def end_epoch(self, model: Any, config: Any) -> None:
        model.body.layers[0].weight.data.mul_(0.9)


@pytest.mark.parametrize(("kind", "what"), [
    (InStep, "a step or a validation"),
    (InMetrics, "a step or a validation"),
    (Later, "a step or a validation"),
    (InEndEpoch, "`end_epoch`"),
])  # fmt: skip
def test_training_that_writes_to_the_base_fails(kind: type[Lent], what: str, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=f"{what} writes to 'body.layers.0.weight' of the task's `base`"):
        searched(kind(), tmp_path, trials=2)


def test_weights_on_another_base_are_refused(tmp_path: Path) -> None:
    class Read(Lent):
        def base(self, config: Any) -> Body:
            torch.manual_seed(int((tmp_path / "seed").read_text()))
            return Body()

    (tmp_path / "seed").write_text("1")
    study = searched(Read(), tmp_path / "study", trials=1)
    study.best_model()
    (tmp_path / "seed").write_text("2")
    with pytest.raises(ShoalError, match="trial 0 was trained on another base than the task's `base` returns now"):
        study.best_model()


def test_a_base_that_is_no_module_is_refused() -> None:
    class Wrong(Lent):
        def base(self, config: Any) -> Any:
            return "llama"

    with pytest.raises(ShoalError, match=r"`base` must return a torch\.nn\.Module or None, got 'llama'"):
        build(Wrong(), member(0), CPU)


def test_a_model_without_an_argument_for_the_base_is_refused() -> None:
    class Without(Lent):
        def model(self, config: Any) -> nn.Module:  # type: ignore[override]
            return Body()

    with pytest.raises(ShoalError, match=r"`base` returns a model, so its `model` must be model\(self, config, base\)"):
        build(Without(), member(0), CPU)


def test_building_a_base_draws_from_no_generator_of_a_trial() -> None:
    with_base, own = build(Lent(), member(5), CPU).model, build(Owned(), member(5), CPU).model
    for (name, a), (_, b) in zip(with_base.named_parameters(), own.named_parameters(), strict=True):
        assert torch.equal(a, b), name
