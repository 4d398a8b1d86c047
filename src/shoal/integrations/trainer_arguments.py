"""`TrainingArguments` of trials: their overrides from a config, and the arguments that a study cannot honour."""

import copy
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments

from shoal.core.errors import TaskError

__all__ = ["check", "eval_every", "override", "total_steps"]

_OF_A_TRIAL = {
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_grad_norm", "label_smoothing_factor"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "bf16"),
}
"""Arguments that a config may override. All others are of the whole study."""

_PARALLEL = "a trial trains on one device"
_EVALUATION = "each epoch ends with an evaluation of the whole set"

_REFUSED = {
    "deepspeed": _PARALLEL,
    "fsdp": _PARALLEL,
    "parallelism_config": _PARALLEL,
    "fp16": "schedules would count steps that overflow, which Trainer's do not; set bf16=True",
    "fp16_full_eval": "evaluation has the precision of training",
    "bf16_full_eval": "evaluation has the precision of training",
    "tf32": "call torch.set_float32_matmul_precision in `model_init`",
    "torch_compile": "Shoal compiles training steps where that is measured to be faster",
    "activation_checkpointing": "call gradient_checkpointing_enable of the model in `model_init`",
    "use_liger_kernel": "apply the kernels to the model in `model_init`",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "auto_find_batch_size": "the batch size is part of the config; search per_device_train_batch_size",
    "full_determinism": "a trial repeats as `shoal.reproduce` says",
    "debug": "an array has no debugger of single members",
    "load_best_model_at_end": "`Study.best_model` has the last weights of the best trial",
    "push_to_hub": "push `study.best_model()` after the search",
    "report_to": "a study reports by its own callbacks",
    "resume_from_checkpoint": "studies go on with `shoal resume`",
    "enable_jit_checkpoint": "studies write checkpoints by themselves",
    "eval_on_start": _EVALUATION,
    "eval_delay": _EVALUATION,
    "batch_eval_metrics": "`compute_metrics` gets the whole evaluation set",
    "include_for_metrics": "`compute_metrics` gets predictions and labels",
    "dataloader_drop_last": "the last batch is kept",
    "optim_target_modules": "only optimizers of whole parameters can train an array",
}
"""Arguments that must be unset, with the reason or the remedy."""

_UNSUPPORTED: dict[str, tuple[set[str], str]] = {
    "lr_scheduler_type": ({"reduce_lr_on_plateau", "greedy"}, "schedules count steps; choose another"),
    "train_sampling_strategy": (
        {"sequential", "group_by_length", "batch_rebalance"},
        "the data seed shuffles the samples; pad with pad_to_multiple_of in the collator",
    ),
}
"""Values that arguments must not have, with the reason."""


def override(args: TrainingArguments, config: Mapping[str, Any], free: bool) -> TrainingArguments:
    """The arguments of a trial: a copy in which the config's values replace those of the same names.

    Values are converted to the type of the replaced one, as `Trainer.hyperparameter_search` does.

    Args:
        args: Arguments of the study.
        config: Config of the trial.
        free: Whether the config may have other names, which `model_init` reads.

    Raises:
        TaskError: A name or a value is not possible.
    """
    known = {field.name for field in fields(args)}
    own = copy.copy(args)
    for name, value in config.items():
        if name in _OF_A_TRIAL:
            setattr(own, name, _converted(name, value, getattr(args, name)))
        elif name in known:
            raise TaskError(
                f"the config's {name!r} is an argument of the whole study; set it in TrainingArguments"
                + (", and the epochs of trials in the algorithm" if name in ("num_train_epochs", "max_steps") else "")
            )
        elif not free:
            raise TaskError(
                f"the config's {name!r} is no TrainingArguments field, and `model_init` takes no config; "
                "let it take one argument, or remove the name from the space"
            )
    check(own)
    return own


def _converted(name: str, value: Any, old: Any) -> Any:
    if old is None:
        return value
    try:
        new = type(old)(value)
        whole = new == value
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise TaskError(f"the config's {name!r} must be of type {type(old).__name__}, got {value!r}")
    return new


def check(args: TrainingArguments) -> None:
    """Check that a study can do what `Trainer` does with these arguments.

    Raises:
        TaskError: Names each argument that is not possible, with the remedy.
    """
    wrong = [(name, why) for name, why in _REFUSED.items() if getattr(args, name)]
    wrong += [(name, why) for name, (values, why) in _UNSUPPORTED.items() if getattr(args, name) in values]
    whole = args.num_train_epochs == int(args.num_train_epochs) or args.max_steps > 0
    if not whole and args.eval_strategy != "steps":
        wrong.append(("num_train_epochs", "a trial trains whole epochs unless eval_strategy is 'steps'"))
    accelerator: Any = args.accelerator_config
    if accelerator.split_batches or accelerator.dispatch_batches or accelerator.gradient_accumulation_kwargs:
        wrong.append(("accelerator_config", _PARALLEL))
    if wrong:
        raise TaskError(
            "a TrainerTask cannot honour these TrainingArguments: "
            + "; ".join(f"{name}={_shown(getattr(args, name))} ({why})" for name, why in wrong)
            + ". Change them, or give `shoal.tune` a function that runs `Trainer` with a ReportCheckpointCallback"
        )


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))


def total_steps(args: TrainingArguments, samples: int) -> int:
    """Optimizer steps of the schedule of learning rates, as `Trainer` counts them.

    Args:
        args: Arguments of a trial.
        samples: Size of the training set.
    """
    if args.max_steps > 0:
        return args.max_steps
    batches = math.ceil(samples / args.per_device_train_batch_size)
    return math.ceil(args.num_train_epochs * math.ceil(batches / args.gradient_accumulation_steps))


def eval_every(args: TrainingArguments, samples: int) -> int | None:
    """Optimizer steps from one evaluation to the next; None for one evaluation after each pass."""
    if args.eval_strategy != "steps":
        return None
    steps = args.eval_steps or 0
    return int(steps) if steps >= 1 else math.ceil(total_steps(args, samples) * steps)
