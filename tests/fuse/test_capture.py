"""A captured step computes what the eager step computes."""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from twins import class_loss, eager_step

import shoal
import shoal.fuse.capture as capture_module
from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.backward import MicroBatches
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.step import StepMode, TrainingStep
from shoal.fuse.watched_step import WatchedStep


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # A bias before a norm would have a gradient of zero but for rounding, of which Adam makes a full step.
        self.conv = nn.Conv2d(1, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(3, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(F.relu(self.norm(self.conv(x))).mean((2, 3)))) * self.frozen


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4))


def members(make: Callable[[], nn.Module], optimizer: Any, count: int) -> tuple[ModelArray, FusedOptimizer]:
    models, optimizers = [], []
    for b in range(count):
        torch.manual_seed(b)
        models.append(make().double())
        optimizers.append(optimizer(models[-1].parameters(), lr=0.01 * (b + 1)))
    array = fuse(models, list(range(count)))
    return array, fuse_optimizers(optimizers, array)


def batches(count: int, size: int = 6) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(size, 1, 6, 6, dtype=torch.float64, generator=generator),
            torch.randint(0, 4, (size,), generator=generator),
        ]
        for _ in range(count)
    ]


CASES = {
    "conv, norm, dropout, AdamW, B=3": (Small, lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=lr), 3),
    "MLP, SGD with momentum, B=1": (mlp, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True), 1),
}


@pytest.mark.parametrize(
    "compiling", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["traced", "compiled"]
)
@pytest.mark.parametrize(("make", "optimizer", "count"), CASES.values(), ids=CASES)
def test_captured_steps_equal_eager_ones(make: Any, optimizer: Any, count: int, compiling: bool) -> None:
    """That of test_step.py is compiled in a fast run too."""
    array, fused = members(make, optimizer, count)
    twin, fused_twin = members(make, optimizer, count)
    first, *others = batches(5)
    eager_step(array, fused, first)
    eager_step(twin, fused_twin, first)
    step = CapturedStep(array, fused, class_loss, first, compiling=compiling)
    for number, batch in enumerate(others):
        for one in (fused, fused_twin):  # as LR schedulers do
            one.members[0].param_groups[0]["lr"] = 0.05 / (number + 1)
        assert step.fits(batch)
        torch.testing.assert_close(step(batch), eager_step(twin, fused_twin, batch), rtol=1e-9, atol=0)
    for (path, mine, _), (_, others_, _) in zip(array.stacked_tensors(), twin.stacked_tensors(), strict=True):
        torch.testing.assert_close(mine.detach(), others_.detach(), rtol=1e-9, atol=1e-12, msg=path)
    for own, other in zip(fused.members, fused_twin.members, strict=True):
        torch.testing.assert_close(own.state_dict()["state"], other.state_dict()["state"], rtol=1e-9, atol=1e-12)
    assert array.tick == twin.tick
    small = [tensor[:2] for tensor in first]
    assert not step.fits(small), "a batch of another shape must not go into the compiled step"
    torch.testing.assert_close(eager_step(array, fused, small), eager_step(twin, fused_twin, small), rtol=1e-9, atol=0)


