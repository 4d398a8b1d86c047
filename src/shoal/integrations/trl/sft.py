"""Supervised fine-tuning as by TRL's `SFTTrainer`."""

from collections.abc import Callable
from typing import Any, cast

import torch
from peft import PeftConfig
from torch import Tensor, nn
from transformers import TrainingArguments

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.integrations.causal_lm import IGNORED, causal_lm_log_probs, causal_lm_statistics, shifted_labels
from shoal.integrations.trainer_arguments import ITEMS, SMOOTHING
from shoal.integrations.transformers import TrainerTask
from shoal.integrations.trl.arguments import SFT
from shoal.integrations.trl.task import Scores, TRLTask

__all__ = ["SFTTask"]

_ROWS = "rows"
"""Name of a tensor of a batch whose length is the number of its samples, which `padding_free` puts into one row."""

_LOSSES = ("nll", "dft")


class TokenLoss(nn.Module):
    """Loss of a `loss_type`, as a part of the model of its trial: members of one array may differ in it."""

    def __init__(self, loss_type: str) -> None:
        super().__init__()
        self._type = loss_type

    def forward(self, log_probs: Tensor) -> Tensor:
        """Losses of tokens by their log-probabilities."""
        return -log_probs * log_probs.exp().detach() if self._type == "dft" else -log_probs


class SFTTask(TRLTask):
    """Supervised fine-tuning as by `trl.SFTTrainer` with the same arguments, for each config of a search.

    Data, batches, labels and loss are those of `SFTTrainer`; the rest is as in `TrainerTask`. TRL itself prepares the
    data, once for all trials that agree in what changes it (max_length, packing ...). The base model stays frozen
    if there is a `peft_config`, and each trial has an adapter of its own.

    Names of the config that are fields of `SFTConfig` or of the `peft_config` (learning_rate, max_length, r,
    lora_alpha, target_modules ...) override these for the trial. A function `model(config)` reads the others.

    `eval_loss` is reported as `valid_loss`, `eval_mean_token_accuracy` and `eval_entropy` without the prefix.

    Args:
        model: Name or path of a pretrained model, or a function without arguments or of the config that returns a
            model; it is also called once by the constructor, with None, to see what the model takes.
        args: Arguments of all trials; by default `SFTConfig()`.
        data_collator: Makes a batch of prepared rows; by default TRL's.
        train_dataset: Training set, a `datasets.Dataset` in one of the formats of `SFTTrainer`.
        eval_dataset: Evaluation set, likewise.
        processing_class: Tokenizer; by default that of the model's name.
        peft_config: Adapter of `peft`.
        quantization_config: How a model that is given by its name is quantised.
        formatting_func: Function that returns the text of a row.
        others: Arguments of `SFTTrainer` that a study cannot honour; each is refused with a remedy.

    Raises:
        TaskError: An argument cannot be honoured, or is not what it must be.
    """

    known = SFT
    honoured = SFT.names

    def __init__(
        self,
        model: str | Callable[..., nn.Module],
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: PeftConfig | None = None,
        quantization_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        **others: Any,
    ) -> None:
        self._preparation = {"formatting_func": formatting_func}
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            peft_config=peft_config,
            quantization_config=quantization_config,
            **others,
        )

    def arguments(self, config: Config) -> TrainingArguments:
        """The arguments of a trial."""
        args: Any = super().arguments(config)
        if args.loss_type not in _LOSSES:
            raise TaskError(f"loss_type of SFTConfig must be 'nll' or 'dft', got {args.loss_type!r}")
        return cast("TrainingArguments", args)

    def model(self, config: Config, *base: Any, **_: Any) -> nn.Module:
        """Return a new model, with a new adapter if there is a `peft_config`."""
        model, args = cast("Any", super().model(config, *base)), cast("Any", self.arguments(config))
        model.trl_loss = TokenLoss(args.loss_type)
        if args.loss_type == "dft" and hasattr(model, SMOOTHING):
            delattr(model, SMOOTHING)  # as TRL, which ignores it there
        return cast("nn.Module", model)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch that TRL's collator makes, with the numbers of its samples and labels."""
        return {_ROWS: torch.zeros(len(samples)), **self._counted(super().collate(samples))}

    def _scores(self, model: Any, batch: Any, statistics: bool) -> Scores:
        unused = {_ROWS} if model.training else {_ROWS, ITEMS}  # an evaluation counts its own labels
        own = {name: value for name, value in batch.items() if name not in unused}
        smoothed = hasattr(model, SMOOTHING)
        given, labelled = {**own, "use_cache": False}, shifted_labels(own) != IGNORED
        found = causal_lm_statistics(model, given) if statistics else None
        if smoothed:
            loss = TrainerTask.loss(self, model, {**own, "use_cache": False})
        else:
            log_probs = causal_lm_log_probs(model, given) if found is None else found.log_probs
            items = own[ITEMS] if ITEMS in own else labelled.sum()
            loss = model.trl_loss(log_probs).sum() / items.clamp(min=1)
        if found is None:
            return loss, {}
        count = labelled.sum().clamp(min=1)
        return loss, {"mean_token_accuracy": found.is_top1.sum() / count, "entropy": found.entropy.sum() / count}
