"""Low-rank adapters by `peft` on a frozen Llama of `transformers`, the same for all members."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["Adapter", "base_model", "bounded_loss", "mixed", "same", "words"]

BASE_SEED = 1
WORDS = 32_000


@dataclass(frozen=True)
class Adapter:
    """What a member's `LoraConfig` says.

    Args:
        rank: r.
        alpha: lora_alpha.
    """

    rank: int
    alpha: int

    def config(self) -> Any:
        """The configuration that `peft` takes."""
        from peft import LoraConfig  # slow to import, for which other models do not wait

        return LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"
        )


MIXED = tuple(Adapter(rank, alpha) for rank, alpha in ((4, 8), (8, 16), (16, 16), (32, 64)))
SAME = (Adapter(8, 16),)


def base_model(full: bool, words: int = 1000) -> nn.Module:
    """The frozen model, on torch's default device: of Llama 3.2 1B's sizes in bfloat16, or small in float32.

    Args:
        words: Size of the vocabulary of the small one.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256 if full else words,
        hidden_size=2048 if full else 128,
        intermediate_size=8192 if full else 344,
        num_hidden_layers=16 if full else 4,
        num_attention_heads=32 if full else 8,
        num_key_value_heads=8 if full else 4,
        max_position_embeddings=512,
        use_cache=False,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if full else torch.float32)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(BASE_SEED)
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(usual)


def adapted(full: bool, adapter: Adapter) -> nn.Module:
    return _adapted(base_model(full), adapter)


def with_long_vocabulary(full: bool, adapter: Adapter) -> nn.Module:
    """A member whose layers are checkpointed, over a vocabulary of 32,000 words."""
    base: Any = base_model(full, WORDS)
    base.activation_checkpointing_enable()
    return _adapted(base, adapter)


def _adapted(base: Any, adapter: Adapter) -> nn.Module:
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks for a property of models by its older name
        model: Any = get_peft_model(base, adapter.config())
    return model.train()


def bounded_loss(net: Any, batch: Batch) -> Tensor:
    """As `loss`, without the logits of all tokens, as `TrainerTask` and `SFTTask` compute it."""
    from shoal.integrations.causal_lm import causal_lm_loss

    (tokens,) = batch
    return causal_lm_loss(net, {"input_ids": tokens, "labels": tokens})


def loss(net: Any, batch: Batch) -> Tensor:
    (tokens,) = batch
    logits = net(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adam(net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3 * factor)


def mixed(full: bool) -> Workload:
    """Members of several ranks and alphas."""
    return _workload(full, "LoRA by peft on Llama, ranks 4, 8, 16, 32", MIXED)


def same(full: bool) -> Workload:
    """Members of one rank."""
    return _workload(full, "LoRA by peft on Llama, rank 8", SAME)


def words(full: bool) -> Workload:
    """Members of several ranks on a model of 32,000 words, 1024 tokens each, with checkpointed layers."""
    samples, length = 4, 256
    first, *others = (partial(with_long_vocabulary, full, adapter) for adapter in MIXED)
    return Workload(
        name="LoRA by peft on Llama of 32,000 words",
        sizes=f"4 layers, d=128, N={samples}, length {length}, checkpointed, AdamW",
        samples=samples,
        model=first,
        batch=lambda: (torch.randint(0, 1000, (samples, length)),),
        phases=(Phase(loss, adam),),
        others=tuple(others),
    )


def _workload(full: bool, name: str, adapters: tuple[Adapter, ...]) -> Workload:
    samples, length = (4, 256) if full else (2, 32)
    first, *others = (partial(adapted, full, adapter) for adapter in adapters)
    sizes = "16 layers, d=2048, bfloat16" if full else "4 layers, d=128"
    return Workload(
        name=name,
        sizes=f"{sizes}, N={samples}, length {length}, AdamW",
        samples=samples,
        model=first,
        batch=lambda: (torch.randint(0, 1000, (samples, length)),),
        phases=(Phase(loss, adam),),
        others=tuple(others),
    )
