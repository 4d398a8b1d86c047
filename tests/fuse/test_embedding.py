"""Embeddings: outputs, gradients and tables equal those of each member alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import Make, Of, check, check_table

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.stacked import NeedsMemberError, Stacked

torch.manual_seed(7)
TOKENS = torch.randint(0, 11, (3, 5))
FLAT = TOKENS.flatten()
OFFSETS = torch.tensor([0, 4, 4, 9])
SCALES = torch.rand(3, 5, dtype=torch.float64)


def bag(**options: Any) -> Make:
    return lambda: nn.EmbeddingBag(11, 4, **options)


def own_tokens(layer: Make, vocabulary: int = 5) -> Make:
    """Each member looks up indices of its own."""

    def run(m: Any, tokens: Tensor) -> Any:
        return m.layer(m.first(tokens).argmax(-1))

    return lambda: Of(run, first=nn.Embedding(11, vocabulary), layer=layer())


CASES: dict[str, tuple[Make, tuple[Tensor, ...]]] = {
    "embedding": (lambda: nn.Embedding(11, 4), (TOKENS,)),
    "of one token": (lambda: nn.Embedding(11, 4), (TOKENS[0, 0],)),
    "of short integers": (lambda: nn.Embedding(11, 4), (TOKENS.int(),)),
    "of no tokens": (lambda: nn.Embedding(11, 4), (TOKENS[:0],)),
    "of own tokens": (own_tokens(lambda: nn.Embedding(5, 4)), (TOKENS,)),
    "padding": (lambda: nn.Embedding(11, 4, padding_idx=int(TOKENS[0, 0])), (TOKENS,)),
    "padding from the end": (lambda: nn.Embedding(11, 4, padding_idx=-1), (torch.tensor([10, 3, 10]),)),
    "padding of own tokens": (own_tokens(lambda: nn.Embedding(5, 4, padding_idx=2)), (TOKENS,)),
    "max norm": (lambda: nn.Embedding(11, 4, max_norm=0.5), (TOKENS,)),
    "max norm of another kind": (lambda: nn.Embedding(11, 4, max_norm=0.5, norm_type=1.0), (TOKENS,)),
    "max norm of own tokens": (own_tokens(lambda: nn.Embedding(5, 4, max_norm=0.5)), (TOKENS,)),
    "scaled by frequency": (lambda: nn.Embedding(11, 4, scale_grad_by_freq=True), (TOKENS,)),
    "scaled by frequency of own": (own_tokens(lambda: nn.Embedding(5, 4, scale_grad_by_freq=True)), (TOKENS,)),
    "bag mean": (bag(), (TOKENS,)),
    "bag sum": (bag(mode="sum"), (TOKENS,)),
    "bag max": (bag(mode="max"), (TOKENS,)),
    "bag of own tokens": (own_tokens(lambda: nn.EmbeddingBag(5, 4)), (TOKENS,)),
    "bag offsets": (bag(), (FLAT, OFFSETS)),
    "bag offsets sum": (bag(mode="sum"), (FLAT, OFFSETS)),
    "bag offsets max": (bag(mode="max"), (FLAT, OFFSETS)),
    "bag offsets and the end": (bag(include_last_offset=True), (FLAT, torch.tensor([0, 4, 4, 15]))),
    "bag offsets and the end, max": (bag(include_last_offset=True, mode="max"), (FLAT, torch.tensor([0, 7, 15]))),
    "bag scales": (bag(mode="sum"), (TOKENS, None, SCALES)),
    "bag offsets and scales": (bag(mode="sum"), (FLAT, OFFSETS, SCALES.flatten())),
    "bag padding": (bag(padding_idx=int(TOKENS[1, 1])), (TOKENS,)),
    "bag padding sum": (bag(padding_idx=int(TOKENS[1, 1]), mode="sum"), (TOKENS,)),
    "bag padding max": (bag(padding_idx=int(TOKENS[1, 1]), mode="max"), (TOKENS,)),
    "bag padding from the end": (bag(padding_idx=-1), (torch.tensor([[10, 3], [10, 10]]),)),
    "bag padding of own tokens": (own_tokens(lambda: nn.EmbeddingBag(5, 4, padding_idx=2)), (TOKENS,)),
    "bag max norm": (bag(max_norm=0.5, padding_idx=int(TOKENS[1, 1])), (TOKENS,)),
}  # fmt: skip


def test_embeddings() -> None:
    check_table({name: (make, *batch) for name, (make, batch) in CASES.items()}, loops=())


BY_LOOP: dict[str, Make] = {
    "bag scaled by frequency": bag(scale_grad_by_freq=True),
    "own max norm": lambda: nn.Embedding(11, 4, max_norm=0.5 + torch.initial_seed() % 4),
    "own max norm of bags": lambda: nn.EmbeddingBag(11, 4, max_norm=0.5 + torch.initial_seed() % 4),
}


def test_embeddings_by_loop() -> None:
    check_table({name: (make, TOKENS) for name, make in BY_LOOP.items()}, members=[3])


def test_offsets_of_the_members_own() -> None:
    def run(m: Any, flat: Tensor) -> Any:
        return m.bag(flat, torch.stack([torch.zeros(3), m.w.new_tensor([1, 2, 4]) + m.w.sum().gt(7)])[:, 0].long())

    check(lambda: Of(run, bag=nn.EmbeddingBag(11, 4), w=nn.Parameter(torch.randn(3))), FLAT, members=3)


@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
@pytest.mark.parametrize(("member", "index"), [(0, 6), (2, -1), (1, 11)])
def test_an_index_outside_of_the_table_is_an_error_and_no_row_of_another_member(
    function: Any, member: int, index: int
) -> None:
    indices = torch.zeros(3, 1, 2, dtype=torch.int64)
    indices[member] = index
    with pytest.raises((IndexError, RuntimeError), match=r"range|Expected idx"):
        function(Stacked(indices), Stacked(torch.randn(3, 6, 4)))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_and_frozen_tables_have_none(kind: Any) -> None:
    models = [kind(11, 4, sparse=True) for _ in range(2)]
    expected = models[1](TOKENS)
    with pytest.raises(FusionError, match="pass sparse=False"):
        fuse(models)(TOKENS)
    frozen = fuse([model.requires_grad_(False) for model in models])
    assert torch.equal(frozen(TOKENS)[1], expected)


def test_a_shared_table_is_not_renormalised() -> None:
    table = torch.ones(6, 4)
    for function in (F.embedding, F.embedding_bag):
        with pytest.raises(NeedsMemberError, match="changes a weight that all members share"):
            function(Stacked(torch.zeros(2, 3, 3, dtype=torch.int64)), table, max_norm=0.1)
    assert torch.equal(table, torch.ones(6, 4))
