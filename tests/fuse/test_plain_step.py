"""Plain steps of an array equal a loop over its models, whatever user code does to these in between."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR

import shoal.fuse.step as step_module
from shoal.core.errors import FusionError
from shoal.fuse.api import fuse, stack
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.optim.param_group_batch import _MAX_CACHED_SETS, ParamGroupBatch
from shoal.fuse.optim.unfused_step import UnfusedStep
from shoal.fuse.step import TrainingStep

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3


class Net(nn.Module):
    """With a branch that can be left out, a buffer that is replaced, and others that are changed."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.branch = nn.Linear(8, 3)
        self.branches = True
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.abs().mean().detach()
        x = self.norm(self.first(x)).relu()
        out: Tensor = self.last(x) + self.branch(x) if self.branches else self.last(x)
        return out


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda params: SGD(params, 0.1),
    "momentum": lambda params: SGD(params, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "dampened": lambda params: SGD(params, 0.1, momentum=0.9, dampening=0.5),
    "adam": lambda params: Adam(params, 0.01),
    "amsgrad": lambda params: AdamW(params, 0.01, amsgrad=True),
    "foreach": lambda params: Adam(params, 0.01, foreach=True),
    "adagrad": lambda params: Adagrad(params, 0.05),
    "adadelta": lambda params: Adadelta(params),
    "rmsprop": lambda params: RMSprop(params, 0.01),
}


class Loop:
    """Members that a plain loop trains.

    Args:
        makes: names of their optimizers.
        model: makes each.
        loss: of a member.
    """

    def __init__(self, makes: Sequence[str], model: Callable[[], nn.Module] = Net, loss: Any = loss) -> None:
        self.loss = loss
        self.models: list[Any] = []
        for seed in range(len(makes)):
            torch.manual_seed(seed)
            self.models.append(model().double())
        self.optimizers = [OPTIMIZERS[make](m.parameters()) for make, m in zip(makes, self.models, strict=True)]

    def step(self, batches: Sequence[Any]) -> Tensor:
        losses = []
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            found = self.loss(model, [each.clone() for each in batch])
            found.backward()
            optimizer.step()
            losses.append(found.detach())
        return torch.stack(losses)

    @property
    def learnt(self) -> list[Any]:
        """All that training has changed."""
        return [[model.state_dict() for model in self.models], [each.state_dict() for each in self.optimizers]]


class Array(Loop):
    """The same as an array.

    Args:
        modes: Step modes, taken in turn.
    """

    def __init__(
        self,
        makes: Sequence[str],
        model: Callable[[], nn.Module] = Net,
        loss: Any = loss,
        modes: Sequence[Any] = ("plain",),
    ) -> None:
        super().__init__(makes, model, loss)
        self.array = fuse(self.models, range(len(makes)))
        self.fused = fuse_optimizers(self.optimizers, self.array)
        self.training = TrainingStep(self.array, self.fused, loss, tuple(dict.fromkeys(modes)))
        self.modes = modes
        self.taken = 0

    def step(self, batches: Sequence[Any]) -> Tensor:
        mode = self.modes[self.taken % len(self.modes)]
        self.taken += 1
        alike = all(batch is batches[0] for batch in batches)
        return self.training._run(mode, batches[0] if alike else stack(batches))


def both_step(array: Array, loop: Loop, batch: Any = (X, Y)) -> None:
    batches = batch if isinstance(batch, list) else [batch] * len(loop.models)
    torch.testing.assert_close(array.step(batches), loop.step(batches), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(array.learnt, loop.learnt, rtol=1e-9, atol=1e-11)


MODES = pytest.mark.parametrize(
    "modes", [("plain",), ("plain", "eager"), ("eager", "plain", "plain")], ids=["plain", "plain first", "eager first"]
)


@pytest.mark.in_turns(7)
@MODES
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("members", [1, 2])
def test_steps_are_those_of_a_loop(name: str, members: int, modes: Sequence[str]) -> None:
    array, loop = Array([name] * members, modes=modes), Loop([name] * members)
    for number in range(5):
        both_step(array, loop, (X[number:], Y[number:]))


def schedule(one: Loop) -> None:
    for group in one.optimizers[-1].param_groups:
        group["lr"] *= 0.5


def freeze(one: Loop) -> None:
    for model in one.models:
        model.first.requires_grad_(False)


def branch(one: Loop) -> None:
    for model in one.models:
        model.branches = not model.branches


def branch_of_one(one: Loop) -> None:
    """Of which the others then have gradients."""
    one.models[0].branches = not one.models[0].branches


def load(one: Loop) -> None:
    one.optimizers[0].load_state_dict(copy.deepcopy(one.optimizers[0].state_dict()))


def forget(one: Loop) -> None:
    one.optimizers[0].state.clear()


def overwrite(one: Loop) -> None:
    with torch.no_grad():
        one.models[0].last.weight.mul_(0.5)


def leave_gradients(one: Loop) -> None:
    for parameter in one.models[0].parameters():
        parameter.grad = torch.ones_like(parameter)


def hook(one: Loop) -> None:
    one.optimizers[0].register_step_post_hook(lambda *_: None)


def split(one: Loop) -> None:
    for optimizer in one.optimizers:
        parameter = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [parameter], "lr": 0.2})


