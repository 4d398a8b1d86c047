"""Low-rank adapters (Hu et al., arXiv:2106.09685) on a frozen GPT-NeoX of `transformers`, the same for all members."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["ranks", "workload"]

RANK = 8
RANKS = (4, 8, 16, 32)
SCALE = 2.0
BASE_SEED = 1


class LowRank(nn.Module):
    """W x + b + s B A x, of which A and B are trained; B begins at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + SCALE * self.up(self.down(x))


def adapted(layers: int, width: int, words: int, rank: int) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM  # slow to import, for which other models do not wait

    config = GPTNeoXConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        intermediate_size=4 * width,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(BASE_SEED)
        net: Any = GPTNeoXForCausalLM(config).requires_grad_(False)
    for layer in net.gpt_neox.layers:
        layer.attention.query_key_value = LowRank(layer.attention.query_key_value, rank)
    return net.train()


def loss(net: Any, batch: Batch) -> Tensor:
    tokens = batch[0]
    logits = net(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adam(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-3 * factor)


def workload(full: bool) -> Workload:
    return _workload(full, "LoRA on GPT-NeoX", (RANK,))


def ranks(full: bool) -> Workload:
    """Members that differ in the rank, and so are one array in the base alone."""
    return _workload(full, "LoRA on GPT-NeoX, several ranks", RANKS)


def _workload(full: bool, name: str, of: tuple[int, ...]) -> Workload:
    samples, length, layers, width, words = (8, 128, 12, 768, 50304) if full else (2, 32, 4, 128, 1000)
    first, *others = (partial(adapted, layers, width, words, rank) for rank in of)
    written = f"rank {of[0]}" if len(of) == 1 else f"ranks {', '.join(map(str, of))}"
    return Workload(
        name=name,
        sizes=f"{layers} layers, d={width}, {written}, N={samples}, length {length}, {words} words, Adam",
        samples=samples,
        model=first,
        batch=lambda: (torch.randint(0, words, (samples, length)),),
        phases=(Phase(loss, adam),),
        others=tuple(others),
    )
