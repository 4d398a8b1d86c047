"""Losses of causal language models of `transformers` over a large vocabulary, without the logits of all tokens.

A model's own forward makes the logits [N, T, V] before any loss sees them. The functions here run its backbone, and
give hidden states and head to `shoal.token_log_probs`.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_peft_available

from shoal.fuse.token_log_probs import TokenStatistics, token_log_probs, token_statistics

__all__ = [
    "IGNORED",
    "bounds_loss",
    "causal_lm_log_probs",
    "causal_lm_loss",
    "causal_lm_statistics",
    "mark_bounded",
    "shifted_labels",
    "why_adapter_unsupported",
    "why_full_logits",
]

_log = logging.getLogger("shoal.integrations")

INPUTS = ("input_ids", "attention_mask", "position_ids")
"""Tensors of a batch, besides labels, for which `why_full_logits` shows that the backbone gets them as they are."""

_NOT_INPUTS = ("labels", "shift_labels", "num_items_in_batch")
IGNORED = -100
"""Label of tokens that do not count."""
_LOSS = 1.5
"""The loss that `why_full_logits` returns to a model's forward, which must not change it."""

_BOUNDED = "bounded_loss"
"""Attribute of models whose loss is `causal_lm_loss`, if the batch is large."""

_MIN_WORDS = 2**12
"""Size of a vocabulary below which the logits of all tokens are small."""

_MIN_LOGITS = 2**20
"""Number of logits of a batch from which a frozen head's are not kept: 16 MiB with what their loss keeps."""

_MIN_TRAINED = 2**26
"""As `_MIN_LOGITS`, of heads that train: each tile of their logits is computed twice."""

_probed: dict[tuple[type, str], str | None] = {}
"""Class and configuration -> what `_Probe` found."""

T = TypeVar("T")


def causal_lm_log_probs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The log-probability of the label after each token, [N, T]; 0 where `shifted_labels` are -100.

    Equal to what the model's own forward implies only if `why_full_logits` is None.

    Args:
        model: Causal language model of `transformers`, or a `PeftModel` of one.
        batch: Arguments of the model's forward, with `labels` [N, T], or with `shift_labels`, which are not shifted.
    """
    return _scored(token_log_probs, model, batch)


def causal_lm_statistics(model: nn.Module, batch: Mapping[str, Any]) -> TokenStatistics:
    """As `causal_lm_log_probs`, with the other statistics of each token, [N, T]."""
    return _scored(token_statistics, model, batch)


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss of `ForCausalLMLoss`: the sum over labels by `num_items_in_batch`, or without that their mean."""
    total = -causal_lm_log_probs(model, batch).sum()
    items = batch.get("num_items_in_batch")
    return total / (shifted_labels(batch).ne(IGNORED).sum() if items is None else items)


def shifted_labels(batch: Mapping[str, Any]) -> Tensor:
    """The label of each position, which is the next token's; -100 where there is none."""
    given = batch.get("shift_labels")
    return F.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:] if given is None else given


def mark_bounded(model: nn.Module) -> None:
    """Mark a model for which `why_full_logits` is None, so that `bounds_loss` finds it in an array, too."""
    head: Any = getattr(_language_model(model), "get_output_embeddings", lambda: None)()
    if getattr(head, "out_features", 0) < _MIN_WORDS or head.weight.is_meta:  # a meta model shows only its structure
        return
    found = why_full_logits(model)
    if found is None:
        setattr(model, _BOUNDED, True)
    else:
        _log.info("the logits of all tokens are kept: %s", found)