def other_rule(one: Loop) -> None:
    one.optimizers[0].param_groups[0]["nesterov"] = False


CHANGES = [schedule, freeze, branch, load, forget, overwrite, leave_gradients, hook, split, other_rule]


@pytest.mark.in_turns(7)
@MODES
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("members", [1, 3])
def test_what_is_changed_between_steps_counts(
    change: Callable[[Loop], None], members: int, modes: Sequence[str]
) -> None:
    array, loop = Array(["momentum"] * members, modes=modes), Loop(["momentum"] * members)
    for number in range(6):
        if number in (2, 4):
            change(array)
            change(loop)
        both_step(array, loop)


@pytest.mark.parametrize("make", ["momentum", "adam", "rmsprop"])
def test_one_member_may_leave_out_a_parameter_in_plain_steps(make: str) -> None:
    """Its updates are then fewer than those of the others."""

    class Choosing(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.first(x)).relu()
            out: Tensor = self.last(x)
            return out + self.branch(x) if bool(self.last.bias.detach()[0] > 0) else out

    array, loop = Array([make] * 3, Choosing, modes=("plain",)), Loop([make] * 3, Choosing)
    for one in (array, loop):
        for model, bias in zip(one.models, (-9.0, 9.0, 9.0), strict=True):
            nn.init.constant_(model.last.bias, bias)
    for _ in range(6):
        both_step(array, loop)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.into(x).tanh())
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(x.unsqueeze(-1))[0][:, -1])
        return out


class Pointwise(nn.Module):
    """Its kernels have axes of size 1, and their gradients other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1))
        self.convs.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.convs(x[:, :, None, None]).flatten(1)
        return out


class Scattered(nn.Module):
    """A weight with gaps in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, dtype=torch.float64)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.base.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.base(x).tanh())
        return out


@pytest.mark.parametrize("model", [Tied, Recurrent, Pointwise, Scattered, HalfFrozen])
def test_models_of_many_kinds(model: Callable[[], nn.Module]) -> None:
    array, loop = Array(["adam"] * 2, model), Loop(["adam"] * 2, model)
    for _ in range(6):
        both_step(array, loop)


