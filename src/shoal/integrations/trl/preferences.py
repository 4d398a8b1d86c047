"""Training on pairs of answers as by TRL's `DPOTrainer` and `RewardTrainer`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, TrainingArguments
from trl.trainer.reward_trainer import suppress_seqcls_warning
from trl.trainer.utils import create_model_from_path

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.fuse.token_log_probs import TokenStatistics
from shoal.fuse.unfused_module import UnfusedModule, modules_of
from shoal.integrations.causal_lm import IGNORED, causal_lm_log_probs, causal_lm_statistics
from shoal.integrations.trl.arguments import DPO, REWARD
from shoal.integrations.trl.preference_losses import PairLoss, PairScores, check_losses, shifted_mask
from shoal.integrations.trl.task import Scores, TRLTask

__all__ = ["DPOTask", "RewardTask"]

_COEFFICIENT = "center_rewards_coefficient"


class _PairTask(TRLTask):
    """Task whose batch holds pairs: [n, 2, T] tensors of the chosen and the rejected row of each."""

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch that TRL's collator makes, of which each pair is a row, so that no division tears it."""
        batch = super().collate(samples)
        return {name: _paired(value, len(samples)) for name, value in batch.items()}


def _paired(value: Any, pairs: int) -> Any:
    """Chosen rows followed by rejected ones, [2 n, ...], as [n, 2, ...]."""
    if not isinstance(value, Tensor) or len(value) != 2 * pairs or value.dim() < 2:
        return value
    return value.view(2, pairs, *value.shape[1:]).transpose(0, 1).contiguous()


def _rows(batch: Any, *names: str) -> dict[str, Any]:
    """Both rows of each pair one after the other, [2 n, T]."""
    return {name: batch[name].flatten(0, 1) for name in names}


class DPOTask(_PairTask):
    """Direct preference optimisation as by `trl.DPOTrainer` with the same arguments, for each config of a search.

    Data, batches and losses are those of `DPOTrainer`; for the rest see `SFTTask`. A `peft_config` is needed: the
    reference is the model without its adapter. Its log-probabilities are computed once for all trials of an array.
    With disable_dropout=True, the default, lora_dropout changes nothing, as by TRL.

    The metrics of an evaluation are those of `DPOTrainer` without the prefix: rewards/accuracies, rewards/margins,
    rewards/chosen, rewards/rejected, logps/chosen, logps/rejected, logits/chosen, logits/rejected, entropy and
    mean_token_accuracy.

    Args:
        model: As for `SFTTask`.
        ref_model: Refused unless None.
        args: Arguments of all trials; by default `DPOConfig()`.
        data_collator: Makes a batch of prepared rows; by default TRL's.
        train_dataset: Training set, a `datasets.Dataset` in one of the formats of `DPOTrainer`.
        eval_dataset: Evaluation set, likewise.
        processing_class: Tokenizer; by default that of the model's name.
        peft_config: Adapter of `peft`.
        quantization_config: How a model that is given by its name is quantised.
        others: Arguments of `DPOTrainer` that a study cannot honour; each is refused with a remedy.

    Raises:
        TaskError: An argument cannot be honoured, or is not what it must be.
    """

    known = DPO
    honoured = DPO.names

    def __init__(
        self,
        model: str | Callable[..., nn.Module],
        ref_model: None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        peft_config: PeftConfig | None = None,
        quantization_config: Any = None,
        **others: Any,
    ) -> None:
        if ref_model is not None:
            raise TaskError("DPOTask takes no `ref_model`: the reference is the model without its adapter; remove it")
        if peft_config is None:
            raise TaskError(
                "DPOTask needs a `peft_config`, such as LoraConfig(...): the reference is the model without its "
                "adapter, one for all trials. To train whole models, give `shoal.tune` a function that runs DPOTrainer "
                "with a ReportCheckpointCallback"
            )
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
        if isinstance(config.get("loss_type"), str):
            config = {**config, "loss_type": [config["loss_type"]]}
        args = super().arguments(config)
        check_losses(args)
        return args

    def model(self, config: Config, *base: Any, **_: Any) -> nn.Module:
        """Return a new adapter on the base model."""
        args, model = cast("Any", self.arguments(config)), cast("Any", super().model(config, *base))
        model.trl_loss = PairLoss(args, next(model.parameters()).dtype)
        model.trl_weighs = args.use_weighting or "use_weighting" in config  # other trials may weigh
        if args.precompute_ref_log_probs and _drops(model):
            raise TaskError(
                "precompute_ref_log_probs=True of DPOConfig computes the reference without dropout, and this model has "
                "some; set precompute_ref_log_probs=False, or disable_dropout=True and no attention_dropout"
            )
        return cast("nn.Module", model)

    def _scores(self, model: Any, batch: Any, statistics: bool) -> Scores:
        given = _rows(batch, "input_ids", "attention_mask")
        mask = batch["completion_mask"].flatten(0, 1)
        given |= {"labels": given["input_ids"].masked_fill(mask == 0, IGNORED), "use_cache": False}
        described = causal_lm_statistics(model, given) if statistics or model.trl_weighs else None
        log_probs = causal_lm_log_probs(model, given) if described is None else described.log_probs
        with torch.no_grad(), _adapter_disabled(model):
            reference = causal_lm_log_probs(model, given)
        squares = described.log_sum_squares if described is not None and model.trl_weighs else None
        found: PairScores = model.trl_loss(log_probs, reference, mask, squares)
        return found.loss, {} if described is None else _metrics(found, described, shifted_mask(mask))


