"""Frozen parameters with equal values are stored once, and results that depend only on them are computed once."""

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from twins import build, close, compare

from shoal.core.errors import FusionError
from shoal.fuse.api import concat, fuse
from shoal.fuse.optim.fused import fuse_optimizers

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
IMAGE = torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1])


class LoRA(nn.Module):
    """A frozen linear layer, and a trainable product of rank 2 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def frozen_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def adapted(b: int) -> nn.Module:
    net = frozen_net().requires_grad_(False)
    torch.manual_seed(b + 1)
    net[2] = LoRA(net[2])
    net[4] = LoRA(net[4])
    return net


@pytest.mark.parametrize("members", [1, 3])
def test_adapters_train_as_alone(members: int) -> None:
    models, twins = ([adapted(b) for b in range(members)] for _ in range(2))
    make = lambda model, b: torch.optim.AdamW(model.parameters(), lr=0.01 * (b + 1))  # noqa: E731
    array = fuse(models)
    optimizer = fuse_optimizers([make(model, b) for b, model in enumerate(models)], array)
    alone = [make(twin, b) for b, twin in enumerate(twins)]
    loss = lambda model, x: F.cross_entropy(model(x), Y)  # noqa: E731
    for _ in range(3):
        optimizer.zero_grad()
        array.map(loss, X).sum().backward()
        optimizer.step()
        for twin, own in zip(twins, alone, strict=True):
            own.zero_grad()
            loss(twin, X).backward()
            own.step()
    for b, twin in enumerate(twins):
        for key, value in twin.state_dict().items():
            close(models[b].state_dict()[key], value, f"{key} of {b}")


def test_one_base_is_held_for_all() -> None:
    models = [adapted(b) for b in range(5)]
    array = fuse(models)
    shared = {path: data for path, data, _ in array.shared_parameters()}
    assert set(shared) == {
        *("0.weight", "0.bias", "2.base.weight", "2.base.bias", "3.weight", "3.bias"),
        *("4.base.weight", "4.base.bias"),
    }
    assert shared["2.base.weight"].shape == (6, 6)
    for model in models:
        assert model[2].base.weight.data_ptr() == shared["2.base.weight"].data_ptr()
    assert {path for path, _, _ in array.stacked_tensors()} == {
        f"{i}.{name}" for i in (2, 4) for name in ("down", "up")
    }


class Count(TorchDispatchMode):
    """Counts matrix products by their number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            first = args[1] if func is torch.ops.aten.addmm.default else args[0]
            self.rows.append(first.shape[:-1].numel())
        return func(*args, **(kwargs or {}))


def test_what_all_share_is_computed_once() -> None:
    def make(b: int) -> nn.Module:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU()).requires_grad_(False)
        torch.manual_seed(b)
        return nn.Sequential(body, nn.Linear(6, 3)).double()

    array = fuse([make(b) for b in range(4)])
    with Count() as count:
        array(X)
    assert count.rows[:2] == [5, 5]


def test_frozen_batch_norm_in_evaluation_is_computed_once() -> None:
    def make(b: int) -> nn.Module:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False).eval()
        torch.manual_seed(b)
        return nn.ModuleDict({"body": body, "head": nn.Linear(4, 3)}).double()

    seen = []

    def run(model: nn.ModuleDict, x: Tensor) -> Tensor:
        hidden = model["body"](x)
        seen.append(type(hidden))
        return model["head"](hidden.mean((2, 3)))

    models = [make(b) for b in range(3)]
    compare(fuse(models).map(run, IMAGE), [run(copy.deepcopy(model), IMAGE) for model in models])
    assert seen[0] is Tensor


@pytest.mark.parametrize("first", [nn.Identity, lambda: nn.Conv2d(2, 2, 1)], ids=["shared input", "own inputs"])
def test_statistics_of_a_frozen_batch_norm_follow_its_members(first) -> None:  # type: ignore[no-untyped-def]
    def make() -> nn.Module:
        return nn.Sequential(first(), nn.BatchNorm2d(2, affine=False), nn.Conv2d(2, 2, 1))

    models, twins = build(make, 3), build(make, 3)
    for model in (*models, *twins):
        model[1].reset_running_stats()
    array = fuse(models)
    for _ in range(3):
        compare(array(IMAGE), [twin(IMAGE) for twin in twins])
    for model, twin in zip(models, twins, strict=True):
        close(model[1].running_mean, twin[1].running_mean, "mean")
        close(model[1].running_var, twin[1].running_var, "variance")
        assert int(model[1].num_batches_tracked) == 3


