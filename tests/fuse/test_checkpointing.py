"""Parts under `torch.utils.checkpoint` in an array: only the memory differs from a run without them."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs_on_cpu import graphs
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from twins import Of

import shoal
from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.shard import MaskRows, Shard, use_shard

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
RATES = (0.0, 0.1, 0.5)
SAME, MIXED = (3, 3, 3), (2, 3, 5)

Depth = int
"""Number of checkpointed parts around each other."""


class Block(nn.Module):
    """Dropout before, within and after two parts, of which one is within the other; an adapter of a rank."""

    def __init__(self, rate: float, rank: int, depth: Depth, drawing: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.down, self.up = nn.Linear(4, rank, bias=False), nn.Linear(rank, 4, bias=False)
        self.drop = nn.Dropout(rate)
        self.depth, self.drawing = depth, drawing

    def inner(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.linear(x)))
        hidden = hidden + self.drop(self.up(self.down(self.drop(x))).sin())
        return hidden * torch.rand_like(hidden) if self.drawing else hidden

    def outer(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.inner(x)).sin()
        return checkpoint(self.inner, hidden, use_reentrant=False) if self.depth > 1 else self.inner(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        return self.drop(checkpoint(self.outer, x, use_reentrant=False) if self.depth else self.outer(x))


def models(depth: Depth, ranks: Sequence[int] = SAME, drawing: bool = True) -> list[nn.Module]:
    made = []
    for b, (rate, rank) in enumerate(zip(RATES, ranks, strict=True)):
        torch.manual_seed(b)
        made.append(nn.Sequential(*(Block(rate, rank, depth, drawing) for _ in range(2))).double())
    return made


def squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def backward_within(model: nn.Module, x: Tensor) -> Tensor:
    loss = squares(model, x)
    loss.backward()
    return loss


def in_another_thread(losses: Tensor) -> None:
    thread = threading.Thread(target=lambda: losses.sum().backward())
    thread.start()
    thread.join()


def gradients(array: ModelArray) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in array.named_parameters()}


def learnt(members: list[nn.Module], backward: Callable[[Tensor], None] | None = None) -> tuple[Tensor, dict[str, Any]]:
    """Losses, and gradients by name, of one step of an array; by default its backward pass is within the run."""
    array = fuse(members, range(len(members)), strict=False)
    losses = array.map(backward_within if backward is None else squares, X)
    if backward is not None:
        backward(losses)
    return losses.detach(), gradients(array)


BACKWARD: dict[str, Callable[[Tensor], None] | None] = {
    "after the run": lambda losses: losses.sum().backward(),
    "in another thread": in_another_thread,
    "within the run": None,
}


@pytest.mark.parametrize("when", BACKWARD)
@pytest.mark.parametrize("depth", [1, 2], ids=["a part", "a part within a part"])
@pytest.mark.parametrize("ranks", [SAME, MIXED], ids=["equal ranks", "mixed ranks"])
def test_losses_and_gradients_are_those_without_checkpoints(ranks: Sequence[int], depth: Depth, when: str) -> None:
    losses, grads = learnt(models(depth, ranks), BACKWARD[when])
    wanted, without = learnt(models(0, ranks), BACKWARD["after the run"])
    assert torch.equal(losses, wanted)
    assert {name: torch.equal(grads[name], grad) for name, grad in without.items()} == dict.fromkeys(without, True)


@pytest.mark.parametrize("ranks", [SAME, MIXED], ids=["equal ranks", "mixed ranks"])
def test_each_member_is_as_alone(ranks: Sequence[int]) -> None:
    together = fuse(models(2, ranks), strict=False, seeds=[5, 6, 7])
    losses = together.map(squares, X)
    losses.sum().backward()
    for b, seed in enumerate((5, 6, 7)):
        alone = models(2, ranks)[b]
        with shoal.randomness(_Trial(seed), 0):
            loss = squares(alone, X)
        loss.backward()
        torch.testing.assert_close(losses[b], loss, rtol=1e-12, atol=0)
        for name, parameter in together.members[b].named_parameters():
            whole = {path: data.grad for path, data, _ in together.stacked_tensors()}
            mine = parameter.grad if name not in whole else whole[name][b]
            torch.testing.assert_close(mine, alone.get_parameter(name).grad, rtol=1e-9, atol=1e-15)


class _Trial:
    """What `shoal.randomness` reads of a trial."""

    data_seed = 0

    def __init__(self, seed: int) -> None:
        self.seed = seed


def saved_bytes(depth: Depth, ranks: Sequence[int]) -> int:
    """Bytes of the tensors that a step keeps for its backward pass."""
    total: list[int] = []
    array = fuse(models(depth, ranks), strict=False)
    with saved_tensors_hooks(lambda tensor: (total.append(tensor.nbytes), tensor)[1], lambda tensor: tensor):
        array.map(squares, X.expand(50, *X.shape).flatten(0, 1))
    return sum(total)


@pytest.mark.parametrize("ranks", [SAME, MIXED], ids=["equal ranks", "mixed ranks"])
def test_less_is_kept_for_the_backward_pass(ranks: Sequence[int]) -> None:
    assert saved_bytes(1, ranks) < 0.25 * saved_bytes(0, ranks)


class Counting(nn.Module):
    """Has statistics, a buffer and numbers that each run of its part changes."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, affine=affine)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    def part(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return self.norm(self.linear(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, self.linear(x), use_reentrant=False)


