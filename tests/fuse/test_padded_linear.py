"""Linear layers of different sizes run as one product, by each lowering, as each member's own."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import shoal
from shoal.fuse.autotune import forced_lowerings
from shoal.fuse.unfused_module import PaddedLinear

RANKS = (1, 8, 3, 6)
LOWERINGS = ["padded", "loop", "grouped"]


class Adapter(nn.Module):
    """Two factors, behind a layer with results of each member's own if `first`."""

    def __init__(self, rank: int, first: bool, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width) if first else nn.Identity()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(self.first(x))).add_(x)  # type: ignore[no-any-return]


def adapters(first: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Adapter(rank, first) for rank in RANKS]


@pytest.mark.parametrize("first", [False, True], ids=["common input", "own inputs"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_values_and_gradients_are_the_members_own(lowering: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    product = PaddedLinear._grouped_product
    monkeypatch.setattr(PaddedLinear, "_grouped_product", lambda *a: (runs.append(1), product(*a))[1])
    models, x = adapters(first), torch.randn(5, 3, 8)
    expected = []
    for model in models:
        result = model(x)
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(result.sum(), list(parameters.values()))
        expected.append((result.detach(), dict(zip(parameters, gradients, strict=True))))
    array = shoal.fuse(models, strict=False)
    with forced_lowerings({"padded linear": lowering}):
        found = array(x)
        found.sum().backward()  # whose gradient has strides of 0
    assert len(runs) == (2 if lowering == "grouped" else 0)
    for b, (model, (result, gradients)) in enumerate(zip(array.unfuse(), expected, strict=True)):
        torch.testing.assert_close(found[b], result)
        for name in ("down.weight", "up.weight"):
            own = dict(model.named_parameters())[name].grad
            torch.testing.assert_close(own, gradients[name])


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_member_without_numbers_leaves_the_others_alone(lowering: str) -> None:
    models, x = adapters(True), torch.randn(5, 8)
    expected = [model(x).detach() for model in models]
    with torch.no_grad():
        models[1].first.weight.fill_(torch.nan)  # type: ignore[union-attr, operator]
    array = shoal.fuse(models, strict=False)
    with forced_lowerings({"padded linear": lowering}):
        found = array(x)
        found.square().sum().backward()
    assert found[1].isnan().all()
    for b, model in enumerate(array.unfuse()):
        if b != 1:
            torch.testing.assert_close(found[b], expected[b])
            assert all(each.grad.isfinite().all() for each in (model.down.weight, model.up.weight))


@pytest.mark.parametrize(
    ("width", "dtype", "autocast", "grouped"),
    [
        (8, torch.float32, False, True),
        (6, torch.float32, False, False),
        (8, torch.float64, False, False),
        (8, torch.float32, True, False),
    ],
    ids=["float32", "rows of 24 bytes", "float64", "autocast"],
)
def test_where_a_grouped_product_is_a_candidate(width: int, dtype: torch.dtype, autocast: bool, grouped: bool) -> None:
    padded = PaddedLinear.of([nn.Linear(width, rank, bias=False) for rank in RANKS])
    assert padded is not None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert ("grouped" in padded._lowerings_for(torch.zeros(3, width, dtype=dtype))) == grouped


def test_a_trace_holds_no_grouped_product() -> None:
    """Torch's shape function of it takes bfloat16 alone, so that the trace could not be compiled."""
    padded = PaddedLinear.of([nn.Linear(8, rank, bias=False) for rank in RANKS])
    assert padded is not None
    seen = []
    make_fx(lambda x: (seen.append("grouped" in padded._lowerings_for(x)), x + 1)[1])(torch.zeros(3, 8))
    assert seen == [False]