def _metrics(pairs: PairScores, tokens: TokenStatistics, mask: Tensor) -> dict[str, Tensor]:
    """Means of a batch, as DPOTrainer logs them."""
    chosen, rejected = pairs.chosen_rewards, pairs.rejected_rewards
    of_chosen, of_rejected = _chosen(mask), _rejected(mask)
    return {
        "entropy": _ratio(tokens.entropy, mask),
        "mean_token_accuracy": _ratio(_chosen(tokens.is_top1), of_chosen),
        "logits/chosen": _ratio(_chosen(tokens.mean_logits), of_chosen),
        "logits/rejected": _ratio(_rejected(tokens.mean_logits), of_rejected),
        "logps/chosen": pairs.chosen_log_probs.mean(),
        "logps/rejected": pairs.rejected_log_probs.mean(),
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).float().mean(),
        "rewards/margins": (chosen - rejected).mean(),
    }


def _ratio(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens of completions; 0 without any."""
    return values.sum() / mask.sum().clamp(min=1)


def _chosen(values: Tensor) -> Tensor:
    return values[::2]


def _rejected(values: Tensor) -> Tensor:
    return values[1::2]


@contextmanager
def _adapter_disabled(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model computes what its base computes.

    `PeftModel.disable_adapter` also changes which parameters require gradients, in which case the members of an array
    run one by one.
    """
    adapters = list(_adapters_of(model))
    for each in adapters:
        each._disable_adapters = True
    try:
        yield
    finally:
        for each in adapters:
            each._disable_adapters = False


def _adapters_of(model: nn.Module) -> Iterator[Any]:
    """Modules that hold a part of an adapter, also those of the members of an array that differ in them."""
    for module in modules_of(model):
        if isinstance(module, UnfusedModule):
            for own in module.member_modules:
                yield from _adapters_of(own)
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield module


def _drops(model: Any) -> bool:
    """Whether a model draws dropout in training."""
    dropout = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    return dropout or bool(getattr(model.config.get_text_config(), "attention_dropout", 0.0))


class RewardTask(_PairTask):
    """Training of a reward model as by `trl.RewardTrainer` with the same arguments, for each config of a search.

    Data, batches and losses are those of `RewardTrainer`; for the rest see `SFTTask`. The model has one label. With a
    `peft_config`, name its head in modules_to_save (["score"]): otherwise it stays as it was initialised.

    The metrics of an evaluation are those of `RewardTrainer` without the prefix: accuracy, margin, min_reward,
    mean_reward and max_reward.

    Args:
        model: As for `SFTTask`, with a head for one label.
        args: Arguments of all trials; by default `RewardConfig()`.
        data_collator: Makes a batch of prepared rows; by default TRL's.
        train_dataset: Training set, a `datasets.Dataset` in one of the formats of `RewardTrainer`.
        eval_dataset: Evaluation set, likewise.
        processing_class: Tokenizer; by default that of the model's name.
        peft_config: Adapter of `peft`.
        quantization_config: How a model that is given by its name is quantised.
        others: Arguments of `RewardTrainer` that a study cannot honour; each is refused with a remedy.

    Raises:
        TaskError: An argument cannot be honoured, or is not what it must be.
    """

    known = REWARD
    honoured = REWARD.names

    def model(self, config: Config, *base: Any, **_: Any) -> nn.Module:
        """Return a new model, with a new adapter if there is a `peft_config`."""
        args, model = cast("Any", self.arguments(config)), super().model(config, *base)
        dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
        coefficient = torch.tensor(args.center_rewards_coefficient or 0.0, dtype=dtype)
        model.register_buffer(_COEFFICIENT, coefficient, persistent=False)
        return model

    def _from_pretrained(self, name: str, settings: dict[str, Any]) -> nn.Module:
        with suppress_seqcls_warning():
            kind: Any = AutoModelForSequenceClassification
            return create_model_from_path(name, kind, **settings, num_labels=1)

    def _check_model(self, model: Any, args: TrainingArguments) -> None:
        if getattr(model.config, "num_labels", None) != 1:
            raise TaskError(
                f"a reward model has one label, and {type(model).__name__} has {model.config.num_labels}; make it with "
                "num_labels=1"
            )

    def _scores(self, model: Any, batch: Any, statistics: bool) -> Scores:
        rewards = model(**_rows(batch, "input_ids", "attention_mask"), use_cache=False).logits.squeeze(-1)
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))  # as accelerate does under autocast
        chosen, rejected = _chosen(rewards), _rejected(rewards)
        margin = chosen - rejected
        loss = -F.logsigmoid(margin - batch["margin"] if "margin" in batch else margin).mean()
        loss = loss + getattr(model, _COEFFICIENT) * ((chosen + rejected) ** 2).mean()
        if not statistics:
            return loss, {}
        return loss, {
            "accuracy": (chosen > rejected).float().mean(),
            "margin": margin.mean(),
            "min_reward": rewards.min(),
            "mean_reward": rewards.mean(),
            "max_reward": rewards.max(),
        }
