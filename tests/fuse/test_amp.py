"""Mixed precision: every function returns the dtype and the numbers that it returns for a member alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from twins import Of, build, compare_state, skip_if_torch_cannot_run

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.stacked import Stacked

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(1))
SERIES = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 1, 2, 0])
DTYPES = [torch.bfloat16, torch.float16]
ROUNDING = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""Of some operations in a row, relative to the largest element."""

Case = tuple[Callable[[], nn.Module], Tensor]


def after_linear(*layers: Callable[[], nn.Module]) -> Case:
    return lambda: nn.Sequential(nn.Linear(6, 4), *(layer() for layer in layers)), X


def after_conv(*layers: Callable[[], nn.Module]) -> Case:
    return lambda: nn.Sequential(nn.Conv2d(8, 4, 3), *(layer() for layer in layers)), IMAGES


def of(fn: Callable[[Any, Tensor], Any], x: Tensor = X) -> Case:
    """A function of a model `m`, of whose parts one is a linear layer, and one a vector in full precision."""
    return lambda: Of(lambda m, x: fn(m, x), a=nn.Linear(x.shape[-1], 4), s=nn.Parameter(torch.ones(4))), x


def loss(fn: Callable[[Tensor, Tensor], Tensor]) -> Case:
    return of(lambda m, x: fn(m.a(x), x[:, :4]))


def heads(x: Tensor) -> Tensor:
    return x.view(2, 5, 2, -1).transpose(1, 2)


