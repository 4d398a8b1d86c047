"""Arguments and overridden methods of a `Trainer`: those that a study cannot honour, and equals of the others."""

import copy
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.liger import apply_liger_kernel
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_utils import denumpify_detensorize
from transformers.utils.import_utils import is_liger_kernel_available

from shoal.algorithms.rules import Patience
from shoal.core.errors import TaskError
from shoal.core.names import nearest_name_hint
from shoal.core.objective import Objective
from shoal.integrations.early_stopping import EarlyStop
from shoal.train.kept_gradients import uncleared

__all__ = [
    "FUNCTION",
    "ITEMS",
    "SMOOTHING",
    "check",
    "check_environment",
    "check_methods",
    "check_trained",
    "early_stop",
    "eval_every",
    "keep_embeddings_whole",
    "optimizer_class",
    "override",
    "reported",
    "save_memory",
    "total_steps",
    "warnings_for",
]

ITEMS = "num_items_in_batch"
"""Name of the number of labels of a training step, which `Trainer` gives to models that scale their loss by it."""

SMOOTHING = "label_smoothing"
"""Name of the buffer of a model that holds its `label_smoothing_factor`, so that members of an array may differ."""

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
    "torch_compile": "Shoal compiles training steps where that is measured to be faster",
    "neftune_noise_alpha": "no noise is added to embeddings",
    "auto_find_batch_size": "the batch size is part of the config; search per_device_train_batch_size",
    "full_determinism": "a trial repeats as `shoal.reproduce` says",
    "debug": "an array has no debugger of single members",
    "resume_from_checkpoint": "studies continue with `shoal resume`",
    "eval_on_start": _EVALUATION,
    "eval_delay": _EVALUATION,
    "batch_eval_metrics": "`compute_metrics` gets the whole evaluation set",
    "include_for_metrics": "`compute_metrics` gets predictions and labels",
    "optim_target_modules": "only optimizers of whole parameters can train an array",
    "sortish_sampler": "the data seed shuffles the samples",
}
"""Arguments that must be unset, with the reason or the remedy. The last one is of Seq2SeqTrainingArguments."""

_UNSUPPORTED: dict[str, tuple[set[Any], str]] = {
    "tf32": ({True, False}, "worker processes have torch's settings; set them in `model_init`"),
    "lr_scheduler_type": ({"reduce_lr_on_plateau", "greedy"}, "schedules count steps; choose another"),
    "train_sampling_strategy": (
        {"sequential", "group_by_length", "batch_rebalance"},
        "the data seed shuffles the samples; pad with pad_to_multiple_of in the collator",
    ),
}
"""Values that arguments must not have, with the reason."""