@pytest.mark.parametrize(
    "compiling", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["traced", "compiled"]
)
def test_what_is_compiled_later_goes_on_from_there(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has all the gradients that there are; also if only the graph is made that would be compiled."""

    def capture(array: Any, optimizer: Any, loss: Any, batch: Any, compiled: bool, *more: Any) -> CapturedStep:
        assert compiled
        return CapturedStep(array, optimizer, loss, batch, compiling, *more)

    monkeypatch.setattr(step_module, "CapturedStep", capture)
    array, loop = Array(["adam"], HalfFrozen), Loop(["adam"], HalfFrozen)
    training = TrainingStep(array.array, array.fused, loss, compiling=lambda seconds: True)
    while training.mode is None:
        training((X, Y))
    for _ in range(array.array.tick):
        loop.step([(X, Y)])
    assert "compiled" in training.seconds
    torch.testing.assert_close(array.models[0].state_dict(), loop.models[0].state_dict())


def test_a_schedule_of_torchs_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    array = Array(["adam"])
    array.step([(X, Y)])
    scheduler = ExponentialLR(array.optimizers[0], 0.5)
    array.step([(X, Y)])
    scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_optimizers_are_as_they_were_made() -> None:
    array = Array(["adam", "sgd"])
    seen: list[Any] = []
    array.optimizers[0].register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["fused"]))
    array.step([(X, Y)] * 2)
    assert [optimizer.param_groups[0]["fused"] for optimizer in array.optimizers] == [None, None]
    assert seen == [None], "with a hook it steps as it is"


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("broken")


def broken_backward(model: nn.Module, batch: Any) -> Tensor:
    found = loss(model, batch)
    return Broken.apply(found) if bool((batch[1] < 0).any()) else found  # type: ignore[no-any-return, no-untyped-call]


def detached(model: nn.Module, batch: Any) -> Tensor:
    found = loss(model, batch)
    return found.detach() if bool((batch[1] < 0).any()) else found


@pytest.mark.parametrize(
    ("fn", "label", "error"),
    [(loss, 7, IndexError), (broken_backward, -100, ValueError), (detached, -100, FusionError)],
    ids=["the loss", "the backward pass", "no gradient"],
)
def test_what_one_member_raises_updates_none(fn: Any, label: int, error: type[Exception]) -> None:
    array = Array(["adagrad", "adam", "momentum"], loss=fn)
    for _ in range(2):
        array.step([(X, Y)] * 3)
    weights = copy.deepcopy([dict(model.named_parameters()) for model in array.models])
    wrong = torch.where(torch.arange(12) == 5, label, Y)
    with pytest.raises(error):
        array.step([(X, Y), (X, wrong), (X, Y)])
    torch.testing.assert_close([dict(model.named_parameters()) for model in array.models], weights, rtol=0, atol=0)
    own = [parameter for model in array.models for parameter in model.parameters()]
    assert all(parameter.grad is None for parameter in (*own, *array.array.parameters()))
    array.step([(X, Y)] * 3)


def test_a_step_within_a_run_of_another_array_is_an_error() -> None:
    array, other = Array(["adam"]), fuse([Tied(), Tied()], [0, 1])
    with pytest.raises(FusionError, match="within a function that an array runs"):
        other.map(lambda model, x: array.step([(x, Y)]).sum(), X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.last, "weight", nn.Parameter(model.last.weight.clone())), "replaced"),
        (lambda model: setattr(model.last.weight, "data", model.last.weight.data.clone()), "other memory"),
        (lambda model: fuse([model], [0]), "have left this array"),
    ],
)
def test_a_parameter_that_leaves_the_array_is_an_error(change: Callable[[Any], None], message: str) -> None:
    array = Array(["adam"])
    array.step([(X, Y)])
    change(array.models[0])
    with pytest.raises(FusionError, match=message):
        array.step([(X, Y)])


def test_of_many_sets_of_parameters_that_have_had_gradients_few_are_remembered() -> None:
    array = Array(["momentum"], Layers, some_layers, ("eager",))
    for _ in range(2 * _MAX_CACHED_SETS):
        array.step([(X, Y)])
    (param_batch,) = array.fused._units
    assert isinstance(param_batch, ParamGroupBatch)
    assert 1 < len(param_batch._active) <= _MAX_CACHED_SETS


class Layers(nn.Module):
    """Another set of layers takes part in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(8))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        for bit, layer in enumerate(self.layers):
            x = layer(x) if self.steps & 1 << bit else x
        return x


def some_layers(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch[0][:, :1])
    return out.square().mean()


MIXTURES = {
    "of one class": ("momentum", "momentum", "momentum"),
    "of several": ("adagrad", "adam", "adam", "amsgrad", "sgd", "momentum"),
    "one without a kernel": ("adam", "rmsprop", "adam"),
}


@pytest.mark.in_turns(7)
@MODES
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("own", [False, True], ids=["one batch", "own batches"])
def test_members_have_optimizers_of_their_own(mixture: str, own: bool, modes: Sequence[str]) -> None:
    makes = MIXTURES[mixture]
    array, loop = Array(makes, modes=modes), Loop(makes)
    for number in range(6):
        both_step(array, loop, [(X + number * b, Y.roll(b)) for b in range(len(makes))] if own else (X, Y))


def test_no_member_sees_what_another_does_to_the_batch() -> None:
    def changing(model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(2)
        batch[1].add_(1).remainder_(3)
        return loss(model, batch)

    before = X.clone()
    makes = MIXTURES["of several"]
    array, loop = Array(makes, loss=changing), Loop(makes, loss=changing)
    for _ in range(4):
        both_step(array, loop)
    assert torch.equal(X, before)


@pytest.mark.parametrize(
    ("device", "dtype", "read"),
    [("cpu", torch.float32, False), ("meta", torch.float64, False), ("meta", torch.float32, True)],
)
def test_a_kernel_off_the_cpu_reads_counts_of_updates_that_lie_beside_the_parameter(
    device: str, dtype: torch.dtype, read: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    parameter.grad = torch.zeros(3, device="meta")
    optimizer = Adam([parameter])
    optimizer.state[parameter] = {"step": torch.zeros((), dtype=dtype, device=device)}
    assert UnfusedStep(optimizer)._kernel_applies(optimizer.param_groups[0]) is read
