"""In-place writes of submodules that run member by member, and of the code around them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twins import close, compare

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

Forward = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """A part of 8 features to 8, between two layers, used as `how` says."""

    def __init__(self, part: nn.Module, how: Forward) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 8), part, nn.Linear(8, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.how(self.part, self.first(x)))


class Marking(nn.Module):
    """Writes to a slice of what it is given."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x[:, 0] = 0.5
        return 2 * x if y is None else x * y


class Product(nn.Module):
    """Of a linear layer's result, and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.linear(x) * (x if y is None else y)


def plain(part: nn.Module, h: Tensor) -> Tensor:
    return part(h)


def added(part: nn.Module, h: Tensor) -> Tensor:
    h = part(h)
    h += 1
    return h.mul_(2)


def rectified(part: nn.Module, h: Tensor) -> Tensor:
    return torch.relu_(part(h))


def residual(part: nn.Module, h: Tensor) -> Tensor:
    return part(h) + h


def before(part: nn.Module, h: Tensor) -> Tensor:
    h.add_(1)
    return part(h)


def both(part: nn.Module, h: Tensor) -> Tensor:
    return part(h, h)


RELU = lambda: nn.ReLU(inplace=True)  # noqa: E731
CASES: dict[str, tuple[tuple[Callable[[], nn.Module], ...], Forward]] = {
    "a result changed": ((Product, lambda: nn.Linear(8, 8)), added),
    "a result rectified": ((Product, lambda: nn.Linear(8, 8)), rectified),
    "an argument changed before": ((Product, lambda: nn.Linear(8, 8)), before),
    "a part in place": ((Product, RELU), plain),
    "a part in place first": ((RELU, Product), plain),
    "parts in place": ((RELU, lambda: nn.ELU(inplace=True)), residual),
    "an argument used after": ((Product, RELU, Marking), residual),
    "an argument given twice": ((Product, Marking), both),
}


def nets(name: str) -> list[nn.Module]:
    parts, how = CASES[name]
    torch.manual_seed(0)
    return [Net(part(), how).double() for part in parts]


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_those_of_the_members_alone(name: str) -> None:
    models = nets(name)
    twins = copy.deepcopy(models)
    array = fuse(models, strict=False)
    whole = array(X)
    expected = [twin(X) for twin in twins]
    compare(whole, expected)
    whole.square().sum().backward()
    apart = {(path, b): parameter.grad for path, b, parameter in array.unfused_parameters()}
    fused = {path: data.grad for path, data, _ in array.stacked_tensors()}
    for b, (out, twin) in enumerate(zip(expected, twins, strict=True)):
        out.square().sum().backward()
        for path, parameter in twin.named_parameters():
            grad = apart[path, b] if (path, b) in apart else fused[path][b]
            close(grad, parameter.grad, f"gradient of {path} of {b}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(name: str, mode: Callable[[], torch.no_grad]) -> None:
    models = nets(name)
    twins = copy.deepcopy(models)
    with mode():
        compare(fuse(models, strict=False)(X), [twin(X) for twin in twins])


def test_what_all_share_is_changed_by_no_member() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        x = x * 2
        return model[0](x) + x

    models = [nn.Sequential(part()) for part in (RELU, nn.Tanh, Marking)]
    with pytest.raises(FusionError, match="0 changes a tensor that all members share"):
        fuse(models, strict=False).map(forward, X)