def blended(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.addcmul(m.a(x), m.a(x), x[:, :4]), torch.lerp(x[:, :4], m.a(x).type_as(x), 0.5)


def written(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    half = torch.zeros_like(m.a(x))
    half[0] = m.a(x)[1]
    half[:, 1] = x[:, 0]
    full = half.new_zeros(4, 4, dtype=x.dtype)
    full[0] = m.a(x)[1]
    return half, full


def scaled_by_number(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    """A 0-dimensional tensor gives way to the others' type."""
    total = m.s.sum()
    return m.a(x) * total, m.a(x).sum() * total, m.a(x).mean() + m.a(x)


CASES: dict[str, Case] = {
    "linear": after_linear(),
    "linear-3d": (lambda: nn.Linear(8, 3), SERIES),
    "linear-no-bias": (lambda: nn.Linear(6, 3, bias=False), X),
    "bilinear": (lambda: Of(lambda m, x: m.a(x, x), a=nn.Bilinear(6, 6, 3)), X),
    "conv1d": (lambda: nn.Conv1d(5, 4, 3), SERIES),
    "conv2d": after_conv(nn.ReLU),
    "conv3d": (lambda: nn.Conv3d(2, 4, 1), IMAGES.expand(2, 2, 8, 6, 6)),
    "conv-transposed": (lambda: nn.ConvTranspose2d(8, 4, 3), IMAGES),
    "batch-norm": after_linear(lambda: nn.BatchNorm1d(4)),
    "batch-norm-first": (lambda: nn.BatchNorm1d(6), X),
    "batch-norm-2d": after_conv(lambda: nn.BatchNorm2d(4), nn.ReLU, lambda: nn.MaxPool2d(2)),
    "layer-norm": after_linear(lambda: nn.LayerNorm(4)),
    "layer-norm-no-bias": after_linear(lambda: nn.LayerNorm(4, bias=False)),
    "layer-norm-first": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4)), X),
    "group-norm": after_conv(lambda: nn.GroupNorm(2, 4)),
    "instance-norm": after_conv(lambda: nn.InstanceNorm2d(4, affine=True)),
    "rms-norm": after_linear(lambda: nn.RMSNorm(4)),
    "weight-norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), X),
    "softmax": after_linear(lambda: nn.Softmax(-1)),
    "log-softmax": after_linear(lambda: nn.LogSoftmax(-1)),
    "gelu": after_linear(nn.GELU),
    "prelu": after_linear(nn.PReLU),
    "glu": after_linear(nn.GLU),
    "average-pooling": after_conv(lambda: nn.AvgPool2d(2), lambda: nn.AdaptiveAvgPool2d(1), nn.Flatten),
    "upsampling": after_conv(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "embedding": (lambda: nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3)), LABELS),
    "embedding-bag": (lambda: nn.EmbeddingBag(3, 4), LABELS.view(2, 2)),
    "attention": (lambda: Of(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(8, 2, batch_first=True)), SERIES),
    "attention-of-half": of(lambda m, x: F.scaled_dot_product_attention(*[heads(m.a(x))] * 3, is_causal=True), SERIES),
    "attention-of-float": of(lambda m, x: F.scaled_dot_product_attention(*[heads(x * m.s.sum())] * 3), SERIES),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), SERIES),
    "lstm": (lambda: nn.LSTM(8, 4, 2, bidirectional=True), SERIES),
    "lstm-batch-first": (lambda: nn.LSTM(8, 4, batch_first=True), SERIES),
    "gru": (lambda: nn.GRU(8, 4, batch_first=True), SERIES),
    "rnn": (lambda: nn.RNN(8, 4, batch_first=True), SERIES),
    "lstm-cell": (lambda: nn.LSTMCell(6, 4), X),
    "gru-cell": (lambda: nn.GRUCell(6, 4), X),
    "matmul": of(lambda m, x: (m.a(x).T @ x, m.a(x) @ m.s, m.s @ m.s, torch.einsum("ij,ik->jk", m.a(x), x))),
    "products": of(lambda m, x: (torch.mm(m.a(x).T, x), torch.bmm(m.a(x)[None].mT, x[None]), torch.dot(m.s, m.s))),
    "added-products": of(lambda m, x: (torch.addmm(x, m.a(x), x[:4]), torch.baddbmm(x[None], m.a(x)[None], x[None]))),
    "outer": of(lambda m, x: (torch.outer(m.s, m.a(x)[0]), torch.mv(x[:, :4], m.s))),
    "parameter": of(lambda m, x: (m.a(x) * m.s, m.a(x) + m.s)),
    "number": of(scaled_by_number),
    "reductions": of(lambda m, x: (m.a(x).sum(), m.a(x).mean(0), m.a(x).pow(2).sum(-1), m.a(x).std(-1))),
    "products-of-elements": of(lambda m, x: (m.a(x).prod(-1), m.a(x).cumsum(-1), m.a(x).exp(), m.a(x).norm())),
    "joined": of(lambda m, x: (torch.cat([m.a(x), x], -1), torch.stack([m.a(x), x[:, :4]]))),
    "where": of(lambda m, x: (torch.where(x[:, :4] > 0, m.a(x), x[:, :4]), torch.where(x[:, :4] > 0, m.a(x), 0.0))),
    "blended": of(blended),
    "similarity": of(lambda m, x: (F.cosine_similarity(m.a(x), x[:, :4]), F.normalize(m.a(x)))),
    "written": of(written),
    "cross-entropy": loss(lambda y, x: F.cross_entropy(y, LABELS)),
    "cross-entropy-smooth": loss(lambda y, x: F.cross_entropy(y, LABELS, label_smoothing=0.1)),
    "cross-entropy-each": loss(lambda y, x: F.cross_entropy(y, LABELS, reduction="none")),
    "cross-entropy-weight": loss(lambda y, x: F.cross_entropy(y, LABELS, x.new_tensor([1.0, 2.0, 3.0, 4.0]))),
    "cross-entropy-soft": loss(lambda y, x: F.cross_entropy(y, x.softmax(-1))),
    "nll": loss(lambda y, x: F.nll_loss(y.log_softmax(-1), LABELS)),
    "mse": loss(F.mse_loss),
    "mse-of-half": loss(lambda y, x: F.mse_loss(y, y.detach() + 1)),
    "l1": loss(F.l1_loss),
    "l1-of-half": loss(lambda y, x: F.l1_loss(y, y.detach() + 1)),
    "smooth-l1": loss(F.smooth_l1_loss),
    "huber": loss(F.huber_loss),
    "huber-of-half": loss(lambda y, x: F.huber_loss(y, y.detach() + 1)),
    "binary": loss(lambda y, x: F.binary_cross_entropy_with_logits(y, x.sigmoid())),
    "kl": loss(lambda y, x: F.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean")),
    "soft-margin": loss(lambda y, x: F.soft_margin_loss(y, x.sign())),
    "poisson": loss(F.poisson_nll_loss),
    "gaussian": loss(lambda y, x: F.gaussian_nll_loss(y, x, torch.ones_like(x))),
    "triplet": loss(lambda y, x: F.triplet_margin_loss(y, x, -x)),
}
REFUSED = {(name, torch.float16) for name in ("lstm", "lstm-batch-first")}
"""What oneDNN does not have for a member alone."""
SUPPORTED = [(name, dtype) for name in CASES for dtype in DTYPES if (name, dtype) not in REFUSED]