class Kept(nn.Module):
    """Keeps a tensor that has overlaps, as the forward pass of an unmodified model may."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(18, 4)
        self.factors = torch.ones(1, dtype=torch.float64).expand(18)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.flatten(1) * self.factors)
        return out


def test_compiled_code_gets_the_strides_that_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., Tensor]:
        strides = [tensor.stride() for tensor in example]

        def run(*tensors: Tensor) -> Tensor:
            assert [tensor.stride() for tensor in tensors] == strides
            return graph(*tensors)

        return run

    monkeypatch.setattr(capture_module, "compile_graph", strict)
    (array, fused), (twin, fused_twin) = (members(Kept, torch.optim.SGD, 2) for _ in range(2))
    with_gaps, *others = ([x[:, :, :, ::2], y] for x, y in batches(3))
    eager_step(array, fused, with_gaps)
    eager_step(twin, fused_twin, with_gaps)
    step = CapturedStep(array, fused, class_loss, with_gaps)
    across = [others[0][0].transpose(0, 3).contiguous().transpose(0, 3), others[0][1]]
    for batch in (with_gaps, across, others[1]):
        assert step.fits(batch)
        torch.testing.assert_close(step(batch), eager_step(twin, fused_twin, batch), rtol=1e-9, atol=0)


@pytest.mark.parametrize("compiling", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_loss_may_write_to_a_batch_of_other_strides(compiling: bool) -> None:
    def shrinking(model: nn.Module, batch: Tensor) -> Tensor:
        batch.mul_(0.9)
        out: Tensor = (model(batch) - 1).square().mean()
        return out

    (array, fused), (twin, fused_twin) = (members(lambda: nn.Linear(4, 3), torch.optim.SGD, 2) for _ in range(2))
    first, across = torch.ones(5, 4, dtype=torch.float64), torch.ones(4, 5, dtype=torch.float64).t()
    twins = [first.clone(), across.clone()]
    eager_step(array, fused, first, shrinking)
    eager_step(twin, fused_twin, twins[0], shrinking)
    step = CapturedStep(array, fused, shrinking, first, compiling)
    for number in (0, 1, 1):
        batch = (first, across)[number]
        expected = eager_step(twin, fused_twin, twins[number], shrinking)
        torch.testing.assert_close(step(batch), expected, rtol=1e-9, atol=0)
        assert torch.equal(batch, twins[number])


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 4)])
def test_an_empty_tensor_of_a_batch_is_copied(shape: tuple[int, ...]) -> None:
    def with_mask(model: nn.Module, batch: Any) -> Tensor:
        return class_loss(model, batch) + batch[2].sum()

    array, fused = members(mlp, torch.optim.SGD, 2)
    batch = [*batches(1)[0], torch.ones(shape, dtype=torch.float64)]
    array.map(with_mask, batch).sum().backward()
    fused.step()
    step = CapturedStep(array, fused, with_mask, batch, compiling=False)
    assert step.fits(batch)
    expected = array.map(with_mask, batch).detach()
    torch.testing.assert_close(step(batch), expected, rtol=1e-9, atol=0)


def test_a_captured_step_does_not_fit_under_another_autocast() -> None:
    array, fused = members(mlp, torch.optim.SGD, 2)
    batch = batches(1)[0]
    eager_step(array, fused, batch)
    step = CapturedStep(array, fused, class_loss, batch, compiling=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert not step.fits(batch)
    assert step.fits(batch)


def test_a_step_that_reads_a_sparse_tensor_is_refused_in_words() -> None:
    def sparse_loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].to_dense()), batch[1])

    array, fused = members(lambda: nn.Linear(36, 4), torch.optim.SGD, 2)
    batch = [torch.ones(6, 36, dtype=torch.float64).to_sparse(), torch.arange(6) % 4]
    array.map(sparse_loss, batch).sum().backward()
    fused.step()
    with pytest.raises(FusionError, match="the step cannot be captured: NotImplementedError"):
        CapturedStep(array, fused, sparse_loss, batch, compiling=False)


class Recurrent(nn.Module):
    """Reads the first rows of an image one by one."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rows = kind(6, 5, num_layers=2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rows(x.squeeze(1)[:, :2])[0][:, -1])


