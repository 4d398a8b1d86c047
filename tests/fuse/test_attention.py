"""Attention, and torch's modules with attention: outputs and gradients equal those of each member alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from looped_functions import in_loops
from shared_or_stacked import check_mixes
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from twins import Of, build, check, check_table, close, compare

from shoal.fuse.api import fuse

torch.manual_seed(7)
HEADS = torch.randn(3, 4, 5, 2, dtype=torch.float64)
TOKENS = torch.randint(0, 11, (3, 5))
MEMORY = torch.randint(0, 11, (3, 4))
CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
PADDED = torch.arange(5).ge(torch.tensor([[5], [3], [4]]))
SDPA = F.scaled_dot_product_attention


def _own_bias(m: Any, *shape: int) -> Tensor:
    """A float mask of each member's own, of any shape."""
    values: Tensor = m.w.weight.sum() * torch.linspace(0, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return values


ATTENTION: dict[str, Callable[[Any, Tensor], Any]] = {
    "plain": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x)),
    "causal": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), is_causal=True),
    "causal, more keys than queries": lambda m, x: SDPA(m.w(x[..., :3, :]), m.w(x), m.v(x), is_causal=True),
    "scale": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), scale=0.3),
    "bool mask": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), CAUSAL),
    "float mask": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), CAUSAL.double()),
    "own float mask": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), _own_bias(m, 5, 5)),
    "own bool mask": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), _own_bias(m, 5, 5).sin() > -0.9),
    "own mask of keys": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), _own_bias(m, 1, 5)),
    "all masked": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), torch.zeros(5, 5, dtype=torch.bool)),
    "shared query": lambda m, x: SDPA(x, m.w(x), m.v(x)),
    "shared key": lambda m, x: SDPA(m.w(x), x, m.v(x)),
    "shared value": lambda m, x: SDPA(m.w(x), m.v(x), x),
    "shared key and value": lambda m, x: SDPA(m.w(x), x, x),
    "only the mask is own": lambda m, x: SDPA(x, x, x, _own_bias(m, 5, 5)),
    "other width of values": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x)[..., :1]),
}


def check_ruled(make: Callable[[], nn.Module], *batch: Any, **options: Any) -> None:
    """Compare with the members, and see that every function had a rule, and the rule no error."""
    with in_loops() as found:
        check(make, *batch, **options)
    assert not found.keys() - {"_nested_tensor_from_mask_left_aligned"}  # a question about a shared mask


RANKS = {2: HEADS[0, 0], 3: HEADS[0], 4: HEADS, 5: HEADS.view(1, 3, 4, 5, 2)}


def _of_two(fn: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Of(fn, w=nn.Linear(2, 2), v=nn.Linear(2, 2))


def test_scaled_dot_product_of_all_ranks() -> None:
    def run(m: Any, inputs: dict[int, Tensor]) -> dict[str, Tensor]:
        return {f"{name} of {rank} axes": fn(m, x) for rank, x in inputs.items() for name, fn in ATTENTION.items()}

    check_ruled(_of_two(run), RANKS, members=3, steps=1)


MIXES: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v, mask: SDPA(q, k, v) + mask.sum(),
    "masked": lambda q, k, v, mask: SDPA(q, k, v, mask),
    "masked by samples": lambda q, k, v, mask: SDPA(q, k, v, mask.repeat(3, 1, 1, 1)),
    "masked, without axes of samples and heads": lambda q, k, v, mask: SDPA(q[0, 0], k[0, 0], v[0, 0], mask),
    "groups": lambda q, k, v, mask: SDPA(q, k[:, :1], v[:, :2], mask, enable_gqa=True),
}


