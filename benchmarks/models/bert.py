"""BERT of `transformers`, unmodified: Medium as a masked language model, Tiny as a classifier of sequences.

The sizes are those of Turc et al. (arXiv:1908.08962).
"""

import torch
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["medium", "tiny"]

LENGTH = 32
WORDS = 30522
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


def adadelta(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adadelta(net.parameters(), lr=factor)


def adam(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=5e-5 * factor)


def medium(full: bool) -> Workload:
    samples, width, words = (32, 512, WORDS) if full else (2, 64, 1000)
    return Workload(
        name="BERT-Medium",
        sizes=f"8 layers, 8 heads, d={width}, N={samples}, length {LENGTH}, {words} words, Adadelta",
        samples=samples,
        model=lambda: masked_model(width, words),
        batch=lambda: masked_batch(samples, words),
        phases=(Phase(loss, adadelta),),
        draws=True,
    )


def tiny(full: bool) -> Workload:
    samples, words = 8, WORDS if full else 1000
    return Workload(
        name="BERT-Tiny",
        sizes=f"2 layers, 2 heads, d=128, N={samples}, length {LENGTH}, {words} words, Adam",
        samples=samples,
        model=lambda: classifier(words),
        batch=lambda: (torch.randint(0, words, (samples, LENGTH)), torch.randint(0, 2, (samples,))),
        phases=(Phase(loss, adam),),
        draws=True,
    )
