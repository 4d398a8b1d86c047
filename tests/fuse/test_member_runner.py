"""Functions that draw random numbers for the first time after several steps: a failed step is not applied twice."""

from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from compare_with_plain import CompareWithPlain
from torch import Tensor, nn

from shoal.fuse.transaction import Transaction

X = torch.randn(12, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Remembers(nn.Module):
    """Counts its steps in all the ways there are, and draws from the sixth on, a number that it has no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.steps = 0
        self.history: list[int] = []
        self.last: deque[int] = deque(maxlen=3)
        self.seen: dict[str, int] = {}
        self.kinds: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.history.append(self.steps)
        self.last.append(self.steps)
        self.seen["steps"] = self.seen.get("steps", 0) + 1
        self.kinds.add(len(self.kinds))
        if self.steps == 1:
            self.first = True
        if self.steps >= 6:
            x = x + 0 * torch.rand(())
        weight = self.steps + len(self.history) + sum(self.last) + self.seen["steps"] + len(self.kinds)
        out: Tensor = self.layer(x) * (1 + 0.01 * weight)
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def test_what_a_model_remembers_is_not_remembered_twice() -> None:
    torch.manual_seed(0)
    both = CompareWithPlain([Remembers().double() for _ in range(3)], loss, "eager")
    assert len(list(both.train(X))) == len(X)
    assert [mine.steps for mine in both.fused] == [own.steps for own in both.alone]


CHANGES = {
    "a number": lambda m: setattr(m, "steps", 9),
    "a name more": lambda m: setattr(m, "other", 1),
    "a name less": lambda m: delattr(m, "steps"),
    "a list": lambda m: m.history.append(1),
    "a list, of one length": lambda m: m.history.__setitem__(0, 7),
    "a deque": lambda m: m.last.append(1),
    "a dict": lambda m: m.seen.update(steps=7),
    "a set": lambda m: m.kinds.add(7),
    "a counter": lambda m: m.counted.update("a"),
    "a list in a list": lambda m: m.nested[0].append(1),
    "a tensor": lambda m: m.table.add_(1),
    "a tensor in a list": lambda m: m.tables[0].add_(1),
    "an object": lambda m: setattr(m.options, "rate", 0.5),
    "a mode": lambda m: m.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_model_holds_beside_its_state_is_seen_to_change(name: str) -> None:
    model = Remembers()
    loss(model, X[0].float())
    model.counted, model.nested, model.options = Counter("b"), [[0]], SimpleNamespace(rate=0.1)
    model.table, model.tables = torch.zeros(3), [torch.zeros(3)]
    held = Transaction([model])
    assert held.changed() is None
    with torch.no_grad():
        model.layer.weight.add_(1)
    assert held.changed() is None
    CHANGES[name](model)
    assert held.changed() is not None


def test_what_a_model_holds_may_be_a_long_chain() -> None:
    model = Remembers()
    model.chain = end = SimpleNamespace(next=None)
    for _ in range(5000):
        end.next = SimpleNamespace(next=None)
        end = end.next
    held = Transaction([model])
    assert held.changed() is None
    end.next = 1
    assert held.changed() is not None
    del held
    while model.chain is not None and model.chain != 1:  # else Python would follow the chain to its end
        model.chain = model.chain.next