@pytest.mark.parametrize("name", MIXES)
def test_whatever_is_shared(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(2, *HEADS.shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = torch.randn(2, 5, 5, generator=generator, dtype=torch.float64)
    with in_loops() as found:
        check_mixes(MIXES[name], *map(nn.Parameter, columns), nn.Parameter(mask))
    assert not found.keys() - {"repeat"}


BATCHED: dict[str, Callable[[Any, Tensor], Any]] = {
    "mask of samples": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), ~PADDED[:, None, None]),
    "mask of heads": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), HEADS[:1, :, :, :1].expand(1, 4, 5, 5)),
    "full mask": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), HEADS.sum(-1, keepdim=True).expand(3, 4, 5, 5)),
    "own mask of samples": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), _own_bias(m, 3, 1, 1, 5)),
    "own mask of heads": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), _own_bias(m, 4, 5, 5)),
    "own full mask": lambda m, x: SDPA(m.w(x), m.w(x), m.v(x), _own_bias(m, 3, 4, 5, 5)),
    "one sample of keys for all": lambda m, x: SDPA(m.w(x), m.w(x[:1]), m.v(x[:1])),
    "keys without the axis of samples": lambda m, x: SDPA(m.w(x), m.w(x[0]), m.v(x[0])),
    "heads in groups": lambda m, x: SDPA(m.w(x), m.w(x[:, :2]), m.v(x[:, :2]), enable_gqa=True),
    "causal heads in groups": lambda m, x: SDPA(m.w(x), m.w(x[:, :2]), m.v(x[:, :2]), is_causal=True, enable_gqa=True),
    "masked heads in groups": lambda m, x: SDPA(
        m.w(x), m.w(x[:, :1]), m.v(x[:, :1]), ~PADDED[:, None, None], enable_gqa=True
    ),
    "heads split from features": lambda m, x: SDPA(*[_split(m.w(x.transpose(1, 2)))] * 3),
}


def _split(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


@pytest.mark.parametrize("members", [1, 3])
def test_scaled_dot_product_of_batches_of_heads(members: int) -> None:
    check_ruled(_of_two(lambda m, x: {name: fn(m, x) for name, fn in BATCHED.items()}), HEADS, members=members)


DROPPED: dict[str, Callable[[Any, Tensor, float], Any]] = {
    "plain": lambda m, x, p: SDPA(m.w(x), m.w(x), m.v(x), dropout_p=p),
    "causal": lambda m, x, p: SDPA(m.w(x), m.w(x), m.v(x), dropout_p=p, is_causal=True),
    "mask": lambda m, x, p: SDPA(m.w(x), m.w(x), m.v(x), ~PADDED[:, None, None], dropout_p=p),
    "own mask": lambda m, x, p: SDPA(m.w(x), m.w(x), m.v(x), _own_bias(m, 3, 4, 5, 5), p, scale=0.3),
    "all masked": lambda m, x, p: SDPA(m.w(x), m.w(x), m.v(x), torch.zeros(5, 5, dtype=torch.bool), p),
    "heads in groups": lambda m, x, p: SDPA(m.w(x), m.w(x[:, :2]), m.v(x[:, :2]), dropout_p=p, enable_gqa=True),
    "one head": lambda m, x, p: SDPA(m.w(x[0, 0]), m.w(x[0, 0]), m.v(x[0, 0]), dropout_p=p),
    "shared": lambda m, x, p: m.w(SDPA(x, x, x, dropout_p=p)),
}


def _of_all(rate: float, *without: str) -> Callable[[], nn.Module]:
    return _of_two(lambda m, x: {name: fn(m, x, rate) for name, fn in DROPPED.items() if name not in without})


def test_dropout_of_weights_is_the_members_own() -> None:
    _alone_and_together(_of_all(0.4, "all masked"), HEADS)


def test_attention_with_dropout_is_that_of_torch_but_for_the_dropout() -> None:
    """Where dropout acts, the rule computes the weights by itself: at a rate next to zero they have to be torch's."""
    outputs = fuse(build(_of_all(1e-30), 3), range(3))(HEADS)
    compare(outputs, [twin(HEADS) for twin in build(_of_all(0.0), 3)])


def _alone_and_together(make: Callable[[], nn.Module], *batch: Tensor, members: int = 3) -> None:
    """A member in company does what it does in an array of its own."""
    array = fuse(build(make, members), range(members))
    first, second = (pytree.tree_leaves(array(*batch)) for _ in range(2))
    for b, model in enumerate(build(make, members)):
        alone = fuse([model], [b])
        for together in (first, second):
            for mine, own in zip(together, pytree.tree_leaves(alone(*batch)), strict=True):
                close(mine[b], own[0], f"member {b}")
    for one, other in zip(first, second, strict=True):
        assert not torch.allclose(one, other), "steps draw alike"
    sum(leaf.sum() for leaf in second).backward()
    assert all(bool(p.grad.isfinite().all()) for p in array.parameters() if p.grad is not None)


HEADED: dict[str, tuple[dict[str, Any], Callable[[Any, Tensor], Any]]] = {
    "self": ({}, lambda m, x: m.a(x, x, x)),
    "sequence first": ({"batch_first": False}, lambda m, x: m.a(x, x, x)),
    "without weights": ({}, lambda m, x: m.a(x, x, x, need_weights=False)[0]),
    "weights of heads": ({}, lambda m, x: m.a(x, x, x, average_attn_weights=False)),
    "padding": ({}, lambda m, x: m.a(x, x, x, key_padding_mask=PADDED)),
    "padding, without weights": ({}, lambda m, x: m.a(x, x, x, key_padding_mask=PADDED, need_weights=False)[0]),
    "float padding": ({}, lambda m, x: m.a(x, x, x, key_padding_mask=PADDED.double() * -2.0)),
    "bool mask": ({}, lambda m, x: m.a(x, x, x, attn_mask=~CAUSAL)),
    "mask and padding": ({}, lambda m, x: m.a(x, x, x, attn_mask=~CAUSAL, key_padding_mask=PADDED)),
    "mask and padding, without weights": (
        {},
        lambda m, x: m.a(x, x, x, attn_mask=~CAUSAL, key_padding_mask=PADDED, need_weights=False)[0],
    ),
    "mask of samples and heads": ({}, lambda m, x: m.a(x, x, x, attn_mask=_triangle().repeat(6, 1, 1))),
    "mask of samples and heads, without weights": (
        {},
        lambda m, x: m.a(x, x, x, attn_mask=_triangle().repeat(6, 1, 1), need_weights=False)[0],
    ),
    "own mask": ({}, lambda m, x: m.a(x, x, x, attn_mask=_triangle() * m.e.weight.sum().sigmoid().clamp(0.1))),
    "causal": ({}, lambda m, x: m.a(x, x, x, attn_mask=_triangle(), is_causal=True, need_weights=False)[0]),
    "causal, with weights": ({}, lambda m, x: m.a(x, x, x, attn_mask=_triangle(), is_causal=True)),
    "one sample": ({}, lambda m, x: m.a(x[0], x[1], x[1])),
    "one sample, padded": ({}, lambda m, x: m.a(x[0], x[1], x[1], key_padding_mask=PADDED[1])),
    "other widths": ({"kdim": 6, "vdim": 5}, lambda m, x: m.a(x, m.k(x), m.v(x))),
    "other widths, without weights": (
        {"kdim": 6, "vdim": 5},
        lambda m, x: m.a(x, m.k(x), m.v(x), need_weights=False)[0],
    ),
    "without bias": ({"bias": False}, lambda m, x: m.a(x, x, x)),
    "bias of keys and values": ({"add_bias_kv": True}, lambda m, x: m.a(x, x, x, key_padding_mask=PADDED)),
    "zero attention": ({"add_zero_attn": True}, lambda m, x: m.a(x, x, x, attn_mask=~CAUSAL)),
    "both added": (
        {"add_zero_attn": True, "add_bias_kv": True},
        lambda m, x: m.a(x, x, x, attn_mask=_triangle(), need_weights=False)[0],
    ),
    "across": ({}, lambda m, x: m.a(x, x.flip(1)[:, :3], x[:, :3])),
    "query that all share": ({}, lambda m, x: m.a(torch.ones(3, 5, 8, dtype=x.dtype), x, x)),
    "all inputs shared": ({}, lambda m, x: m.a(*[torch.ones(3, 5, 8, dtype=x.dtype).cumsum(1).sin()] * 3)),
}


def _triangle() -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)


