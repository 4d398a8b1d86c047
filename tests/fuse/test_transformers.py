"""Unmodified models of `transformers`, made from configurations, nothing downloaded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import check

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(3, 7, dtype=torch.int64)
MASK[1, 4:] = 0
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForSequenceClassification(config)


def neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(**SIZES, max_position_embeddings=32, bos_token_id=1, eos_token_id=2)
    return transformers.GPTNeoXForCausalLM(config)


def classify(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    out = model(input_ids=tokens, attention_mask=MASK, labels=torch.tensor([0, 1, 0]))
    return out.loss, out.logits


def predict(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def predict_by_its_own_loss(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "bert": (bert, classify),
    "gpt-neox": (neox, predict),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients(name: str, members: int) -> None:
    make, fn = MODELS[name]
    check(make, TOKENS, fn=fn, members=members)


@pytest.mark.filterwarnings("default")
def test_whole_outputs() -> None:
    check(bert, TOKENS, fn=lambda model, tokens: dict(model(tokens, output_hidden_states=True)), members=2)


@pytest.mark.filterwarnings("default")
def test_a_loss_that_is_computed_in_float32_agrees_to_its_accuracy() -> None:
    check(neox, TOKENS, fn=predict_by_its_own_loss, members=2, tolerance=1e-6)
