"""Low-rank adapters by `peft` on a frozen Llama of `transformers`, the same for all members."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["ADAPTERS", "Adapter", "Base", "bounded_loss", "kinds", "loss", "name_of", "words"]

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

    def put_on(self, base: Any) -> nn.Module:
        """The model with this adapter."""
        from peft import get_peft_model

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks for a property of models by its older name
            model: Any = get_peft_model(base, self.config())
        return model.train()


MIXED = tuple(Adapter(rank, alpha) for rank, alpha in ((4, 8), (8, 16), (16, 16), (32, 64)))
SAME = (Adapter(8, 16),)
ADAPTERS: dict[str, tuple[tuple[Adapter, ...], tuple[int, ...]]] = {
    "same": (SAME, ()),
    "mixed": (MIXED, ()),
    "batches": (MIXED, (2, 4, 8)),
}
"""What members differ in -> their adapters and batch sizes, by turns; all batches are alike without."""


@dataclass(frozen=True)
class Base:
    """The frozen model: of Llama 3.2 1B's sizes in bfloat16 (`full`), or small.

    Args:
        full: Whether it is the large one.
        dtype: of the small one.
        checkpointing: whether its layers are computed again in the backward pass.
        words: size of the vocabulary of the small one.
    """

    full: bool
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    words: int = 1000

    def __call__(self) -> nn.Module:
        """The model, the same at each call, on torch's default device."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128256 if self.full else self.words,
            hidden_size=2048 if self.full else 128,
            intermediate_size=8192 if self.full else 344,
            num_hidden_layers=16 if self.full else 4,
            num_attention_heads=32 if self.full else 8,
            num_key_value_heads=8 if self.full else 4,
            max_position_embeddings=512,
            use_cache=False,
        )
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.full else self.dtype)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(BASE_SEED)
                model: Any = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(usual)
        if self.checkpointing:
            model.activation_checkpointing_enable()
        return model

    def adapted(self, adapter: Adapter) -> nn.Module:
        """The model with an adapter."""
        return adapter.put_on(self())

    def sizes(self) -> str:
        """What it is, in words."""
        sizes = "16 layers, d=2048, bfloat16" if self.full else "4 layers, d=128"
        of_dtype = ", bfloat16" if self.dtype == torch.bfloat16 and not self.full else ""
        return sizes + of_dtype + (", checkpointed" if self.checkpointing else "")


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


def words(full: bool) -> Workload:
    """Members of several ranks on a model of 32,000 words, 1024 tokens each, with checkpointed layers."""
    base = Base(False, checkpointing=True, words=WORDS)
    return _workload(base, "LoRA by peft on Llama of 32,000 words", MIXED, (4, 256))


def name_of(kind: str, dtype: str, checkpointing: bool) -> str:
    """Name of the workload of a kind of `ADAPTERS`."""
    return "-".join(["peft", kind, dtype, *(["checkpointed"] if checkpointing else [])])


def kinds() -> dict[str, Callable[[bool], Workload]]:
    """Workloads of all `ADAPTERS` by name: with a base of each dtype, checkpointed or not."""
    cases = list(product(ADAPTERS, ("float32", "bfloat16"), (False, True)))
    return {name_of(*case): partial(_of_kind, *case) for case in cases}


def _of_kind(kind: str, dtype: str, checkpointing: bool, full: bool) -> Workload:
    adapters, batch_sizes = ADAPTERS[kind]
    samples, length = (4, 256) if full else (2, 32)
    name = f"LoRA by peft on Llama, ranks {', '.join(str(each.rank) for each in adapters)}"
    if batch_sizes:
        samples, name = max(batch_sizes), f"{name}, batches of {', '.join(map(str, batch_sizes))}"
    base = Base(full, getattr(torch, dtype), checkpointing)
    return _workload(base, name, adapters, (samples, length), batch_sizes)


def _workload(
    base: Base, name: str, adapters: tuple[Adapter, ...], shape: tuple[int, int], batch_sizes: tuple[int, ...] = ()
) -> Workload:
    first, *others = (partial(base.adapted, adapter) for adapter in adapters)
    samples, length = shape
    return Workload(
        name=name,
        sizes=f"{base.sizes()}, N={samples}, length {length}, AdamW",
        samples=samples,
        model=first,
        batch=lambda: (torch.randint(0, 1000, shape),),
        phases=(Phase(loss, adam),),
        others=tuple(others),
        batch_sizes=batch_sizes,
    )