@pytest.mark.parametrize(
    "kind",
    [pytest.param(nn.RNN, marks=pytest.mark.thorough), nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.thorough)],
)
def test_recurrent_steps_are_captured(kind: type[nn.RNNBase]) -> None:
    """Recurrent modules keep a list of their weights as an attribute, and gather it anew where weights are replaced."""
    array, fused = members(lambda: Recurrent(kind), torch.optim.Adam, 3)
    twin, fused_twin = members(lambda: Recurrent(kind), torch.optim.Adam, 3)
    first, *others = batches(4)
    eager_step(array, fused, first)
    eager_step(twin, fused_twin, first)
    step = CapturedStep(array, fused, class_loss, first, compiling=False)
    for batch in others:
        assert step.fits(batch)
        torch.testing.assert_close(step(batch), eager_step(twin, fused_twin, batch), rtol=1e-9, atol=0)
    torch.testing.assert_close(eager_step(array, fused, first), eager_step(twin, fused_twin, first), rtol=1e-9, atol=0)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.squeeze(1).mean(1)).tanh())


def test_steps_of_several_optimizers_stay_captured() -> None:
    """Each updates a part of the model, of which the other part is not frozen by that."""

    def made() -> tuple[ModelArray, list[FusedOptimizer]]:
        torch.manual_seed(0)
        array = fuse([Two().double() for _ in range(3)], [0, 1, 2])
        parts = ([model.first for model in array.members], [model.second for model in array.members])
        return array, [fuse_optimizers([torch.optim.Adam(m.parameters()) for m in part], array) for part in parts]

    def second_only(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model.second(model.first(batch[0].squeeze(1).mean(1)).tanh().detach()), batch[1])

    def step(array: ModelArray, optimizer: FusedOptimizer, fn: Callable[..., Tensor], batch: Any) -> Tensor:
        array.zero_grad()
        losses = array.map(fn, batch)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    losses = (second_only, class_loss)
    (array, optimizers), (twin, theirs) = made(), made()
    first, *others = batches(4)
    captured = []
    for i in (1, 0):
        for own, its in ((array, optimizers), (twin, theirs)):
            step(own, its[i], losses[1 - i], first)
        captured.append(CapturedStep(array, optimizers[i], losses[1 - i], first, compiling=False))
    for batch in others:
        for i, done in zip((1, 0), captured, strict=True):
            assert done.fits(batch)
            torch.testing.assert_close(done(batch), step(twin, theirs[i], losses[1 - i], batch), rtol=1e-9, atol=0)


def test_data_dependent_control_flow_is_not_captured() -> None:
    array, fused = members(mlp, torch.optim.SGD, 2)
    (batch,) = batches(1)

    def branching(model: nn.Module, batch: Any) -> Tensor:
        value = class_loss(model, batch)
        return value * 2 if value > 0 else value

    eager_step(array, fused, batch)
    with pytest.raises(FusionError, match="cannot be captured"):
        CapturedStep(array, fused, branching, batch)


def test_an_optimizer_that_steps_by_itself_is_not_captured() -> None:
    array, fused = members(mlp, torch.optim.Rprop, 2)
    (batch,) = batches(1)
    eager_step(array, fused, batch)
    with pytest.raises(FusionError, match="fused rule"):
        CapturedStep(array, fused, class_loss, batch)


def test_a_failed_capture_changes_nothing() -> None:
    array, fused = members(Small, torch.optim.Adam, 2)
    (batch,) = batches(1)
    eager_step(array, fused, batch)
    before = [tensor.detach().clone() for _, tensor, _ in array.stacked_tensors()]

    def breaks(model: nn.Module, batch: Any) -> Tensor:
        return class_loss(model, batch) * float(class_loss(model, batch))

    with pytest.raises(FusionError, match="cannot be captured"):
        CapturedStep(array, fused, breaks, batch)
    for tensor, (path, after, _) in zip(before, array.stacked_tensors(), strict=True):
        torch.testing.assert_close(after.detach(), tensor, rtol=0, atol=0, msg=path)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (2.0 if self.calls > 100 else 1.0)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_model_that_counts_is_not_captured_and_goes_on_counting(steps: int) -> None:
    models = [Counting().double() for _ in range(2)]
    array = fuse(models)
    optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1) for m in models], array)
    x = torch.randn(3, 4, dtype=torch.float64)
    loss_of = lambda model, batch: model(batch).square().mean()  # noqa: E731
    for _ in range(steps):
        array.map(loss_of, x).sum().backward()
        optimizer.step()
    with pytest.raises(FusionError, match="cannot be captured"):
        CapturedStep(array, optimizer, loss_of, x, compiling=False)
    assert [model.calls for model in models] == [steps] * 2


