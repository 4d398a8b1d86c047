"""Hooks that a function registers as it runs, and their rollback."""

import copy
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.transaction import Transaction

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Ordered(OrderedDict[Any, Any]):
    """A mapping whose own methods must not run in a rollback."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError(key)

    def __delitem__(self, key: Any) -> None:
        raise AssertionError(key)


def test_a_rollback_leaves_mappings_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)).double()
    mine = Ordered()
    for key in "ab":
        OrderedDict.__setitem__(mine, key, key)
    model.mine, model.counts, model.lists = mine, Counter("aab"), defaultdict(list, {1: [2]})
    kept = model[0].register_forward_hook(lambda module, given, result: result + 1)
    before = model(X)
    transaction = Transaction([model])
    model[0].register_forward_hook(lambda module, given, result: result * 2)
    model[1].register_forward_pre_hook(lambda module, given: None)
    OrderedDict.__delitem__(mine, "a")
    OrderedDict.__setitem__(mine, "c", 1)
    model.counts["z"] += 1
    model.lists[4].append(3)
    kept.remove()
    transaction.restore()
    assert list(mine.items()) == [("a", "a"), ("b", "b")]
    assert model.counts == Counter("aab")
    assert dict(model.lists) == {1: [2]}
    assert [list(module._forward_hooks) for module in model] == [[kept.id], []]
    assert not model[1]._forward_pre_hooks
    assert torch.equal(model(X), before)


class Capturing(nn.Module):
    """Doubles the result of a layer by a hook that its first call registers, as models do to capture hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            self.first.register_forward_hook(lambda module, given, result: result * 2)
        return self.last(self.first(x))


def test_a_hook_of_a_first_call_is_refused_and_each_member_may_register_its_own() -> None:
    models = [Capturing() for _ in range(3)]
    alone = copy.deepcopy(models)
    array = fuse(models)
    with pytest.raises(FusionError, match=r"it registers or deletes \['a hook'\] .*array\.unfuse\(\)"):
        array(X)
    for member, model in zip(array.unfuse(), alone, strict=True):
        torch.testing.assert_close(member(X), model(X), rtol=1e-9, atol=1e-12)


class Dropping(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(rate), nn.Linear(8, 2)).double()

    def decoded(self, x: Tensor) -> Tensor:
        return torch.tensor([int(row.argmax().item()) for row in self.layers(x)])


def test_a_rollback_beside_floats_in_which_members_differ() -> None:
    models = [Dropping(rate).eval() for rate in (0.1, 0.2, 0.5)]
    want = torch.stack([model.layers(X) for model in models])
    array = fuse(models)
    with pytest.raises(FusionError, match=r"Dropping\.decoded.*: a plain value is asked for"):
        array.map(lambda model, x: model.decoded(x), X)
    torch.testing.assert_close(array.map(lambda model, x: model.layers(x), X), want, rtol=1e-9, atol=1e-12)
    assert [model.layers[2].p for model in array.unfuse()] == [0.1, 0.2, 0.5]