@pytest.mark.parametrize("affine", [True, False])
def test_state_that_a_part_changes_changes_in_both_of_its_runs_as_in_plain_torch(affine: bool) -> None:
    made = []
    for b in range(2):
        torch.manual_seed(b)
        made.append(Counting(affine).double())
    twins = copy.deepcopy(made)
    array = fuse(made)
    for _ in range(2):
        array.map(squares, X).sum().backward()
    array.state.sync_to_members()
    for model, twin in zip(made, twins, strict=True):
        for _ in range(2):
            squares(twin, X).backward()
        assert model.calls == twin.calls == int(model.number) == 4
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-12, atol=1e-15)


def optimized(depth: Depth, ranks: Sequence[int]) -> tuple[ModelArray, FusedOptimizer]:
    members = [model[:1] for model in models(depth, ranks, drawing=False)]  # draws of a generator cannot be captured
    array = fuse(members, range(3), strict=False)
    return array, fuse_optimizers(
        [torch.optim.SGD(model.parameters(), lr=0.1 * (b + 1)) for b, model in enumerate(members)], array
    )


def eager(array: ModelArray, optimizer: FusedOptimizer) -> Tensor:
    optimizer.zero_grad()
    losses: Tensor = array.map(squares, X)
    losses.sum().backward()
    optimizer.step()
    return losses.detach()