def inputs(x: Tensor, members: int, own: bool) -> tuple[Any, list[Tensor]]:
    """What the array is given, and what its members are."""
    if not own:
        return x, [x] * members
    each = [x + 0.1 * b if x.is_floating_point() else x.roll(b, 0) for b in range(members)]
    return Stacked(torch.stack(each)), each


def check_half(array: ModelArray, twins: list[nn.Module], fn: Any, x: Tensor, own: bool, rounding: float) -> None:
    given, each = inputs(x, len(twins), own)
    expected = [pytree.tree_leaves(fn(twin, mine)) for twin, mine in zip(twins, each, strict=True)]
    result = pytree.tree_leaves(array.map(fn, given))
    for b, values in enumerate(expected):
        for i, (value, all_values) in enumerate(zip(values, result, strict=True)):
            near(all_values[b], value, rounding, f"output {i} of {b}")
    for leaves in (result, *expected):
        total = sum(leaf.float().sum() for leaf in leaves if leaf.requires_grad)
        if isinstance(total, Tensor):
            total.backward()
    columns = {path: data for path, data, _ in array.stacked_tensors()}
    for b, twin in enumerate(twins):
        for name, parameter in twin.named_parameters():
            grad = columns[name].grad
            assert (parameter.grad is None) == (grad is None), name
            if grad is not None:
                near(grad[b], parameter.grad, 4 * rounding, f"gradient of {name} of {b}")
        for name, buffer in twin.named_buffers():
            near(columns[name][b], buffer, rounding, f"buffer {name} of {b}")


def near(actual: Tensor, expected: Tensor, rounding: float, what: str) -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    scale = 1.0 + float(expected.detach().abs().max())
    assert float((actual - expected).detach().abs().max()) < rounding * scale, what


@pytest.mark.in_turns(7)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of RMSNorm, to a member alone too
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize(("name", "dtype"), SUPPORTED, ids=str)
def test_autocast(name: str, dtype: torch.dtype, own: bool) -> None:
    make, x = CASES[name]
    array, twins = fuse(build(make, 2, torch.float32)), build(make, 2, torch.float32)
    with torch.autocast("cpu", dtype):
        if "lstm" in name:
            skip_if_torch_cannot_run(twins[0], x)
        check_half(array, twins, lambda model, x: model(x), x, own, ROUNDING[dtype])


@pytest.mark.in_turns
@pytest.mark.parametrize(("name", "dtype"), SUPPORTED, ids=str)
def test_models_in_half_precision(name: str, dtype: torch.dtype) -> None:
    make, x = CASES[name]
    array, twins = fuse(build(make, 2, dtype)), build(make, 2, dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    check_half(array, twins, lambda model, x: model(x), x, True, ROUNDING[dtype])


def switching(model: Any, x: Tensor) -> tuple[Tensor, ...]:
    with torch.autocast("cpu", torch.bfloat16):
        half = model.a(x)
        with torch.autocast("cpu", enabled=False):
            full = F.linear(half.float(), model.a.weight[:, :4])
    return half, full, model.a(x)


@pytest.mark.parametrize("members", [1, 3])
def test_autocast_within_the_function(members: int) -> None:
    make = CASES["parameter"][0]
    array, twins = fuse(build(make, members, torch.float32)), build(make, members, torch.float32)
    check_half(array, twins, switching, X, False, ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("members", [1, 3])
def test_autocast_leaves_float64_alone(members: int) -> None:
    """What runs in float64 under autocast, which casts it not, is exact."""
    make = CASES["linear"][0]
    array, twins = fuse(build(make, members)), build(make, members)
    with torch.autocast("cpu", torch.bfloat16):
        check_half(array, twins, lambda model, x: model(x), X.double(), True, 1e-12)
    compare_state(array, twins)