def _headed(name: str, train: bool, dropout: float = 0.0) -> Callable[[], nn.Module]:
    options, fn = HEADED[name]

    def make() -> nn.Module:
        attention = nn.MultiheadAttention(8, 2, dropout, **{"batch_first": True, **options})
        parts = {"e": nn.Embedding(11, 8), "k": nn.Linear(8, 6), "v": nn.Linear(8, 5)}
        return Of(lambda m, x: fn(m, m.e(x)), a=attention, **parts).train(train)

    return make


def _table(train: bool) -> dict[str, tuple[Any, ...]]:
    return {name: (_headed(name, train), TOKENS) for name in HEADED}


LOOPS = ["_nested_tensor_from_mask_left_aligned"]
"""A question about a shared mask."""


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["train", "eval"])
def test_multi_head_attention(train: bool) -> None:
    check_table(_table(train), loops=LOOPS, members=[2], steps=1)


def test_multi_head_attention_without_gradients() -> None:
    """In evaluation without gradients, torch has a path of its own for the members alone."""
    with torch.no_grad():
        check_table(_table(train=False), loops=LOOPS, members=[2], steps=1)


def test_dropout_of_multi_head_attention_is_the_members_own() -> None:
    makes = [
        _headed(name, train=True, dropout=0.3)
        for name in ("self", "without weights", "mask and padding, without weights", "one sample")
    ]

    def make() -> nn.Module:
        models = nn.ModuleList(make() for make in makes)
        return Of(lambda m, x: [_first(model(x)) for model in m.models], models=models)

    _alone_and_together(make, TOKENS)


