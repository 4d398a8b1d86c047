"""Loss and metrics of a validation batch share one forward pass, with the same results as two passes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.fuse.api import fuse
from shoal.worker.metrics import memoized

X, Y = torch.randn(4, 3), torch.randn(4, 3)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.passes = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.passes += 1
        return self.linear(x) * scale


def changed_output(model: nn.Module) -> Tensor:
    model(X).zero_()
    return model(X)


def changed_input(model: nn.Module) -> Tensor:
    x = X.clone()
    return model(x) + model(x.add_(1))


CASES: dict[str, tuple[Callable[[nn.Module], Any], int]] = {
    "the same input twice": (lambda m: m(X) + m(X), 1),
    "two inputs, each twice": (lambda m: m(X) + m(Y) + m(X) + m(Y), 2),
    "equal inputs that are not the same": (lambda m: m(X) + m(X.clone()), 2),
    "another setting": (lambda m: m(X) + m(X, scale=2.0), 2),
    "an output changed in place": (changed_output, 2),
    "an input changed in place": (changed_input, 2),
}


@pytest.mark.parametrize(("use", "passes"), CASES.values(), ids=CASES)
def test_passes_and_results(use: Callable[[nn.Module], Any], passes: int) -> None:
    model = Counted()
    with torch.no_grad():
        expected = use(model)
        model.passes = 0
        with memoized(model):
            result = use(model)
    torch.testing.assert_close(result, expected)
    assert model.passes == passes
    assert "forward" not in vars(model)


@pytest.mark.parametrize(("use", "passes"), CASES.values(), ids=CASES)
def test_in_an_array(use: Callable[[nn.Module], Any], passes: int) -> None:
    models = [Counted() for _ in range(3)]
    with torch.no_grad():
        expected = torch.stack([use(model) for model in models])
        seen = []

        def within(model: nn.Module) -> Any:
            before = model.passes
            with memoized(model):
                result = use(model)
            seen.append(model.passes - before)
            return result

        torch.testing.assert_close(fuse([*models]).map(within), expected)
    assert seen == [passes]


def test_a_forward_of_the_instance_comes_back() -> None:
    model = Counted()
    own = lambda x: x * 2  # noqa: E731
    model.forward = own
    with torch.no_grad(), memoized(model):
        torch.testing.assert_close(model(X), X * 2)
    assert vars(model)["forward"] is own
