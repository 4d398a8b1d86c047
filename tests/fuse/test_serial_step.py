"""A step of members on their own tensors is that with stacked gradients, whatever happens to the members meanwhile."""

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
from shoal.fuse.batch import stack
from shoal.fuse.capture import CapturedStep
from shoal.fuse.making import fuse
from shoal.fuse.optim.cohort import _MOST_LIVE, Cohort
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.serial_step import SerialStep
from shoal.fuse.step import TrainingStep

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3


class Net(nn.Module):
    """With a branch that can be left out, a buffer that is replaced, and others that are changed."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
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
    "dampened": lambda params: SGD(params, 0.1, momentum=0.9, dampening=0.5),  # no kernel
    "adam": lambda params: Adam(params, 0.01),
    "amsgrad": lambda params: AdamW(params, 0.01, amsgrad=True),
    "adagrad": lambda params: Adagrad(params, 0.05),
    "adadelta": lambda params: Adadelta(params),  # no kernel
    "rmsprop": lambda params: RMSprop(params, 0.01),  # no kernel
}


class Twin:
    """A member in an array of one.

    Args:
        make: its optimizer.
        looked_at: it is looked at in each step what is drawn, so that none is taken by itself.
    """

    def __init__(
        self, make: Callable[[Any], Optimizer], looked_at: bool, model: Callable[[], nn.Module] = Net, loss: Any = loss
    ) -> None:
        torch.manual_seed(0)
        self.model: Any = model().double()
        self.optimizer = make(self.model.parameters())
        self.array = fuse([self.model], [0])
        self.fused = fuse_optimizers([self.optimizer], self.array)
        self.training = TrainingStep(self.array, self.fused, loss, ("serial",))
        self.array.watched = looked_at

    def step(self, batch: Any = (X, Y)) -> Tensor:
        return self.training(batch)

    @property
    def told(self) -> dict[str, Any]:
        """All that training has changed."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "tick": self.array.tick}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each step that was taken by itself."""
    found: list[int] = []
    backward = SerialStep.backward

    def counting(step: SerialStep, batch: Any) -> Tensor:
        found.append(1)
        return backward(step, batch)

    monkeypatch.setattr(SerialStep, "backward", counting)
    return found


def equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            equal(a, b)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_the_array(name: str, taken: list[int]) -> None:
    quick, slow = (Twin(OPTIMIZERS[name], looked_at) for looked_at in (False, True))
    for number in range(8):
        batch = (X[number:], Y[number:])
        assert torch.equal(quick.step(batch), slow.step(batch))
        equal(quick.told, slow.told)
    kernels = name in ("sgd", "momentum", "adam", "amsgrad", "adagrad")
    assert len(taken) == (7 if kernels else 0)  # not the first, which shows whether it draws


def schedule(twin: Twin) -> None:
    for group in twin.optimizer.param_groups:
        group["lr"] *= 0.5


def freeze(twin: Twin) -> None:
    twin.model.first.requires_grad_(False)


def branch(twin: Twin) -> None:
    twin.model.branches = not twin.model.branches


def load(twin: Twin) -> None:
    twin.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))


def forget(twin: Twin) -> None:
    twin.optimizer.state.clear()


def overwrite(twin: Twin) -> None:
    with torch.no_grad():
        twin.model.last.weight.mul_(0.5)


def leave_gradients(twin: Twin) -> None:
    for parameter in twin.model.parameters():
        parameter.grad = torch.ones_like(parameter)


def hook(twin: Twin) -> None:
    twin.optimizer.register_step_post_hook(lambda *_: None)


def split(twin: Twin) -> None:
    parameter = twin.optimizer.param_groups[0]["params"].pop()
    twin.optimizer.add_param_group({"params": [parameter], "lr": 0.2})


def other_rule(twin: Twin) -> None:
    twin.optimizer.param_groups[0]["nesterov"] = False


def evaluate(twin: Twin) -> None:
    twin.array.eval()
    with torch.no_grad():
        twin.array.map(loss, (X, Y))
    twin.array.train()


def twice(twin: Twin) -> None:
    twin.array.requires_grad_(False)
    twin.array.requires_grad_(True)


