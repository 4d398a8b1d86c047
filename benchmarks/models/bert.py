"""BERT of `transformers`, unmodified: Medium as a masked language model, Tiny as a classifier of sequences.

The sizes are those of Turc et al. (arXiv:1908.08962).
"""

from functools import partial

import torch
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload, adadelta

__all__ = ["classifier", "workload"]

LENGTH = 32
MASKED = 0.15
NOT_ASKED = -100


def masked_model(width: int, words: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM  # slow to import, for which other models do not wait

    config = BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=4 * width,
    )
    return BertForMaskedLM(config).train()


def classifier(words: int) -> nn.Module:
    """BERT-Tiny."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=words, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    return BertForSequenceClassification(config).train()


def masked_batch(samples: int, words: int) -> Batch:
    tokens = torch.randint(0, words, (samples, LENGTH))
    asked = torch.rand(samples, LENGTH) < MASKED
    asked[0, 0] = True
    return tokens, tokens.masked_fill(~asked, NOT_ASKED)


def loss(net: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = batch
    return net(input_ids=tokens, labels=labels).loss


def workload(full: bool) -> Workload:
    samples, width, words = (32, 512, 30522) if full else (2, 64, 1000)
    return Workload(
        name="BERT-Medium",
        sizes=f"8 layers, 8 heads, d={width}, N={samples}, length {LENGTH}, {words} words, Adadelta",
        samples=samples,
        model=partial(masked_model, width, words),
        batch=partial(masked_batch, samples, words),
        phases=(Phase(loss, adadelta),),
        draws=True,
    )