def _first(result: Any) -> Tensor:
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


Built = tuple[Callable[..., nn.Module], Callable[[Any, Tensor, Tensor], Any]]


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


TRANSFORMERS: dict[str, Built] = {
    "encoder layer": (
        lambda **o: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **o),
        lambda m, x, y: m.t(x),
    ),
    "encoder layer, sequence first, gelu": (
        lambda **o: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", **o),
        lambda m, x, y: m.t(x, src_mask=_triangle()[:3, :3]),
    ),
    "encoder layer, masks": (
        lambda **o: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **o),
        lambda m, x, y: m.t(x, src_mask=~CAUSAL, src_key_padding_mask=PADDED),
    ),
    "decoder layer": (
        lambda **o: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, **o),
        lambda m, x, y: m.t(x, y, tgt_mask=_triangle(), tgt_is_causal=True, memory_key_padding_mask=PADDED[:, :4]),
    ),
    "encoder": (_encoder, lambda m, x, y: m.t(x, mask=~CAUSAL)),
    "encoder, causal": (_encoder, lambda m, x, y: m.t(x, mask=_triangle(), is_causal=True)),
    "encoder, padding": (_encoder, lambda m, x, y: m.t(x, src_key_padding_mask=PADDED)),
    "encoder, one sample": (_encoder, lambda m, x, y: m.t(x[0])),
    "decoder": (
        lambda **o: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True, **o), 2),
        lambda m, x, y: m.t(x, y, tgt_mask=~CAUSAL, tgt_key_padding_mask=PADDED),
    ),
    "transformer": (
        lambda **o: nn.Transformer(8, 2, 1, 1, 16, batch_first=True, **o),
        lambda m, x, y: m.t(
            y, x, tgt_mask=_triangle(), src_key_padding_mask=PADDED[:, :4], memory_key_padding_mask=PADDED[:, :4]
        ),
    ),
}


def _transformer(name: str, train: bool = True, **options: Any) -> Callable[[], nn.Module]:
    kind, fn = TRANSFORMERS[name]

    def make() -> nn.Module:
        model = Of(lambda m, x, y: fn(m, m.e(x), m.e(y)), e=nn.Embedding(11, 8), t=kind(**{"dropout": 0.0, **options}))
        return model.train(train)

    return make


NESTED = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors is in prototype stage"
)
"""What torch says of the members' own run: it leaves padding out where it can."""


MODES = [("train", False), ("eval without gradients", True)]
MORE = [("train", True), ("eval", False), ("eval", True), ("eval without gradients", False)]


@NESTED
@pytest.mark.parametrize(
    ("mode", "norm_first"), [*MODES, *(pytest.param(*mode, marks=pytest.mark.thorough) for mode in MORE)]
)
def test_transformers(mode: str, norm_first: bool) -> None:
    cases = {
        name: (_transformer(name, train=mode == "train", norm_first=norm_first), TOKENS, MEMORY)
        for name in TRANSFORMERS
    }
    with torch.set_grad_enabled(mode != "eval without gradients"):
        check_table(cases, loops=LOOPS, members=[2], steps=1)


QUICK = ("encoder layer", "decoder layer", "transformer")


@NESTED
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in TRANSFORMERS]
)
def test_dropout_of_transformers_is_the_members_own(name: str) -> None:
    _alone_and_together(_transformer(name, dropout=0.2), TOKENS, MEMORY, members=2)


@NESTED
@pytest.mark.parametrize("members", [1, 3])
def test_padding_that_torch_leaves_out(members: int) -> None:
    """An encoder alone, without gradients, packs what is not padding; what stands in its place is not a result."""

    def make() -> nn.Module:
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        return Of(lambda m, x: m.t(m.e(x), src_key_padding_mask=PADDED), e=nn.Embedding(11, 8), t=encoder).eval()

    array, twins = fuse(build(make, members)), build(make, members)
    with torch.no_grad():
        outputs = array(TOKENS)
        for b, twin in enumerate(twins):
            own = twin(TOKENS)
            assert not own[PADDED].any(), "the path without padding is not taken"
            close(outputs[b][~PADDED], own[~PADDED], f"member {b}")