_KNOWN = {
    *("accelerator_config", "activation_checkpointing", "activation_checkpointing_kwargs", "data_seed"),
    *("average_tokens_across_devices", "gradient_checkpointing", "use_liger_kernel"),
    *("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers"),
    *("dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend"),
    *("ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout"),
    *("disable_tqdm", "do_eval", "do_predict", "do_train", "enable_jit_checkpoint", "eval_accumulation_steps"),
    *("eval_do_concat_batches", "eval_steps", "eval_strategy", "eval_use_gather_object", "fsdp_config"),
    *("generation_config", "generation_max_length", "generation_num_beams", "gradient_checkpointing_kwargs"),
    *("greater_is_better", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"),
    *("hub_token", "ignore_data_skip", "include_num_input_tokens_seen", "label_names", "length_column_name"),
    *("liger_kernel_config", "load_best_model_at_end", "local_rank", "log_level", "log_level_replica"),
    *("log_on_each_node", "logging_first_step", "logging_nan_inf_filter", "logging_steps", "logging_strategy"),
    *("max_steps", "metric_for_best_model", "num_train_epochs", "output_dir", "predict_with_generate"),
    *("prediction_loss_only", "project", "remove_unused_columns"),
    *("restore_callback_states_from_checkpoint", "run_name", "save_on_each_node"),
    *("save_only_model", "save_steps", "save_strategy", "save_total_limit", "seed", "skip_memory_metrics"),
    *("torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "trackio_bucket_id"),
    *("trackio_space_id", "trackio_static_space_id", "use_cache", "use_cpu"),
}
"""Further arguments, with which a study does what docs/trainer.md says. Any other one must have its default."""

_NO_EFFECT = {
    "report_to": "give `shoal.tune` callbacks=[...], such as WandbCallback",
    "push_to_hub": "push `study.best_model()` after the search",
}
"""Arguments that change no training and have no effect in a study, with what takes their place."""

_ELSEWHERE = {
    "num_train_epochs": "set it in TrainingArguments, and the epochs of trials in the algorithm",
    "max_steps": "set it in TrainingArguments, and the epochs of trials in the algorithm",
    "seed": "give `seed` to `shoal.tune`",
    "data_seed": "give `data_seed` to `shoal.tune`",
}
"""Arguments of the whole study that a config might have, with their remedy if it is not only in TrainingArguments."""

_AT_LEAST_ONE = ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size")

_ENDLESS = {"constant", "constant_with_warmup", "inverse_sqrt"}
"""Schedules that do not depend on the number of training steps."""


def override(
    args: TrainingArguments,
    config: Mapping[str, Any],
    others: Collection[str] | None,
    honoured: Collection[str] = (),
    function: str = "model_init",
) -> TrainingArguments:
    """The arguments of a trial: a copy in which the config's values replace those of the same names.

    Values are converted to the type of the argument, as `Trainer.hyperparameter_search` does.

    Args:
        others: Other names that the config may have; None: any, as the function reads them.
        honoured: As for `check`; a config may override these, too.
        function: Name of the task's argument that is a function which returns the model.

    Raises:
        TaskError: A name or a value is not possible.
    """
    known = {field.name: field.type for field in fields(args)}
    own = copy.copy(args)
    for name in filter(config.__contains__, known):  # no other name counts as read
        if name not in _OF_A_TRIAL and name not in honoured:
            remedy = _ELSEWHERE.get(name, f"set it in {type(args).__name__}")
            raise TaskError(f"the config's {name!r} is an argument of the whole study; {remedy}")
        old, value = getattr(args, name), config[name]
        kind = float if known[name] in (float, "float") else type(old)
        optional = value is None and "None" in str(known[name])
        setattr(own, name, value if old is None or optional else _converted(name, value, kind))
    if others is not None:
        for name in sorted(config.keys() - known.keys() - set(others)):
            near = nearest_name_hint(name, [each for each in (*known, *others) if len(each) > 1])
            raise TaskError(
                f"the config's {name!r} is not a field of {type(args).__name__}"
                + (" or of `peft_config`" if others else "")
                + f"{near}, and `{function}` takes no config; correct the name, or give `{function}` a function of the "
                "config that reads it"
            )
    check(own, honoured)
    return own


def _converted(name: str, value: Any, kind: type) -> Any:
    try:
        new = kind(value)
        whole = new == value
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise TaskError(f"the config's {name!r} must be of type {kind.__name__}, got {value!r}")
    return new


def check(args: TrainingArguments, honoured: Collection[str] = ()) -> None:
    """Check that a study can do what `Trainer` does with these arguments.

    Args:
        honoured: Names of arguments that a subclass of `TrainerTask` acts on; they may have any value.
    """
    for name in _AT_LEAST_ONE:
        if getattr(args, name) < 1:
            raise TaskError(f"{name} of TrainingArguments must be at least 1, got {getattr(args, name)!r}")
    wrong = [(name, why) for name, why in _REFUSED.items() if getattr(args, name, None)]
    wrong += [(name, why) for name, (values, why) in _UNSUPPORTED.items() if getattr(args, name) in values]
    whole = args.num_train_epochs == int(args.num_train_epochs) or args.max_steps > 0
    if not whole and args.eval_strategy != "steps":
        wrong.append(("num_train_epochs", "a trial trains whole epochs unless eval_strategy is 'steps'"))
    accelerator: Any = args.accelerator_config
    if accelerator.split_batches or accelerator.dispatch_batches or accelerator.gradient_accumulation_kwargs:
        wrong.append(("accelerator_config", _PARALLEL))
    if args.activation_checkpointing and _checkpointing(args)["use_reentrant"]:
        why = "re-entrant parts run the model outside of its array; set use_reentrant=False"
        wrong.append(("activation_checkpointing_kwargs", why))
    if args.use_liger_kernel and not is_liger_kernel_available():
        wrong.append(("use_liger_kernel", "the package liger-kernel is not installed"))
    elif args.use_liger_kernel and not torch.cuda.is_available():
        wrong.append(("use_liger_kernel", "its kernels are Triton's, and there is no CUDA device"))
    known = {*_OF_A_TRIAL, *_REFUSED, *_UNSUPPORTED, *_KNOWN, *_NO_EFFECT}
    whose = f"of {type(args).__name__}, which TrainerTask does not know"
    wrong += [(each.name, whose) for each in fields(args) if each.name not in known and _changed(args, each)]
    if wrong := [(name, why) for name, why in wrong if name not in honoured]:
        raise TaskError(
            "a TrainerTask cannot honour these TrainingArguments: "
            + "; ".join(f"{name}={_shown(getattr(args, name))} ({why})" for name, why in wrong)
            + ". Change them; or subclass TrainerTask, act on them in `loss`, `optimizer` or another method, and name "
            "them in its `honoured`; or give `shoal.tune` a function that runs `Trainer` with a "
            "ReportCheckpointCallback"
        )


def save_memory(model: nn.Module, args: TrainingArguments) -> None:
    """Apply the kernels of `use_liger_kernel` and `activation_checkpointing` to a new model, as `Trainer` does.

    Raises:
        TaskError: The model has no parts that can be checkpointed.
    """
    if args.use_liger_kernel:
        apply_liger_kernel(model, args.liger_kernel_config)
    if args.activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        if enable is None:
            raise TaskError(
                f"activation_checkpointing=True of TrainingArguments: {type(model).__name__} has no method "
                "`activation_checkpointing_enable`, as models of transformers have; set it to False"
            )
        settings = _checkpointing(args)
        own = {name: settings.pop(name) for name in ("every_n_layers", "offload") if name in settings}
        try:
            enable(activation_checkpointing_kwargs=settings, **own)
        except ValueError as error:
            raise TaskError(f"activation_checkpointing=True of TrainingArguments: {error}") from error


def _checkpointing(args: TrainingArguments) -> dict[str, Any]:
    return {"use_reentrant": False, **cast("dict[str, Any]", args.activation_checkpointing_kwargs or {})}


def _changed(args: TrainingArguments, field: "Field[Any]") -> bool:
    """Whether an argument has not its default; one that must be given has none."""
    factory: Any = field.default_factory
    usual = field.default if isinstance(factory, type(MISSING)) else factory()  # pickled by value it is another object
    return bool(getattr(args, field.name) != usual)


def _shown(value: Any) -> str:
    return repr(getattr(value, "value", value))


def check_environment(args: TrainingArguments) -> None:
    """Check that `accelerate launch` sets no precision that the arguments lack."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16") or (precision == "bf16" and not args.bf16):
        raise TaskError(
            f"the environment has ACCELERATE_MIXED_PRECISION={precision}, as by `accelerate launch`, and workers of a "
            "study read only TrainingArguments; start the script with python, and set bf16=True for mixed precision"
        )


def _pass_steps(args: TrainingArguments, samples: int) -> int:
    """Optimizer steps of a pass over the training set, at least 1."""
    batches = samples / args.per_device_train_batch_size
    whole = math.floor(batches) if args.dataloader_drop_last else math.ceil(batches)
    return max(math.ceil(whole / args.gradient_accumulation_steps), 1)


def total_steps(args: TrainingArguments, samples: int) -> int:
    """Optimizer steps of the schedule of learning rates, as `Trainer` counts them."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * _pass_steps(args, samples))


def eval_every(args: TrainingArguments, samples: int) -> int | None:
    """Optimizer steps from one evaluation to the next; None for one evaluation after each pass."""
    if args.eval_strategy != "steps":
        return None
    steps = args.eval_steps or 0
    return int(steps) if steps >= 1 else math.ceil(total_steps(args, samples) * steps)


def warnings_for(
    args: TrainingArguments, samples: int, objectives: Sequence[Objective], longest: int | None
) -> list[str]:
    """Warnings about arguments that a study does not follow, though it trains as they say."""
    for name in (each.metric for each in objectives):
        if name.startswith("eval_"):
            own = "valid_loss" if name == "eval_loss" else name.removeprefix("eval_")
            raise TaskError(f"a TrainerTask reports {name} of `Trainer` as {own!r}; pass {own!r}")
    found = [
        f"{name}={_shown(getattr(args, name))} of TrainingArguments has no effect in a study; {remedy}"
        for name, remedy in _NO_EFFECT.items()
        if getattr(args, name)
    ]
    scheduled, epoch = total_steps(args, samples), eval_every(args, samples) or _pass_steps(args, samples)
    ends = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type) not in _ENDLESS
    if ends and longest is not None and abs(longest * epoch - scheduled) >= epoch:
        found.append(_length_text(args, scheduled, longest, epoch))
    return found


def early_stop(callback: Any, args: TrainingArguments) -> EarlyStop:
    """An `EarlyStoppingCallback`, which monitors `metric_for_best_model`."""
    if args.metric_for_best_model is None:
        raise TaskError("EarlyStoppingCallback needs metric_for_best_model of TrainingArguments, which is None")
    rule = Patience(callback.early_stopping_patience, float(callback.early_stopping_threshold or 0.0))
    shown = f"EarlyStoppingCallback with metric_for_best_model={args.metric_for_best_model!r}"
    return EarlyStop(shown, _best_goal(args), rule)


def _best_goal(args: TrainingArguments) -> Objective:
    """What `metric_for_best_model` and `greater_is_better` mean in a study; by default a loss is minimised."""
    name = str(args.metric_for_best_model).removeprefix("eval_")
    greater = not name.endswith("loss") if args.greater_is_better is None else args.greater_is_better
    return Objective("valid_loss" if name == "loss" else name, "max" if greater else "min")


def best_evaluation(args: TrainingArguments) -> tuple[str, Objective] | None:
    """The rule of `load_best_model_at_end`, in words and as an objective; None without it."""
    if not args.load_best_model_at_end:
        return None
    chosen = f"metric_for_best_model={args.metric_for_best_model!r} and greater_is_better={args.greater_is_better}"
    return f"load_best_model_at_end=True of TrainingArguments with {chosen}", _best_goal(args)


def _length_text(args: TrainingArguments, scheduled: int, longest: int, epoch: int) -> str:
    """The warning for a schedule of other steps than `longest` epochs of `epoch` steps."""
    given = f"max_steps={args.max_steps}" if args.max_steps > 0 else f"num_train_epochs={args.num_train_epochs:g}"
    remedy = f"max_steps={longest * epoch}"
    if args.eval_strategy == "steps" and (args.eval_steps or 0) < 1:  # a share of the schedule
        remedy = f"eval_steps={1 / longest:.4g}"
    elif args.max_steps <= 0 and args.eval_strategy != "steps":
        remedy = f"num_train_epochs={longest}"
    consequence = (
        "the longest trials continue after its end, where the learning rate is 0 or rises again"
        if longest * epoch > scheduled
        else "no trial reaches its end"
    )
    return (
        f"{given} of TrainingArguments plans the schedule {_shown(args.lr_scheduler_type)} for {scheduled} optimizer "
        f"steps, and the longest trials of the study have {longest} epochs of {epoch} steps, so {consequence}; set "
        f"{remedy}, or change the epochs of the algorithm"
    )


_log = logging.getLogger("shoal.train")

FUNCTION = "`shoal.tune` a function that runs `Trainer` with a ReportCheckpointCallback"

_IN_PLACE = {
    "compute_loss": "`loss`",
    "compute_loss_context_manager": "`loss`",
    "autocast_smart_context_manager": "`precision`",
    "training_step": "`loss`, or `step` for all of a training step",
    "create_optimizer": "`optimizer`",
    "get_optimizer_cls_and_kwargs": "`optimizer`",
    "get_decay_parameter_names": "`optimizer`",
    "create_scheduler": "`scheduler`",
    "create_optimizer_and_scheduler": "`optimizer` and `scheduler`",
    "call_model_init": "`model`",
    "get_train_dataloader": "`data`",
    "get_eval_dataloader": "`data`",
    "_get_train_sampler": "`data`, with a DataLoader that has the sampler",
    "_get_eval_sampler": "`data`, with a DataLoader that has the sampler",
    "get_batch_samples": "`collate`",
    "_prepare_inputs": "`collate`",
    "prediction_step": "`outputs`",
    "evaluation_loop": "`evaluate`",
    "log": "`metrics`",
}
"""Methods of `Trainer` with what `TrainerTask` has in their place; of the private ones, those that are overridden."""

_LOSSES = ("loss", "valid_loss")

_left_out: set[str] = set()
"""Names of metrics of which this process has said that they are left out."""


def check_methods(task: type, base: type) -> None:
    """Refuse a subclass with methods of `Trainer` that its base, `TrainerTask`, does not have and no study calls."""
    names = {*_IN_PLACE, *(name for name in dir(Trainer) if not name.startswith("_"))}
    if wrong := sorted(name for name in names if not hasattr(base, name) and callable(getattr(task, name, None))):
        instead = [f"`{name}`" + (f" (write {_IN_PLACE[name]})" if name in _IN_PLACE else "") for name in wrong]
        raise TaskError(
            f"{task.__name__} defines methods of `Trainer` that a study does not call: {', '.join(instead)}. Override "
            f"methods of TrainerTask instead; or give {FUNCTION}. Helpers of your own need other names"
        )


def optimizer_class(args: TrainingArguments, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The class of optimizer that `Trainer` takes for `optim`, with its settings.

    Raises:
        TaskError: Its package is not installed, or a study cannot step it.
    """
    name = getattr(args.optim, "value", args.optim)
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, cast("Any", model))
    except (ImportError, ValueError) as error:
        raise TaskError(f"optim={name!r} of TrainingArguments: {error}") from error
    if is_optimizer_factory(kind) or {"params", "model", "optimizer_dict"} & set(settings) or hasattr(kind, "train"):
        raise TaskError(
            f"optim={name!r} of TrainingArguments is not an optimizer that a study can step; choose another; or "
            f"subclass TrainerTask and override `optimizer`; or give {FUNCTION}"
        )
    return kind, settings


def keep_embeddings_whole(optimizer: Any, model: nn.Module) -> None:
    """Keep the states of embeddings in 32 bits, as `Trainer.create_optimizer` does for optimizers of bitsandbytes.

    Each optimizer has its own manager of overrides, which are by place in its groups; `Trainer` has one for all.
    """
    embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    manager = optimizer.mng = copy.copy(optimizer.mng)
    manager.index2config = {
        (row, column): {"optim_bits": 32}
        for row, group in enumerate(optimizer.param_groups)
        for column, parameter in enumerate(group["params"])
        if id(parameter) in embeddings
    }


def check_trained(model: nn.Module, optimizer: Any, max_norm: float | None) -> None:
    """Refuse to clip gradients some of which no optimizer zeroes: they add up, and `Trainer` zeroes the whole model's.

    Raises:
        TaskError: The optimizer lacks a parameter that is not frozen.
    """
    if name := uncleared(model, [optimizer], max_norm):
        raise TaskError(
            f"`optimizer` leaves out {name!r}, whose gradients would add up from step to step in the norm that "
            "max_grad_norm of TrainingArguments limits; freeze it by requires_grad_(False) in `model`; or give it "
            "to the optimizer in a group with lr=0, to count in the norm as by Trainer; or set max_grad_norm=0"
        )


def reported(found: Any, asked: Collection[str]) -> dict[str, float]:
    """The numbers that `compute_metrics` returned, by name without the prefix `"eval_"`; others are left out.

    Args:
        found: What it returned.
        asked: Names of the metrics by which the study compares trials.

    Raises:
        TaskError: It is no mapping of names, one of them is that of the loss, or a metric of the study is no number.
    """
    found = denumpify_detensorize(found)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise TaskError(f"`compute_metrics` must return a dict of names and numbers, got {found!r}")
    numbers = {}
    for key, value in found.items():
        name = key.removeprefix("eval_")
        if name in _LOSSES:
            raise TaskError(
                f"`compute_metrics` returns {key!r}, and a study reports the loss of the model, the eval_loss of "
                "`Trainer`, as 'valid_loss'; give the metric another name"
            )
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, (int, float)):
            numbers[name] = value
        elif name in asked:
            raise TaskError(
                f"`compute_metrics` returns {key!r} as {type(value).__name__}, and the study compares trials by it; "
                "return one number under this name, NaN where there is none, or pass another metric to shoal.tune"
            )
        elif key not in _left_out:
            _left_out.add(key)
            _log.warning(
                "`compute_metrics` returns %r as %s, which is no number: it is not reported", key, type(value).__name__
            )
    return numbers