def bounds_loss(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether `causal_lm_loss` takes the place of a model's own loss of a batch: it was marked, and logits are many."""
    if not getattr(model, _BOUNDED, False) or not {*batch} <= {*INPUTS, "labels", "num_items_in_batch"}:
        return False
    weight = cast("Any", _language_model(model)).get_output_embeddings().weight
    return bool(batch["labels"].numel() * len(weight) >= (_MIN_TRAINED if weight.requires_grad else _MIN_LOGITS))


def why_full_logits(model: nn.Module) -> str | None:
    """Why a model's loss needs its own forward; None if `causal_lm_loss` is the same.

    Reads the model's class, head and adapters. If these allow it, the forward runs once for a row of two tokens, with
    numbers of a wide range in place of what the head returns, and another in place of the loss: these show whether
    anything else happens between backbone, head and loss. The state of the model and of torch's generators is kept.
    A process does so once for each class and configuration.
    """
    inner = _language_model(model)
    if type(inner).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return f"{type(inner).__name__} is no causal language model of transformers"
    if not isinstance(inner, PreTrainedModel) or inner.loss_function is not ForCausalLMLoss:
        return f"the loss of {type(inner).__name__} is not ForCausalLMLoss"
    head: Any = inner.get_output_embeddings()
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks:
        return f"the head, a {type(head).__module__}.{type(head).__name__}, is no plain nn.Linear, or has hooks"
    if head.weight.dtype == torch.float64:
        return "transformers computes the loss in float32, of float64, too"
    found = why_adapter_unsupported(model)
    if found is not None:
        return found
    key = (type(inner), inner.config.to_json_string())
    if key not in _probed:
        _probed[key] = _Probe(model, inner, head).run()
    return _probed[key]


def _scored(function: Callable[..., T], model: nn.Module, batch: Mapping[str, Any]) -> T:
    inner: Any = _language_model(model)
    head: Any = inner.get_output_embeddings()
    inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
    hidden = inner.base_model(**inputs)[0]
    scale, softcap = _logit_numbers(inner.config)
    return function(hidden, head.weight, shifted_labels(batch), bias=head.bias, scale=scale, softcap=softcap)


def _is_peft_model(model: nn.Module) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def _language_model(model: nn.Module) -> nn.Module:
    """A model without the wrappers of `peft`, which are not asked, since their configurations differ in an array."""
    if not _is_peft_model(model):
        return model
    tuner: Any = model.base_model
    return cast("nn.Module", tuner if isinstance(tuner, PreTrainedModel) else tuner.model)


def _logit_numbers(config: Any) -> tuple[float, float | None]:
    """Factor and limit of the logits; models name the factor differently."""
    config = config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            return factor, softcap
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0, softcap
    return divisor if config.model_type == "hyperclovax" else 1 / divisor, softcap


def why_adapter_unsupported(model: nn.Module) -> str | None:
    """Why the backbone alone does not compute what an adapter adds; None if it does."""
    if not _is_peft_model(model):
        return None
    from peft.tuners.tuners_utils import BaseTuner

    tuner: Any = model.base_model
    if not isinstance(tuner, BaseTuner) or type(tuner).forward is not BaseTuner.forward:
        return f"the adapter of {type(tuner).__name__} changes the forward pass"
    if any(getattr(each, "alora_invocation_tokens", None) for each in tuner.peft_config.values()):
        return "the adapter depends on where tokens invoke it"
    return None


class _Probe:
    """One forward pass of a model, with what its backbone, head and loss were given."""

    def __init__(self, model: nn.Module, inner: Any, head: nn.Linear) -> None:
        self._model = model
        self._inner = inner
        self._head = head
        device = head.weight.device
        row = torch.arange(2, device=device).unsqueeze(0)
        parameters = inspect.signature(type(inner).forward).parameters
        values = (row, torch.ones_like(row), row.clone())
        self._inputs = {name: value for name, value in zip(INPUTS, values, strict=True) if name in parameters}
        self._labels = row.clone()
        self._items = torch.tensor(2, device=device)
        self._backbone: list[tuple[list[int], Tensor]] = []
        self._heads: list[tuple[Tensor, Tensor]] = []
        self._losses: list[dict[str, Any]] = []

    def run(self) -> str | None:
        """Run the model, and compare."""
        backbone = self._inner.base_model
        if backbone is self._inner or not isinstance(backbone, nn.Module):
            return f"{type(self._inner).__name__} has no backbone of its own"
        hooks = (
            backbone.register_forward_hook(self._on_backbone, with_kwargs=True),
            self._head.register_forward_hook(self._on_head),
        )
        try:
            with self._state_kept(), torch.no_grad():
                self._model.train()
                self._inner.loss_function = self._on_loss
                found = self._model(**self._inputs, labels=self._labels, num_items_in_batch=self._items)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return f"{type(self._inner).__name__} does not run for two tokens: {error}"
        finally:
            for hook in hooks:
                hook.remove()
        return self._compare(found)

    @contextmanager
    def _state_kept(self) -> Iterator[None]:
        modes = {module: module.training for module in self._model.modules()}
        device = self._head.weight.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                yield
            finally:
                self._inner.__dict__.pop("_loss_function", None)
                for module, training in modes.items():
                    module.training = training

    def _on_backbone(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [id(each) for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._backbone.append((given, output[0]))

    def _on_head(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        wide = torch.linspace(-100, 100, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
        self._heads.append((args[0], wide))
        return wide.clone()

    def _on_loss(self, logits: Tensor, labels: Tensor, vocab_size: int, *args: Any, **kwargs: Any) -> Tensor:
        items = args[0] if args else kwargs.pop("num_items_in_batch", None)
        changes = any(kwargs.get(name) is not None for name in ("ignore_index", "shift_labels")) or len(args) > 1
        self._losses.append({"logits": logits, "labels": labels, "size": vocab_size, "items": items, "more": changes})
        return logits.new_tensor(_LOSS, dtype=torch.float32)

    def _compare(self, found: Any) -> str | None:
        name = type(self._inner).__name__
        if not len(self._backbone) == len(self._heads) == len(self._losses) == 1:
            return f"{name} does not run backbone, head and loss once each"
        (given, hidden), (rows, wide), loss = self._backbone[0], self._heads[0], self._losses[0]
        known = {id(each) for each in self._inputs.values()}
        if not known <= {*given} or not {*given} <= known | {id(self._items)}:
            return f"the backbone of {name} is not given the batch as it is"
        if not torch.equal(hidden, rows):
            return f"{name} changes hidden states before the head"
        scale, softcap = _logit_numbers(self._inner.config)
        logits = wide.float() * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        near = 1e-5 if wide.dtype == torch.float32 else 1e-2
        if not torch.allclose(loss["logits"].float(), logits, near, near):
            return f"{name} changes logits by more than a factor or a limit that its config names"
        plain = torch.equal(loss["labels"], self._labels) and loss["items"] is self._items and not loss["more"]
        if not plain or loss["size"] != self._head.out_features:
            return f"{name} gives its loss other labels, or counts of them"
        if found["loss"].item() != _LOSS:
            return f"{name} adds to its loss"
        return None
