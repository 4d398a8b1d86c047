"""Classes of other libraries in a task: trained as in plain PyTorch, fused or refused in words; none is a failure."""

import collections
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_samples import CPU, SIZE, Small, X, Y, save, search, trial, work
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import shoal
from shoal.core.array import Member
from shoal.core.errors import TaskError
from shoal.core.trial import Trial
from shoal.train import fused_stepper
from shoal.train.checkpoint import load_newest
from shoal.train.make_stepper import make_stepper
from shoal.train.stepper import PlainStepper
from shoal.train.trial_runtime import build

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")

EPOCHS = 2


class Lookahead(Optimizer):
    """Wraps an optimizer without `Optimizer.__init__`, so that it lacks what torch adds to one."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.count = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, collections.defaultdict(dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        for parameter in self.param_groups[0]["params"] if self.count % 3 == 0 else ():
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))


class Bare:
    """What a plain loop calls, and nothing else."""

    __slots__ = ("base",)

    def __init__(self, base: Optimizer) -> None:
        self.base = base

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    def zero_grad(self) -> None:
        self.base.zero_grad()

    def step(self) -> None:
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


class Accumulating(Bare):
    """Steps every other time, and keeps the gradients until then."""

    __slots__ = ("count",)

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        self.count = 0

    def zero_grad(self) -> None:
        if self.count % 2 == 0:
            super().zero_grad()

    def step(self) -> None:
        self.count += 1
        if self.count % 2 == 0:
            super().step()


class Modal(SGD):
    """Holds twice the weights in training, as a schedule-free optimizer holds others than those to validate."""

    def train(self) -> None:
        self._scale("evaluating", 2.0)

    def eval(self) -> None:
        self._scale("training", 0.5)

    @torch.no_grad()
    def _scale(self, when: str, factor: float) -> None:
        for group in self.param_groups:
            if group.setdefault("mode", "evaluating") == when:
                group["mode"] = "training" if when == "evaluating" else "evaluating"
                for parameter in group["params"]:
                    parameter.mul_(factor)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert all(group["mode"] == "training" for group in self.param_groups)
        super().step()


class Shaped(nn.Module):
    """A product with a matrix that is kept in some way."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        if isinstance(matrix, nn.Parameter):
            self.matrix = matrix
        else:
            self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        dense = self.matrix.to_dense() if self.matrix.layout is not torch.strided else self.matrix
        return self.layer(x @ dense.double() / 4)


class Packed(nn.Parameter):
    """A frozen parameter with a class of its own, as that of a base model in 4 bits."""


class SavesMore(Shaped):
    """Writes a name to its state that it does not load."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}matrix.state"] = torch.zeros(1)


class CopiesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def __deepcopy__(self, memo: Any) -> "CopiesItself":
        made = CopiesItself()
        made.load_state_dict(self.state_dict())
        return made


CODE = torch.tensor([[4, 0, 1], [0, 4, 0], [2, 0, 4]])
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "coo": (lambda: Shaped(CODE.double().to_sparse()), "'matrix' is a tensor of layout torch.sparse_coo"),
    "csr": (lambda: Shaped(CODE.double().to_sparse_csr()), "'matrix' is a tensor of layout torch.sparse_csr"),
    "csc": (lambda: Shaped(CODE.double().to_sparse_csc()), "'matrix' is a tensor of layout torch.sparse_csc"),
    "integers": (lambda: Shaped(nn.Parameter(CODE.to(torch.int8), False)), ""),
    "class": (lambda: SavesMore(Packed(CODE.to(torch.uint8), False)), ""),
    "copies": (CopiesItself, "is not copied when the model is"),
}
OPTIMIZERS: dict[str, tuple[Callable[[Any, float], Any], str]] = {
    "lookahead": (lambda params, lr: Lookahead(Adam(params, lr)), "Lookahead, has a `zero_grad` of its own"),
    "bare": (lambda params, lr: Bare(Adam(params, lr)), "must be a list of torch.optim.Optimizer"),
    "accumulating": (lambda params, lr: Accumulating(Adam(params, lr)), "must be a list of torch.optim.Optimizer"),
    "modal": (lambda params, lr: Modal(params, lr), "Modal, has modes"),
}
CASES = {name: (make, None, reason) for name, (make, reason) in MODELS.items()} | {
    name: (None, make, reason) for name, (make, reason) in OPTIMIZERS.items()
}


class Foreign(Small):
    def __init__(self, name: str) -> None:
        self.make_model, self.make_optimizer, self.reason = CASES[name]

    def model(self, config: Any) -> nn.Module:
        return self.make_model() if self.make_model is not None else super().model(config)

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        params = [each for each in model.parameters() if each.requires_grad]
        return SGD(params, config["lr"]) if self.make_optimizer is None else self.make_optimizer(params, config["lr"])


class Stepping(Foreign):
    """Takes its steps itself."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        return super().step(model, batch, optimizer)