CHANGES = {
    schedule: 11,
    freeze: 10,
    branch: 9,  # while a parameter has no gradient, every other step is tried, and its update left to the array
    load: 9,
    forget: 9,
    overwrite: 11,
    leave_gradients: 11,
    hook: 4,
    split: 9,
    other_rule: 10,
    evaluate: 11,
    twice: 9,
}
"""Steps of twelve that are begun by itself, if something is changed after the fourth and the eighth."""


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_steps_counts(change: Callable[[Twin], None], taken: list[int]) -> None:
    quick, slow = (Twin(OPTIMIZERS["momentum"], looked_at) for looked_at in (False, True))
    for number in range(12):
        if number in (4, 8):
            change(quick)
            change(slow)
        assert torch.equal(quick.step(), slow.step())
        equal(quick.told, slow.told)
    assert len(taken) == CHANGES[change]


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


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.base.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.base(x).tanh())
        return out


@pytest.mark.parametrize("model", [Tied, Recurrent, Pointwise, HalfFrozen])
def test_models_of_many_kinds(model: Callable[[], nn.Module], taken: list[int]) -> None:
    quick, slow = (Twin(OPTIMIZERS["adam"], looked_at, model) for looked_at in (False, True))
    for _ in range(6):
        assert torch.equal(quick.step(), slow.step())
        equal(quick.told, slow.told)
    assert len(taken) == 5


def groups(params: Any) -> Optimizer:
    first, *others = params
    return SGD([{"params": [first], "momentum": 0.9}, {"params": []}, {"params": others, "lr": 0.01}], 0.1)


def test_several_groups_one_of_which_is_empty(taken: list[int]) -> None:
    quick, slow = (Twin(groups, looked_at) for looked_at in (False, True))
    for _ in range(6):
        assert torch.equal(quick.step(), slow.step())
        equal(quick.told, slow.told)
    assert len(taken) == 5


def test_what_a_loss_changes_in_the_optimizer_counts_in_the_same_step(taken: list[int]) -> None:
    def made(looked_at: bool) -> Twin:
        def scheduled(model: nn.Module, batch: Any) -> Tensor:
            for group in twin.optimizer.param_groups:
                group["lr"] *= 0.9
            return loss(model, batch)

        twin = Twin(OPTIMIZERS["momentum"], looked_at, loss=scheduled)
        return twin

    quick, slow = made(looked_at=False), made(looked_at=True)
    for _ in range(6):
        quick.step()
        slow.step()
        equal(quick.told, slow.told)
    assert len(taken) == 5


def test_the_array_may_move(taken: list[int]) -> None:
    quick, slow = (Twin(OPTIMIZERS["momentum"], looked_at) for looked_at in (False, True))
    for number in range(6):
        for twin in (quick, slow):
            if number == 3:
                twin.array.load_state_dict({k: v.clone() / 2 for k, v in twin.array.state_dict().items()})
            twin.step()
        equal(quick.told, slow.told)
    assert len(taken) == 5


