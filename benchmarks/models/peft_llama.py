"""Low-rank adapters by `peft` on a frozen Llama of `transformers`, the same for all members."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["batches", "mixed", "workload"]

BASE_SEED = 1
ALPHAS = {4: 8, 8: 16, 16: 16, 32: 64}
"""Rank -> lora_alpha, of members that differ."""
BATCH_SIZES = (2, 4, 8)


@dataclass(frozen=True)
class Base:
    """The frozen model: of Llama 3.2 1B's sizes in bfloat16 (`full`), or small.

    Args:
        full: Whether it is the large one.
        checkpointed: Whether layers are computed again in the backward pass; the small one is of bfloat16 then.
    """

    full: bool
    checkpointed: bool = False

    def __call__(self) -> nn.Module:
        """The model, the same at each call, on torch's default device."""
        from transformers import LlamaConfig, LlamaForCausalLM  # slow to import, for which other models do not wait

        config = LlamaConfig(
            vocab_size=128256 if self.full else 1000,
            hidden_size=2048 if self.full else 128,
            intermediate_size=8192 if self.full else 344,
            num_hidden_layers=16 if self.full else 4,
            num_attention_heads=32 if self.full else 8,
            num_key_value_heads=8 if self.full else 4,
            max_position_embeddings=512,
            use_cache=False,
        )
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.full or self.checkpointed else torch.float32)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(BASE_SEED)
                model: Any = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(usual)
        if self.checkpointed:
            model.activation_checkpointing_enable()
        return model

    def adapted(self, rank: int) -> nn.Module:
        """The model with an adapter."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            r=rank, lora_alpha=ALPHAS[rank], target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for a property of models by its older name
            model: Any = get_peft_model(self(), config)
        return model.train()


def loss(net: Any, batch: Batch) -> Tensor:
    (tokens,) = batch
    logits = net(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3 * factor)


def tokens(samples: int, length: int) -> Batch:
    return (torch.randint(0, 1000, (samples, length)),)


def workload(full: bool) -> Workload:
    """Members that differ in nothing but their learning rates."""
    return _workload(full, (8,))


def mixed(full: bool) -> Workload:
    """Members that differ in their ranks."""
    return _workload(full, tuple(ALPHAS))


def batches(full: bool) -> Workload:
    """Members that differ in ranks and batch sizes, on a checkpointed base of bfloat16."""
    return _workload(full, tuple(ALPHAS), BATCH_SIZES)


def _workload(full: bool, ranks: tuple[int, ...], batch_sizes: tuple[int, ...] = ()) -> Workload:
    samples, length = (4, 256) if full else (2, 32)
    name = f"LoRA by peft on Llama, rank {', '.join(map(str, ranks))}"
    if batch_sizes:
        samples, name = max(batch_sizes), f"{name}, batches of {', '.join(map(str, batch_sizes))}"
    base = Base(full, checkpointed=bool(batch_sizes))
    first, *others = (partial(base.adapted, rank) for rank in ranks)
    sizes = "16 layers, d=2048, bfloat16" if full else f"4 layers, d=128{', bfloat16' if base.checkpointed else ''}"
    return Workload(
        name=name,
        sizes=f"{sizes}{', checkpointed' if base.checkpointed else ''}, N={samples}, length {length}, AdamW",
        samples=samples,
        model=first,
        batch=partial(tokens, samples, length),
        phases=(Phase(loss, adamw),),
        others=tuple(others),
        bfloat16=full or base.checkpointed,
        batch_sizes=batch_sizes,
    )