def test_a_buffer_written_from_outside_is_noticed() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4, affine=False).eval(), nn.Linear(4, 2))

    torch.manual_seed(0)
    models = [make().double() for _ in range(3)]
    array = fuse(models)
    compare(array(X), [model(X) for model in copy.deepcopy(models)])
    models[1][0].running_mean.fill_(3.0)
    compare(array(X), [model(X) for model in copy.deepcopy(models)])


def test_unequal_frozen_parameters_stay_each_members_own() -> None:
    models = build(lambda: nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2)), 3)
    array = fuse(models)
    assert not list(array.shared_parameters())
    compare(array(X), [model(X) for model in models])


def test_one_member_alone_shares_nothing() -> None:
    assert not list(fuse([adapted(0)]).shared_parameters())


def test_an_iterator_is_asked_for_one_model_at_a_time() -> None:
    bases: list[int] = []
    gc.collect()
    gc.freeze()  # the collector looks at nothing that was there before: there is much of it

    def make() -> Iterator[nn.Module]:
        for b in range(4):
            gc.collect()
            bases.append(len({t.data_ptr() for t in gc.get_objects() if _is_base(t)}))
            yield adapted(b)

    try:
        array = fuse(make())
    finally:
        gc.unfreeze()
    assert len(array) == 4
    assert bases[0] == 0
    assert max(bases) == 1


def _is_base(value: object) -> bool:
    return type(value) is nn.Parameter and not value.requires_grad and value.shape == (3, 6)


def test_select_concat_and_copies_hold_one_base() -> None:
    models = [adapted(b) for b in range(4)]
    twins = copy.deepcopy(models)
    array = fuse(models)
    parts = [array.select([3, 1])]
    parts.append(fuse([models[0], models[2]]))
    joined = concat(parts)
    compare(joined(X), [twins[b](X) for b in (3, 1, 0, 2)])
    assert len({own.data_ptr() for _, _, members in joined.shared_parameters() for own in members}) == len(
        list(joined.shared_parameters())
    )
    other = copy.deepcopy(joined)
    compare(other(X), [twins[b](X) for b in (3, 1, 0, 2)])
    joined.float()
    assert {p.dtype for model in joined.unfuse() for p in model.parameters()} == {torch.float32}


def test_freezing_and_unfreezing_members_reaches_the_array() -> None:
    models = build(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), 2)
    array = fuse(models)
    for model in models:
        model[0].requires_grad_(False)
    array(X).sum().backward()
    grads = {path: data.grad is not None for path, data, _ in array.stacked_tensors()}
    assert grads == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True}
    for model in models:
        model[0].requires_grad_(True)
    array(X).sum().backward()
    assert all(data.grad is not None for _, data, _ in array.stacked_tensors())
    models[0][0].requires_grad_(False)
    with pytest.raises(FusionError, match=r"'0.weight' is frozen in members .0. and not in the others"):
        array(X)


def test_unfreezing_what_is_stored_once_is_refused() -> None:
    models = [adapted(b) for b in range(2)]
    array = fuse(models)
    for model in models:
        model.requires_grad_(True)
    with pytest.raises(FusionError, match=r"'0.weight' was frozen when the array was made.*copy.deepcopy"):
        array(X)
    compare(fuse(copy.deepcopy(models))(X), [model(X) for model in models])


def test_parameters_are_copied_at_the_first_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    array = fuse([adapted(b) for b in range(3)])
    copies: list[int] = []
    clone = Tensor.clone

    def counted(tensor: Tensor, **options: object) -> Tensor:
        copies[-1] += 1
        return clone(tensor, **options)

    monkeypatch.setattr(Tensor, "clone", counted)
    for _ in range(3):
        copies.append(0)
        array(X)
    assert copies == [len(list(array.parameters())), 0, 0]