@pytest.mark.parametrize(
    "compiling", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["traced", "compiled"]
)
def test_what_is_compiled_later_goes_on_from_there(
    compiling: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has all the gradients that there are; also if only the graph is made that would be compiled."""

    def capture(array: Any, optimizer: Any, loss: Any, batch: Any, compiled: bool, trained: Any) -> CapturedStep:
        assert compiled
        return CapturedStep(array, optimizer, loss, batch, compiling, trained)

    monkeypatch.setattr(step_module, "CapturedStep", capture)
    quick, slow = (Twin(OPTIMIZERS["adam"], looked_at, HalfFrozen) for looked_at in (False, True))
    quick.training = TrainingStep(quick.array, quick.fused, loss, compiling=lambda seconds: True)
    while quick.training.way is None:
        quick.step()
    while slow.array.tick < quick.array.tick:
        slow.step()
    assert "compiled" in quick.training.seconds
    assert taken
    for (name, one), other in zip(quick.model.state_dict().items(), slow.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_a_schedule_of_torchs_is_not_warned_of(taken: list[int], recwarn: pytest.WarningsRecorder) -> None:
    twin = Twin(OPTIMIZERS["adam"], looked_at=False)
    for _ in range(3):
        twin.step()
    scheduler = ExponentialLR(twin.optimizer, 0.5)
    twin.step()
    scheduler.step()
    assert len(taken) == 3
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.parametrize("wrong", [(X, Y + 7), (X[:, :2], Y)], ids=["the last line", "the first"])
def test_what_a_loss_raises_changes_nothing(wrong: Any, taken: list[int]) -> None:
    quick, slow = (Twin(OPTIMIZERS["adam"], looked_at) for looked_at in (False, True))
    for twin in (quick, slow):
        for _ in range(3):
            twin.step()
        with pytest.raises((IndexError, RuntimeError)):
            twin.step(wrong)
        assert all(parameter.grad is None for parameter in (*twin.model.parameters(), *twin.array.parameters()))
    equal(quick.told, slow.told)
    assert torch.equal(quick.step(), slow.step())
    assert len(taken) == 4


def test_what_backward_raises_changes_nothing(taken: list[int]) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("broken")

    def sometimes(model: nn.Module, batch: Any) -> Tensor:
        found = loss(model, batch)
        return Broken.apply(found) if len(batch[0]) < 12 else found  # type: ignore[no-any-return, no-untyped-call]

    quick, slow = (Twin(OPTIMIZERS["adam"], looked_at, loss=sometimes) for looked_at in (False, True))
    for twin in (quick, slow):
        for _ in range(3):
            twin.step()
        with pytest.raises(ValueError, match="broken"):
            twin.step((X[1:], Y[1:]))
        assert all(parameter.grad is None for parameter in (*twin.model.parameters(), *twin.array.parameters()))
        twin.step()
    equal(quick.told, slow.told)
    assert len(taken) == 4


def test_no_gradients_are_left(taken: list[int]) -> None:
    twin = Twin(OPTIMIZERS["adam"], looked_at=False)
    for _ in range(3):
        twin.step()
    assert all(parameter.grad is None for parameter in (*twin.model.parameters(), *twin.array.parameters()))
    assert len(taken) == 2


def test_a_step_within_a_run_of_another_array_is_an_error(taken: list[int]) -> None:
    twin = Twin(OPTIMIZERS["adam"], looked_at=False)
    for _ in range(3):
        twin.step()
    other = fuse([Tied(), Tied()], [0, 1])
    with pytest.raises(FusionError, match="within a function that an array runs"):
        other.map(lambda model, x: twin.step().sum(), X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.last, "weight", nn.Parameter(model.last.weight.clone())), "replaced"),
        (lambda model: setattr(model.last.weight, "data", model.last.weight.data.clone()), "other memory"),
    ],
)
def test_a_parameter_that_leaves_the_array_is_an_error(change: Callable[[Any], None], message: str) -> None:
    twin = Twin(OPTIMIZERS["adam"], looked_at=False)
    for _ in range(3):
        twin.step()
    change(twin.model)
    with pytest.raises(FusionError, match=message):
        twin.step()


def test_a_member_that_has_left_is_an_error() -> None:
    twin = Twin(OPTIMIZERS["adam"], looked_at=False)
    for _ in range(3):
        twin.step()
    fuse([twin.model], [0])
    with pytest.raises(FusionError, match="have left this array"):
        twin.step()


def test_a_loss_that_no_parameter_has_part_in_is_an_error(taken: list[int]) -> None:
    def sometimes(model: nn.Module, batch: Any) -> Tensor:
        found = loss(model, batch)
        return found if len(batch[0]) == 12 else found.detach()

    twin = Twin(OPTIMIZERS["adam"], looked_at=False, loss=sometimes)
    for _ in range(3):
        twin.step()
    with pytest.raises(FusionError, match="no parameter has part"):
        twin.step((X[1:], Y[1:]))
    assert len(taken) == 3


def test_a_group_that_all_parameters_move_to_counts(taken: list[int]) -> None:
    twins = [Twin(OPTIMIZERS["momentum"], looked_at) for looked_at in (True, False)]
    for twin in twins:
        empty = {**twin.optimizer.param_groups[0], "params": [], "lr": 0.02}
        twin.optimizer.param_groups.append(empty)
        for _ in range(4):
            twin.step()
        first, second = twin.optimizer.param_groups
        first["params"], second["params"] = [], first["params"]
        for _ in range(3):
            twin.step()
    assert taken
    equal(twins[1].told, twins[0].told)


def test_of_many_sets_of_parameters_that_have_had_gradients_few_are_remembered() -> None:
    twin = Twin(OPTIMIZERS["momentum"], looked_at=True, model=Layers, loss=some_layers)
    for _ in range(2 * _MOST_LIVE):
        twin.step()
    (cohort,) = twin.fused._units
    assert isinstance(cohort, Cohort)
    assert 1 < len(cohort._live) <= _MOST_LIVE


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


class Several:
    """Members in an array, whose optimizers may be of different classes.

    Args:
        makes: of the optimizers.
        looked_at: as `Twin`.
        loss: of a member.
    """

    def __init__(self, makes: Sequence[str], looked_at: bool, loss: Any = loss) -> None:
        self.models: list[Any] = []
        for seed in range(len(makes)):
            torch.manual_seed(seed)
            self.models.append(Net().double())
        self.optimizers = [OPTIMIZERS[make](m.parameters()) for make, m in zip(makes, self.models, strict=True)]
        self.array = fuse(self.models, range(len(makes)))
        self.fused = fuse_optimizers(self.optimizers, self.array)
        self.training = TrainingStep(self.array, self.fused, loss, ("serial",))
        self.array.watched = looked_at

    def step(self, batch: Any = (X, Y)) -> Tensor:
        return self.training(batch)

    @property
    def told(self) -> list[Any]:
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return [[dict(model.state_dict()) for model in self.models], states, self.array.tick]


def both_step(quick: Several, slow: Several, batch: Any = (X, Y)) -> None:
    """Kernels that update several members at once round the last bit of some numbers otherwise."""
    torch.testing.assert_close(quick.step(batch), slow.step(batch), rtol=1e-12, atol=0)
    torch.testing.assert_close(quick.told, slow.told, rtol=1e-9, atol=1e-11)


MIXTURES = {
    "of one class": ("momentum", "momentum", "momentum"),
    "of several": ("adagrad", "adam", "adam", "amsgrad", "sgd", "momentum"),
    "in any order": ("sgd", "adam", "sgd", "adagrad", "adam"),
    "one without a kernel": ("adam", "rmsprop", "adam"),
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_steps_of_several_members_are_those_of_the_array(mixture: str, taken: list[int]) -> None:
    quick, slow = (Several(MIXTURES[mixture], looked_at) for looked_at in (False, True))
    for number in range(8):
        batch = (X[number:], Y[number:])
        both_step(quick, slow, batch)
    assert len(taken) == (0 if "rmsprop" in MIXTURES[mixture] else 7)


def test_each_of_several_members_may_have_a_batch_of_its_own(taken: list[int]) -> None:
    quick, slow = (Several(MIXTURES["of several"], looked_at) for looked_at in (False, True))
    for number in range(4):
        batches = stack([(X + number * b, Y.roll(b)) for b in range(6)])
        both_step(quick, slow, batches)
    assert len(taken) == 3


def test_no_member_sees_what_another_does_to_the_batch(taken: list[int]) -> None:
    def changing(model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(2)
        batch[1].add_(1).remainder_(3)
        return loss(model, batch)

    before = X.clone()
    quick, slow = (Several(MIXTURES["in any order"], looked_at, changing) for looked_at in (False, True))
    for _ in range(4):
        both_step(quick, slow)
    assert len(taken) == 3
    assert torch.equal(X, before)


def test_what_one_of_several_members_raises_changes_none(taken: list[int]) -> None:
    quick, slow = (Several(MIXTURES["of several"], looked_at) for looked_at in (False, True))
    for several in (quick, slow):
        for _ in range(3):
            several.step()
        weights = copy.deepcopy([m.state_dict() for m in several.models])
        labels = [Y, Y, Y, Y + 7, Y, Y]
        with pytest.raises(IndexError):
            several.step(stack([(X, mine) for mine in labels]))
        learnt = [name for name, _ in several.models[0].named_parameters()]
        for model, then in zip(several.models, weights, strict=True):
            assert all(torch.equal(model.state_dict()[name], then[name]) for name in learnt)
        own = [parameter for model in several.models for parameter in model.parameters()]
        assert all(parameter.grad is None for parameter in (*own, *several.array.parameters()))
    both_step(quick, slow)
    assert len(taken) == 4


def leave_out_branch(several: Several) -> None:
    for model in several.models:
        model.branches = not model.branches


def freeze_all(several: Several) -> None:
    for model in several.models:
        model.first.requires_grad_(False)


def load_one(several: Several) -> None:
    several.optimizers[2].load_state_dict(copy.deepcopy(several.optimizers[2].state_dict()))


def schedule_one(several: Several) -> None:
    several.optimizers[-1].param_groups[0]["lr"] *= 0.5


def hook_one(several: Several) -> None:
    several.optimizers[0].register_step_post_hook(lambda *_: None)


@pytest.mark.parametrize("change", [leave_out_branch, freeze_all, load_one, schedule_one, hook_one])
def test_what_is_changed_between_steps_of_several_counts(change: Callable[[Several], None], taken: list[int]) -> None:
    quick, slow = (Several(MIXTURES["of several"], looked_at) for looked_at in (False, True))
    for number in range(12):
        if number in (4, 8):
            change(quick)
            change(slow)
        both_step(quick, slow)
    assert len(taken) > 2