@pytest.mark.parametrize("recorded", [False, True], ids=["traced", "recorded"])
@pytest.mark.parametrize("ranks", [SAME, MIXED], ids=["equal ranks", "mixed ranks"])
def test_a_captured_step_runs_its_parts_again(
    ranks: Sequence[int], recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recorded:
        graphs(monkeypatch)
    (array, optimizer), twin = optimized(1, ranks), optimized(0, ranks)
    assert torch.equal(eager(array, optimizer), eager(*twin))
    step = CapturedStep(array, optimizer, squares, X, compiling=False)
    for _ in range(3):
        assert step.fits(X)
        torch.testing.assert_close(step(X), eager(*twin), rtol=1e-12, atol=0)
    for own, its in zip(array.parameters(), twin[0].parameters(), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-12, atol=1e-15)


def test_a_part_within_a_part_is_not_captured() -> None:
    array, optimizer = optimized(2, SAME)
    eager(array, optimizer)
    with pytest.raises(FusionError, match="cannot be captured"):
        CapturedStep(array, optimizer, squares, X, compiling=False)


def sums(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    return loss


@pytest.mark.parametrize("depth", [1, 2], ids=["a part", "a part within a part"])
def test_shards_of_a_batch_have_the_gradients_of_the_batch(depth: Depth) -> None:
    """The masks of a shard are cut out of those of the batch by their numbers, which a second run has again."""
    array, masks = fuse(models(depth, drawing=False), range(3)), MaskRows()

    def run(first: int, rows: int) -> list[Tensor]:
        array.zero_grad()
        array.tick = 0
        with use_shard(Shard(first, rows, len(X), lambda total: None, masks)):
            array.map(sums, X[first : first + rows]).sum().backward()
        return [parameter.grad.clone() for parameter in array.parameters()]

    for whole, first, second in zip(run(0, 6), run(0, 2), run(2, 4), strict=True):
        torch.testing.assert_close(first + second, whole, rtol=1e-9, atol=1e-12)


def test_a_run_within_a_part_that_began_before_it_draws_nothing() -> None:
    array = fuse([nn.Dropout(0.5), nn.Dropout(0.5)])
    with pytest.raises(FusionError, match="checkpoint parts of the model within the run"):
        checkpoint(lambda x: array(x), X.clone().requires_grad_(), use_reentrant=False)


def frozen_start(depth: Depth, fn: Callable[[nn.Module, Tensor], Any]) -> ModelArray:
    """An array of models that begin with a frozen layer, whose results all members share."""
    made = []
    for model in models(depth):
        torch.manual_seed(9)
        made.append(Of(fn, first=nn.Linear(4, 4).double().requires_grad_(False), rest=model))
    return fuse(made, range(3))


def leaf_within(model: Any, x: Tensor) -> Any:
    """As the hook of `enable_input_require_grads` of `transformers`."""
    return model.rest(model.first(x).requires_grad_(True))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_shared_result_that_is_to_require_gradients_changes_nothing(depth: Depth) -> None:
    found = []
    for fn in (lambda model, x: model.rest(model.first(x)), leaf_within):
        array = frozen_start(depth, fn)
        losses = array.map(squares, X)
        losses.sum().backward()
        found.append((losses.detach(), gradients(array)))
    assert found[0][1].keys() == found[1][1].keys()
    assert torch.equal(found[0][0], found[1][0])
    for name, grad in found[0][1].items():
        assert (grad is None) == (found[1][1][name] is None)
        torch.testing.assert_close(found[1][1][name], grad, rtol=1e-12, atol=1e-15)


def gradient_read(model: Any, x: Tensor) -> Any:
    hidden = model.first(x).requires_grad_()
    squares(model.rest, hidden).backward()
    return hidden.grad


def made_with_a_gradient(model: Any, x: Tensor) -> Any:
    moved = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    squares(model.rest, x + moved).backward()
    return moved.grad


def of_a_parameter(model: Any, x: Tensor) -> Any:
    moved = nn.Parameter(x.clone())
    squares(model.rest, moved).backward()
    return moved.grad


def stepped(model: Any, x: Tensor) -> Any:
    layer = nn.Linear(4, 4, dtype=x.dtype)
    squares(model.rest, layer(x)).backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return layer.weight.detach()


def hooked(model: Any, x: Tensor) -> Any:
    hidden = model.first(x).requires_grad_()
    hidden.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return model.rest(hidden)


def node_hooked(model: Any, x: Tensor) -> Any:
    hidden = model.first(x).requires_grad_().tanh()
    hidden.grad_fn.register_hook(lambda inputs, outputs: None)
    return model.rest(hidden)


def differentiated(model: Any, x: Tensor) -> Any:
    hidden = model.first(x).requires_grad_()
    return torch.autograd.grad(squares(model.rest, hidden), hidden)[0]


def of_the_batch(model: Any, x: Tensor) -> Any:
    return model.rest(x.requires_grad_())


def of_a_view_of_itself(model: Any, x: Tensor) -> Any:
    return model.rest(x.mul_(1).requires_grad_())


def of_a_weight(model: Any, x: Tensor) -> Any:
    return model.rest(F.linear(x, model.first.weight.requires_grad_()))


@pytest.mark.parametrize(
    "fn",
    [
        gradient_read,
        made_with_a_gradient,
        of_a_parameter,
        stepped,
        hooked,
        node_hooked,
        differentiated,
        of_the_batch,
        of_a_view_of_itself,
        of_a_weight,
    ],
)
def test_the_sum_of_the_members_gradients_is_not_to_be_had(fn: Callable[[Any, Tensor], Any]) -> None:
    array = frozen_start(0, fn)
    with pytest.raises(FusionError, match="that all members share"):
        array.map(lambda model, x: model(x).square().sum(), X.clone())
