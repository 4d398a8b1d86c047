"""Linear layers of different sizes run as one product, by each lowering, as each member's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
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


@pytest.mark.parametrize("sizes", ["outputs", "inputs"])
def test_grouped_products_of_bfloat16_round_once(sizes: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(*((16, rank) if sizes == "outputs" else (rank, 16)), bias=False).bfloat16() for rank in RANKS]
    padded = PaddedLinear.of(layers)
    assert padded is not None
    weights = [layer.weight for layer in layers]
    x = torch.randn(len(RANKS), 5, 16 if sizes == "outputs" else max(RANKS)).bfloat16().requires_grad_()
    found, expected = padded._grouped_product(x, *weights), padded._loop(x, *weights)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    both = [torch.autograd.grad(out, [x, *weights], gradient) for out in (found, expected)]
    torch.testing.assert_close(*both)


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
        (8, torch.bfloat16, False, True),
        (4, torch.bfloat16, False, False),
    ],
    ids=["float32", "rows of 24 bytes", "float64", "autocast", "bfloat16", "rows of 8 bytes"],
)
def test_where_a_grouped_product_is_a_candidate(width: int, dtype: torch.dtype, autocast: bool, grouped: bool) -> None:
    padded = PaddedLinear.of([nn.Linear(width, rank, bias=False) for rank in RANKS])
    assert padded is not None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert ("grouped" in padded._lowerings_for(torch.zeros(3, width, dtype=dtype))) == grouped


@pytest.mark.parametrize(
    ("capability", "dtype", "grouped"),
    [
        ((9, 0), torch.bfloat16, True),
        ((10, 0), torch.bfloat16, True),
        ((8, 0), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, False),
        ((9, 0), torch.float32, False),
    ],
)
def test_a_gpu_has_a_grouped_product_where_torch_has_a_kernel_for_it(
    capability: tuple[int, int], dtype: torch.dtype, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it copies the ends of the groups to the host, and runs one product after another."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    padded = PaddedLinear.of([nn.Linear(8, rank, bias=False) for rank in RANKS])
    assert padded is not None
    with FakeTensorMode():
        x = torch.empty(3, 8, dtype=dtype, device="cuda")
    assert ("grouped" in padded._lowerings_for(x)) == grouped


@pytest.mark.parametrize("sizes", ["outputs", "inputs"])
def test_grouped_products_pass_the_checks_of_torch_for_a_gpu(sizes: str) -> None:
    """Those of tensors without data: of bfloat16 alone, in which all strides are multiples of 16 bytes."""
    layers = [nn.Linear(*((16, rank) if sizes == "outputs" else (rank, 16)), bias=False) for rank in RANKS]
    padded = PaddedLinear.of([layer.to("meta", torch.bfloat16) for layer in layers])
    assert padded is not None
    x = torch.empty(len(RANKS), 5, 16 if sizes == "outputs" else max(RANKS), dtype=torch.bfloat16, device="meta")
    out = padded._grouped_product(x.requires_grad_(), *[layer.weight for layer in layers])
    out.sum().backward()
    assert x.grad is not None
    assert out.shape == (len(RANKS), 5, max(RANKS) if sizes == "outputs" else 16)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        F.grouped_mm(x, out.new_empty(x.shape[-1], 20), offs=torch.empty(4, dtype=torch.int32, device="meta"))


def test_layers_that_differ_in_both_sizes_run_member_by_member() -> None:
    assert PaddedLinear.of([nn.Linear(size, size, bias=False) for size in (2, 3)]) is None


def test_a_trace_holds_no_grouped_product() -> None:
    """Torch's shape function of it takes bfloat16 alone, so that the trace could not be compiled."""
    padded = PaddedLinear.of([nn.Linear(8, rank, bias=False) for rank in RANKS])
    assert padded is not None
    seen = []
    make_fx(lambda x: (seen.append("grouped" in padded._lowerings_for(x)), x + 1)[1])(torch.zeros(3, 8))
    assert seen == [False]
