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


def bert(kind: str, words: int, width: int, layers: int, heads: int) -> nn.Module:
    import transformers  # slow to import, for which other models do not wait

    config = transformers.BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width,
    )  # fmt: skip
    return getattr(transformers, kind)(config).train()


def classifier(words: int) -> nn.Module:
    """BERT-Tiny."""
    return bert("BertForSequenceClassification", words, width=128, layers=2, heads=2)


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
        sizes=f"8 layers, 8 heads, d={width}, N={samples}, length {LENGTH}, {words} words, Adadelta",
        samples=samples,
        model=partial(bert, "BertForMaskedLM", words, width, layers=8, heads=8),
        batch=partial(masked_batch, samples, words),
        phases=(Phase(loss, adadelta),),
        draws=True,
    )
