"""Losses are reduced within each member."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import Of, check

torch.manual_seed(3)
X = torch.randn(6, 4, dtype=torch.float64)
IMAGE = torch.randn(3, 4, 3, 2, dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, -100, 2, 0])
PIXELS = torch.randint(0, 3, (3, 3, 2))
WEIGHT = torch.tensor([0.3, 2.0, 1.0], dtype=torch.float64)
TARGET = torch.rand(6, 3, dtype=torch.float64)
SIGNS = TARGET.gt(0.5).double() * 2 - 1
SHARES = TARGET.softmax(1)

Loss = Callable[[Tensor], Tensor]
ON_ROWS: dict[str, Loss] = {
    "cross entropy": lambda x: F.cross_entropy(x, LABELS),
    "cross entropy sum": lambda x: F.cross_entropy(x, LABELS, reduction="sum"),
    "cross entropy none": lambda x: F.cross_entropy(x, LABELS, reduction="none"),
    "cross entropy weights": lambda x: F.cross_entropy(x, LABELS, weight=WEIGHT),
    "cross entropy ignores 2": lambda x: F.cross_entropy(x, LABELS.abs() % 3, weight=WEIGHT, ignore_index=2),
    "cross entropy ignores all": lambda x: F.cross_entropy(x, torch.full((6,), 1), ignore_index=1),
    "cross entropy smooth": lambda x: F.cross_entropy(x, LABELS, label_smoothing=0.1),
    "cross entropy smooth weights": lambda x: F.cross_entropy(x, LABELS.abs() % 3, weight=WEIGHT, label_smoothing=0.1),
    "cross entropy shares": lambda x: F.cross_entropy(x, SHARES),
    "cross entropy shares sum": lambda x: F.cross_entropy(x, SHARES, reduction="sum"),
    "cross entropy shares smooth": lambda x: F.cross_entropy(x, SHARES, WEIGHT, label_smoothing=0.2),
    "cross entropy own labels": lambda x: F.cross_entropy(x, x.argmax(1)),
    "cross entropy of one sample": lambda x: F.cross_entropy(x[0], LABELS[0]),
    "module": lambda x: nn.CrossEntropyLoss(label_smoothing=0.1)(x, LABELS),
    "nll": lambda x: F.nll_loss(x.log_softmax(1), LABELS),
    "mse": lambda x: F.mse_loss(x, TARGET),
    "mse sum": lambda x: F.mse_loss(x, TARGET, reduction="sum"),
    "mse none": lambda x: F.mse_loss(x, TARGET, reduction="none"),
    "mse target first": lambda x: F.mse_loss(TARGET, x),
    "mse own target": lambda x: F.mse_loss(x, x.detach().flip(0)),
    "l1": lambda x: F.l1_loss(x, TARGET),
    "smooth l1": lambda x: F.smooth_l1_loss(x, TARGET, beta=0.5),
    "huber": lambda x: F.huber_loss(x, TARGET, delta=0.3),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), TARGET),
    "bce with logits": lambda x: nn.BCEWithLogitsLoss()(x, TARGET),
    "bce with weights": lambda x: F.binary_cross_entropy_with_logits(x, TARGET, pos_weight=WEIGHT),
    "kl": lambda x: F.kl_div(x.log_softmax(1), SHARES, reduction="batchmean"),
    "kl sum": lambda x: F.kl_div(x.log_softmax(1), SHARES.log(), reduction="sum", log_target=True),
    "soft margin": lambda x: F.soft_margin_loss(x, SIGNS),
    "hinge embedding": lambda x: F.hinge_embedding_loss(x, SIGNS),
    "cosine embedding": lambda x: F.cosine_embedding_loss(x, TARGET, SIGNS[:, 0]),
    "triplet": lambda x: F.triplet_margin_loss(x, TARGET, -TARGET),
    "multi margin": lambda x: F.multi_margin_loss(x, LABELS.abs() % 3),
    "gaussian nll": lambda x: F.gaussian_nll_loss(x, TARGET, TARGET + 1),
    "poisson nll": lambda x: F.poisson_nll_loss(x, TARGET),
}
ON_PIXELS: dict[str, Loss] = {
    "mean": lambda x: F.cross_entropy(x, PIXELS),
    "weights": lambda x: F.cross_entropy(x, PIXELS, WEIGHT, ignore_index=1),
    "none": lambda x: F.cross_entropy(x, PIXELS, reduction="none"),
    "smooth": lambda x: F.cross_entropy(x, PIXELS, label_smoothing=0.1),
    "shares": lambda x: F.cross_entropy(x, F.one_hot(PIXELS, 3).movedim(-1, 1).double()),
}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", ON_ROWS)
def test_loss(name: str, members: int) -> None:
    check(lambda: nn.Linear(4, 3), X, fn=lambda m, x: ON_ROWS[name](m(x)), members=members)


@pytest.mark.parametrize("name", ON_PIXELS)
def test_loss_of_pixels(name: str) -> None:
    check(lambda: nn.Conv2d(4, 3, 1), IMAGE, fn=lambda m, x: ON_PIXELS[name](m(x)), members=3)


def test_ctc_loss() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        rows = model(x).view(6, 1, 3).log_softmax(-1)
        return F.ctc_loss(rows, torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))

    check(lambda: nn.Linear(4, 3), X, fn=loss, members=3)


def heads(tokens: int, count: int = 2) -> Tensor:
    return torch.randn(3, count, tokens, 4, dtype=torch.float64)


MASK = torch.rand(5, 7) > 0.4
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": torch.randn(5, 7, dtype=torch.float64)},
    "mask per head": {"attn_mask": torch.randn(2, 5, 7, dtype=torch.float64)},
    "mask per sample": {"attn_mask": torch.rand(3, 1, 5, 7) > 0.3},
    "mask of rank 4": {"attn_mask": torch.randn(1, 2, 5, 7, dtype=torch.float64)},
    "nothing allowed": {"attn_mask": torch.zeros(5, 7, dtype=torch.bool)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("p", [0.0, 1e-12], ids=["without dropout", "with a mask that keeps all"])
def test_attention(name: str, p: float) -> None:
    """A dropout rate of almost 0 takes the other way through the rule, and drops nothing."""

    def attend(model: nn.Module, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(model.q(q), model.k(k), k, dropout_p=p, **ATTENTION[name])

    make = lambda: Of(attend, q=nn.Linear(4, 4), k=nn.Linear(4, 4))  # noqa: E731
    check(make, heads(5), heads(7), members=3, tolerance=1e-9 if not p else 1e-8)


@pytest.mark.parametrize("p", [0.0, 1e-12])
def test_attention_of_grouped_queries(p: float) -> None:
    def attend(model: nn.Module, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(model(q), k, k, dropout_p=p, enable_gqa=True)

    check(lambda: nn.Linear(4, 4), heads(5, 4), heads(7, 2), fn=attend, members=3)


def test_attention_with_a_mask_of_the_members_own() -> None:
    def attend(model: nn.Module, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=model(q) @ k.transpose(-1, -2))

    check(lambda: nn.Linear(4, 4), heads(5), heads(7), fn=attend, members=3)


def test_attention_without_heads() -> None:
    def attend(model: nn.Module, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(model(q), q, q)

    check(lambda: nn.Linear(4, 4), heads(5)[:, 0], fn=attend, members=3)