class Keeping(nn.Module):
    """Keeps state beside its buffers, in the way that is asked for."""

    def __init__(self, change: Callable[["Keeping"], Any], number: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.change = change
        self.calls = 0
        self.counts = {"calls": 0}
        self.log: list[int] = []
        self.average = torch.ones(4, dtype=torch.float64)
        self.own = torch.full((4,), number, dtype=torch.float64)
        self.listed = [torch.full((4,), number, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return self.linear(x) * self.average * self.own * self.listed[0]

    def kept(self) -> list[Any]:
        tensors = (self.average, self.own, self.listed[0])
        return [self.calls, dict(self.counts), list(self.log), *(tensor.tolist() for tensor in tensors)]


class Completing(nn.Module):
    """Completes its configuration when it is first run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = SimpleNamespace(width=4, kind=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.config.kind is None:
            self.config.kind = "mean"
        return self.linear(x)


@pytest.mark.parametrize("mode", ["plain", "eager"])
@pytest.mark.parametrize("count", [1, 2])
def test_what_members_have_completed_is_not_a_change(count: int, mode: StepMode) -> None:
    models = [Completing().double() for _ in range(count)]
    array = fuse(models)
    optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1) for m in models], array)
    x = torch.randn(3, 4, dtype=torch.float64)
    loss_of = lambda model, batch: model(batch).square().mean()  # noqa: E731
    TrainingStep(array, optimizer, loss_of, modes=(mode,))(x)
    CapturedStep(array, optimizer, loss_of, x, compiling=False, trained=list(array.parameters()))  # raises nothing


CHANGES: dict[str, Callable[[Keeping], Any]] = {
    "a number": lambda m: setattr(m, "calls", m.calls + 1),
    "a number in a dict": lambda m: m.counts.update(calls=m.counts["calls"] + 1),
    "a longer list": lambda m: m.log.append(0),
    "another tensor": lambda m: setattr(m, "average", m.average * 0.9),
    "a tensor in place": lambda m: m.average.mul_(0.9),
    "a tensor of each member": lambda m: setattr(m, "own", m.own * 0.9),
    "one in place": lambda m: m.own.mul_(0.9),
    "one in a list": lambda m: m.listed[0].mul_(0.9),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_with_state_beside_its_buffers_is_not_captured(change: Any, count: int) -> None:
    models = [Keeping(change, 1.0 + b).double() for b in range(count)]
    array = fuse(models)
    optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1) for m in models], array)
    x = torch.randn(3, 4, dtype=torch.float64)
    loss_of = lambda model, batch: model(batch).square().mean()  # noqa: E731
    array.map(loss_of, x).sum().backward()
    optimizer.step()
    before = [model.kept() for model in models]
    with pytest.raises(FusionError, match="keeps state in plain attributes"):
        CapturedStep(array, optimizer, loss_of, x, compiling=False)
    assert [model.kept() for model in models] == before


def captured(count: int = 2, optimizer: Any = torch.optim.SGD) -> tuple[ModelArray, FusedOptimizer, CapturedStep]:
    array, fused = members(Small, optimizer, count)
    (batch,) = batches(1)
    eager_step(array, fused, batch)
    return array, fused, CapturedStep(array, fused, class_loss, batch, compiling=False)


def test_the_shapes_of_a_trace_are_noted_in_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make_fx` makes a mode for each tensor where there is none, which takes longer than all else."""
    modes: list[FakeTensorMode] = []
    begin = FakeTensorMode.__init__

    def counted(mode: FakeTensorMode, **options: Any) -> None:
        modes.append(mode)
        begin(mode, **options)

    monkeypatch.setattr(FakeTensorMode, "__init__", counted)
    captured()
    assert len(modes) == 1
    assert TracingContext.try_get() is None


@pytest.mark.parametrize("count", [1, 2])
def test_what_changes_in_the_members_outdates_a_captured_step(count: int) -> None:
    array, _, step = captured(count)
    (batch,) = batches(1)
    members: Any = array.members
    assert step.fits(batch)
    for member in members:
        member.drop.eval()
    assert not step.fits(batch), "a part is in evaluation"
    for member in members:
        member.drop.train()
    assert step.fits(batch)
    for member in members:
        member.conv.requires_grad_(False)
    assert not step.fits(batch), "a part is frozen"


def test_a_batch_stacked_for_fewer_members_does_not_fit() -> None:
    array, fused = members(mlp, torch.optim.SGD, 3)
    own = batches(3)
    batch = shoal.stack(own)
    eager_step(array, fused, batch)
    step = CapturedStep(array, fused, class_loss, batch, compiling=False)
    assert step.fits(shoal.stack(own[::-1]))
    assert not step.fits(shoal.stack(own[:2]))


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam])
def test_a_captured_step_that_fails_is_not_counted(optimizer: Any) -> None:
    array, fused, step = captured(2, optimizer)
    (batch,) = batches(1)
    before = copy.deepcopy([member.state_dict()["state"] for member in fused.members])
    tick = array.tick

    def fails(*tensors: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    step._function = fails
    with pytest.raises(torch.OutOfMemoryError):
        step(batch)
    assert array.tick == tick
    for member, state in zip(fused.members, before, strict=True):
        torch.testing.assert_close(member.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.parametrize("compiling", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_batches_are_accumulated_and_gradients_clipped_as_eagerly(compiling: bool) -> None:
    (first, later), limits = batches(2, 4), [0.05, torch.inf, 0.2]
    batch = MicroBatches((first, later), (0.25, 0.75))
    steps = []
    for _ in range(2):
        array, optimizer = members(Small, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9), 3)
        eagerly = TrainingStep(array, optimizer, class_loss, ("eager",), max_norm=limits)
        eagerly(batch)
        steps.append((array, optimizer, eagerly))
    (array, optimizer, _), (expected, _, eagerly) = steps
    numbers = torch.tensor(limits, dtype=torch.float64)
    captured = CapturedStep(array, optimizer, class_loss, batch, compiling, max_norms=numbers)
    for _ in range(2):
        assert captured.fits(batch)
        torch.testing.assert_close(captured(batch), eagerly(batch), rtol=1e-9, atol=1e-12)
    assert array.ticks == expected.ticks
    for own, other in zip(array.members, expected.members, strict=True):
        torch.testing.assert_close(own.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("fn", "crossing"),
    [
        pytest.param(lambda x: x * torch.ones(2, device="meta"), None, id="all on the device"),
        pytest.param(lambda x: x * torch.tensor(2.0), None, id="a number on the CPU is an argument of the kernel"),
        pytest.param(lambda x: x * torch.tensor(2.0).to("meta"), "aten._to_copy.default", id="a number, copied"),
        pytest.param(lambda x: x + torch.ones(2).to(x), "aten._to_copy.default", id="a tensor, copied"),
        pytest.param(lambda x: x.clone().copy_(torch.ones(2)), "aten.copy_.default", id="a tensor, copied in place"),
        pytest.param(lambda x: x[torch.tensor([0, 1])], "aten.index.Tensor", id="an index on the CPU"),
    ],
)
def test_a_trace_that_copies_between_devices_is_found(fn: Callable[[Tensor], Tensor], crossing: str | None) -> None:
    """The meta device stands for a GPU, whose graph cannot hold such a copy."""
    step = WatchedStep(fn, 0)
    if crossing is None:
        step(torch.empty(2, device="meta"))
    else:
        with pytest.raises(FusionError, match=f"`{crossing}` copies between devices"):
            step(torch.empty(2, device="meta"))
