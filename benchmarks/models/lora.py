"""Low-rank adapters (Hu et al., arXiv:2106.09685) on a frozen GPT-NeoX of `transformers`, the same for all members."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["adapted"]

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
