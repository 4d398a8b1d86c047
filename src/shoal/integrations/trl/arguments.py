"""Fields of the configs of TRL beyond those of `TrainingArguments`: what a study does with each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.reward_config import RewardConfig
from trl.trainer.sft_config import SFTConfig

from shoal.core.errors import TaskError

__all__ = ["DPO", "LOADING", "REWARD", "SFT", "ConfigFields", "check", "check_type"]

_COMMON_NO_EFFECT = {
    "activation_offloading": "memory only: it changes no number",
    "dataset_num_proc": "processes that prepare the data",
}

_BUILT = {"model_init_kwargs", "trust_remote_code", "router_aux_loss_coef"}


@dataclass(frozen=True)
class ConfigFields:
    """The uses that a study has for the fields of a config of TRL; all others are those of `TrainingArguments`.

    Args:
        kind: The class.
        data: Fields that change the data: trials that agree in them share one copy.
        training: Fields that change the model or its loss.
        no_effect: Fields that change no number, with the reason.
        refused: Fields that must be unset, with the remedy.
    """

    kind: type[TrainingArguments]
    data: frozenset[str]
    training: frozenset[str]
    no_effect: Mapping[str, str] = field(default_factory=lambda: _COMMON_NO_EFFECT)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """All names, for `TrainerTask.honoured`: `check` decides on them."""
        return self.data | self.training | self.no_effect.keys() | self.refused.keys()


SFT = ConfigFields(
    SFTConfig,
    data=frozenset(
        {
            *("dataset_text_field", "dataset_kwargs", "eos_token", "pad_token", "chat_template_path", "max_length"),
            *("truncation_mode", "shuffle_dataset", "packing", "packing_strategy", "eval_packing", "padding_free"),
            *("pad_to_multiple_of", "completion_only_loss", "assistant_only_loss"),
        }
    ),
    training=frozenset({*_BUILT, "loss_type"}),
)

DPO = ConfigFields(
    DPOConfig,
    data=frozenset({"max_length", "truncation_mode", "pad_to_multiple_of", "pad_token"}),
    training=frozenset(
        {
            *_BUILT,
            *("loss_type", "loss_weights", "beta", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef"),
            *("ld_alpha", "use_weighting", "discopop_tau", "disable_dropout", "precompute_ref_log_probs"),
        }
    ),
    no_effect={
        **_COMMON_NO_EFFECT,
        "precompute_ref_batch_size": "the reference is computed with the batches of the training",
        "ref_model_mixup_alpha": "part of sync_ref_model",
        "ref_model_sync_steps": "part of sync_ref_model",
    },
    refused={
        "sync_ref_model": "the reference is the model without its adapter, as DPOTrainer has it with PEFT",
        "padding_free": "DPOTrainer pads in any case",
    },
)

REWARD = ConfigFields(
    RewardConfig,
    data=frozenset({"eos_token", "pad_token", "chat_template_path", "max_length", "pad_to_multiple_of"}),
    training=frozenset({*_BUILT - {"router_aux_loss_coef"}, "disable_dropout", "center_rewards_coefficient"}),
)

LOADING = ("model_init_kwargs", "trust_remote_code")
"""Fields that say how a model of a given name is loaded."""


def check(args: TrainingArguments, known: ConfigFields, named: bool) -> None:
    """Check that a study can do what TRL does with the fields of its own config.

    Args:
        named: Whether the model is given by its name or path, so that fields which say how it is loaded matter.
    """
    wrong = [(name, why) for name, why in known.refused.items() if getattr(args, name)]
    if not named:
        wrong += [(name, "load the model in your function") for name in LOADING if getattr(args, name)]
    if (path := getattr(args, "chat_template_path", None)) and not str(path).endswith((".jinja", ".j2")):
        wrong.append(("chat_template_path", "a tokenizer may add tokens; give the path of a .jinja file"))
    if "selective" in (args.activation_checkpointing_kwargs or {}):
        wrong.append(("activation_checkpointing_kwargs", "remove 'selective'; all of each part is computed again"))
    if wrong:
        raise TaskError(
            f"a study cannot honour these fields of {known.kind.__name__}: "
            + "; ".join(f"{name}={getattr(args, name)!r} ({why})" for name, why in wrong)
            + f". Change them, or give `shoal.tune` a function that runs {_trainer(known)} with a "
            "ReportCheckpointCallback"
        )


def _trainer(known: ConfigFields) -> str:
    return known.kind.__name__.replace("Config", "Trainer")


def check_type(args: Any, known: ConfigFields, task: str) -> None:
    """Check the class of the arguments; configs of other trainers of TRL, such as GRPOConfig, are refused."""
    if not isinstance(args, known.kind):
        raise TaskError(
            f"`args` of {task} must be a {known.kind.__name__}, got {type(args).__name__}. Other trainers of TRL, such "
            "as GRPOTrainer, generate text in a training step; give `shoal.tune` a function that runs the trainer with "
            "a ReportCheckpointCallback"
        )
