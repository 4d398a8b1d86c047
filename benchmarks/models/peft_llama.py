"""Low-rank adapters by `peft` on a frozen Llama of `transformers`, the same for all members."""

import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["adapted", "workload"]

BASE_SEED = 1
ALPHAS = {4: 8, 8: 16, 16: 16, 32: 64}
"""Rank -> lora_alpha, of members that differ."""
SMALL = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
LARGE = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
"""Llama 3.2 1B."""


def adapted(rank: int, full: bool = False, checkpointed: bool = False) -> nn.Module:
    """The base, the same at each call, with an adapter, on torch's default device.

    Args:
        rank: Of the adapter.
        full: Whether the base is the large one, which is of bfloat16.
        checkpointed: Whether layers are computed again in the backward pass; the small one is of bfloat16 then.
    """
    from peft import LoraConfig, get_peft_model  # slow to import, for which other models do not wait
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if full or checkpointed else torch.float32)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(BASE_SEED)
            config = LlamaConfig(**(LARGE if full else SMALL), max_position_embeddings=512, use_cache=False)
            base: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(usual)
    if checkpointed:
        base.activation_checkpointing_enable()
    adapter = LoraConfig(
        r=rank, lora_alpha=ALPHAS[rank], target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for a property of models by its older name
        return get_peft_model(base, adapter).train()


def loss(net: Any, batch: Batch) -> Tensor:
    (tokens,) = batch
    logits = net(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3 * factor)


def tokens(samples: int, length: int) -> Batch:
    return (torch.randint(0, 1000, (samples, length)),)


def workload(full: bool, ranks: tuple[int, ...] = tuple(ALPHAS), batch_sizes: tuple[int, ...] = ()) -> Workload:
    """Members of these ranks; if they differ in batch sizes, on a checkpointed base of bfloat16."""
    samples, length = (4, 256) if full else (2, 32)
    samples, checkpointed = max((samples, *batch_sizes)), bool(batch_sizes)
    first, *others = (partial(adapted, rank, full, checkpointed) for rank in ranks)
    sizes = "16 layers, d=2048" if full else "4 layers, d=128"
    return Workload(
        sizes=f"{sizes}{', bfloat16, checkpointed' * checkpointed}, ranks {ranks}, N={samples}, length {length}, AdamW",
        samples=samples,
        model=first,
        batch=partial(tokens, samples, length),
        phases=(Phase(loss, adamw),),
        others=tuple(others),
        bfloat16=full or checkpointed,
        batch_sizes=batch_sizes,
    )