def plain_loss(task: Small, of: Trial, epochs: int = EPOCHS) -> float:
    """Train as a plain loop does; return the validation loss."""
    torch.manual_seed(of.seed)
    model = task.model(of.config)
    optimizer = task.optimizer(model, of.config)
    for epoch in range(epochs):
        if isinstance(optimizer, Modal):
            optimizer.train()
        for rows in shoal.sample_order(of, epoch, len(X)).split(SIZE):
            optimizer.zero_grad()
            task.loss(model, (X[rows], Y[rows])).backward()
            optimizer.step()
        if isinstance(optimizer, Modal):
            optimizer.eval()
    with torch.no_grad():
        return task.loss(model, (X[:6], Y[:6])).item()


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [Foreign, Stepping])
def test_a_search_equals_plain_loops(
    name: str, kind: type[Foreign], fusing_pays: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for fuse in (True, False):
        task = kind(name)
        directory = tmp_path / str(fuse)
        arguments: dict[str, Any] = {"algorithm": shoal.Random(3, epochs=EPOCHS), "devices": "cpu:1", "fuse": fuse}
        study = search(task, {"lr": shoal.loguniform(1e-3, 1e-1)}, directory, **arguments)
        assert [each.state.name for each in study.trials] == ["COMPLETE"] * 3
        assert [each.failures for each in study.trials] == [0] * 3
        for each in study.trials:
            assert each.metrics["valid_loss"] == pytest.approx(plain_loss(kind(name), each), rel=1e-9)
        if fuse and task.reason:
            assert task.reason in caplog.text
        model = study.best_model()
        with torch.no_grad():
            assert task.loss(model, (X[:6], Y[:6])).item() == pytest.approx(study.best_trial.ranked["valid_loss"])


@pytest.mark.parametrize("name", ["coo", "class", "modal"])
def test_a_trial_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    task, first = Foreign(name), trial(0)
    work(task, tmp_path, [Member(first, 0, 1)])
    later = work(task, tmp_path, [Member(first, 1, EPOCHS)])  # in a new cache, so from the file
    assert later[-1].metrics["valid_loss"] == pytest.approx(plain_loss(task, first), rel=1e-9)


class SparseSamples(Small):
    def data(self, config: Any) -> Any:
        samples = [(x.to_sparse(), y) for x, y in zip(X, Y, strict=True)]
        return samples, samples[:6]

    def collate(self, samples: list[Any]) -> Any:
        return [torch.stack([x for x, _ in samples]).to_dense(), torch.stack([y for _, y in samples])]


def test_sparse_samples(tmp_path: Path) -> None:
    members = [Member(trial(number), 0, EPOCHS) for number in range(2)]
    for found, expected in zip(
        work(SparseSamples(), tmp_path / "sparse", members), work(Small(), tmp_path / "dense", members), strict=True
    ):
        assert dict(found.metrics) == pytest.approx(dict(expected.metrics), rel=1e-9)


def test_an_optimizer_whose_step_a_scheduler_has_wrapped_is_accepted() -> None:
    """Optimizer and scheduler may be made together, as Lightning does."""
    task = Foreign("lookahead")
    schedulers: list[Any] = []

    def make(params: Any, lr: float) -> Optimizer:
        schedulers.append(torch.optim.lr_scheduler.StepLR(made := Adam(params, lr), 1))
        return made

    task.make_optimizer = make
    assert isinstance(build(task, Member(trial(0), 0, 1), CPU).optimizer, Adam)


def test_a_wrapper_that_cannot_be_restored_says_so(tmp_path: Path) -> None:
    task, first = Foreign("bare"), trial(0)
    work(task, tmp_path, [Member(first, 0, 1)])
    with pytest.raises(
        TaskError, match=r"trial 0 cannot continue from its checkpoint: .*Bare, which has no `load_state_dict`"
    ):
        work(task, tmp_path, [Member(first, 1, EPOCHS)])


def test_weights_are_saved_in_evaluation_mode(tmp_path: Path) -> None:
    runtime = build(Foreign("modal"), Member(trial(0), 0, 2), CPU)
    weights = {name: value.clone() for name, value in runtime.model.state_dict().items()}
    runtime.epoch = 1
    save(runtime, tmp_path)
    saved = load_newest(tmp_path, 0)
    assert saved is not None
    for name, value in weights.items():
        assert torch.equal(saved.model[name], value / 2)
        assert torch.equal(runtime.model.state_dict()[name], value)


def test_an_object_that_is_no_optimizer_is_refused() -> None:
    task = Foreign("bare")
    task.make_optimizer = lambda params, lr: object()
    with pytest.raises(
        TaskError, match=r"the task's `optimizer` must return torch.optim.optimizer.Optimizer, got <object"
    ):
        build(task, Member(trial(0), 0, 1), CPU)


class ByEpoch:
    """A scheduler whose `step` takes the epoch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int, metric: float | None = None) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= epoch

    def state_dict(self) -> Mapping[str, Any]:
        return {}


class Scheduled(Small):
    def __init__(self, make: Callable[[Optimizer], Any]) -> None:
        self.make = make

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return self.make(optimizer)


class ByLoss(ByEpoch):
    def step(self, metrics: float) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(("make", "argument"), [(ByEpoch, "epoch"), (ByLoss, "metrics")])
def test_a_scheduler_whose_step_requires_an_argument_is_refused_at_the_start(
    make: Callable[[Optimizer], Any], argument: str
) -> None:
    with pytest.raises(
        TaskError, match=rf"{make.__name__}, whose `step` requires '{argument}'.* return one of these, or"
    ):
        build(Scheduled(make), Member(trial(0), 0, 1), CPU)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
    ],
)
def test_schedulers_of_torch_are_not(make: Callable[[Optimizer], Any]) -> None:
    assert build(Scheduled(make), Member(trial(0), 0, 1), CPU).scheduler is not None


def test_an_error_that_fusing_alone_raises_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise LookupError("7")

    runtimes = [build(Small(), Member(trial(number), 0, 1), CPU) for number in range(2)]
    monkeypatch.setattr(fused_stepper, "fuse", broken)
    stepper = make_stepper(Small(), runtimes)
    assert isinstance(stepper, PlainStepper)
    assert stepper.refusal == "LookupError when their models were fused: 7"
    assert "Traceback" in caplog.text
    monkeypatch.setattr(fused_stepper, "fuse", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError("no memory")))
    with pytest.raises(MemoryError):
        make_stepper(Small(), runtimes)
