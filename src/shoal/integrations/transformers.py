"""Training as by `transformers.Trainer`: a task whose trials train as arrays."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    SequenceFeatureExtractor,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import EvalLoopContainer, LabelSmoother
from transformers.trainer_utils import number_of_arguments, unwrap_peft_model
from transformers.utils.generic import find_labels

from shoal.algorithms.rules import StopRule
from shoal.core.errors import TaskError
from shoal.core.objective import Objective
from shoal.core.trial import Config
from shoal.integrations.adapters import adapter_fields, with_adapter
from shoal.integrations.causal_lm import bounds_loss, causal_lm_loss, mark_bounded
from shoal.integrations.early_stopping import are_callbacks, rules_for
from shoal.integrations.trainer_arguments import (
    FUNCTION,
    ITEMS,
    SMOOTHING,
    best_evaluation,
    check,
    check_environment,
    check_methods,
    check_trained,
    early_stop,
    eval_every,
    keep_embeddings_whole,
    optimizer_class,
    override,
    reported,
    save_memory,
    total_steps,
    warnings_for,
)
from shoal.integrations.transformers_callback import ReportCheckpointCallback
from shoal.task import Task

__all__ = ["ReportCheckpointCallback", "TrainerTask"]

_MODEL = "each trial needs a new one; pass `model_init`, a function that returns it"

_OTHERS = {
    "model": _MODEL,
    "tokenizer": "pass it as `processing_class`",
    "callbacks": "the algorithm stops trials early (shoal.ASHA, shoal.Hyperband, shoal.Median), and `callbacks` of "
    f"tune follow the study; of Trainer's it takes EarlyStoppingCallback, for others give {FUNCTION}",
    "optimizers": "subclass TrainerTask and override `optimizer` and `scheduler`",
    "optimizer_cls_and_kwargs": "subclass TrainerTask and override `optimizer`",
    "compute_loss_func": "subclass TrainerTask and override `loss`",
}
"""Arguments of `Trainer` that are refused, with a remedy."""


_GENERATES = (
    "predict_with_generate=True: trials report no metric of `compute_metrics`, since to generate takes as long as many "
    "epochs; give `evaluate_generated` of the task the models of the best trials after the search"
)


class TrainerTask(Task):
    """Training as by `transformers.Trainer` with the same arguments, for each config of a search.

    The optimizer, its two groups of weight decay, the schedule per optimizer step with its warm-up, accumulation,
    clipping, precision, label smoothing and `compute_metrics` are `Trainer`'s. Arguments that cannot be honoured are
    refused by name. Arguments that only concern logs, saved files, seeds and devices have no effect: these are the
    study's. With `load_best_model_at_end`, the best epoch of a trial, by whose values it ranks and whose weights its
    model has, is that of the best `metric_for_best_model`, as with `best_by` of `tune`.
    `callbacks=[EarlyStoppingCallback(...)]` is `shoal.Patience` where its metric is that of the study. docs/trainer.md
    places each argument. What `Trainer` is subclassed for, such as another loss or optimizer, a subclass has in `loss`
    and `optimizer`.

    Names of the config that are names of `TrainingArguments` (learning_rate, weight_decay, warmup_steps,
    per_device_train_batch_size, lr_scheduler_type ...) override `args` for the trial, and those of fields of
    `peft_config` (r, lora_alpha, target_modules ...) that. `model_init` reads the others.

    The algorithm of the study decides how long a trial trains; `num_train_epochs` or `max_steps` is the length of its
    schedule of learning rates. A study validates after each epoch, and with eval_strategy="steps" an epoch is
    `eval_steps` optimizer steps. `Trainer`'s `eval_loss` is reported as `valid_loss`, and the metrics of
    `compute_metrics` under their own names, without the prefix `"eval_"`.

    Args:
        model_init: Function that returns a new model, without arguments or of the config. As by `Trainer`, it is also
            called once by the constructor, with None, to see what the model takes.
        args: Arguments of all trials.
        train_dataset: Training set with a length and indices; pickled with the task.
        eval_dataset: Evaluation set, likewise.
        data_collator: Makes a batch, a dict, of a list of samples; by default `DataCollatorWithPadding` of the
            `processing_class`, or `default_data_collator` without one.
        compute_metrics: Returns metrics by name of an `EvalPrediction` of the whole evaluation set.
        preprocess_logits_for_metrics: Function of logits and labels of a batch that returns what to keep of the logits.
        processing_class: Tokenizer, or feature extractor of sequences, that pads the samples of a batch; others have no
            effect.
        peft_config: Configuration of an adapter, such as `LoraConfig`, as TRL's trainers take it. `model_init` then
            returns the frozen model that adapters are put on, which each process builds once: it is `Task.base`.
        others: Arguments of `Trainer` that a study cannot honour; each is refused with a remedy.

    Raises:
        TaskError: An argument cannot be honoured, or is not what it must be.
    """

    scheduler_interval: Literal["epoch", "step"] = "step"

    honoured: Collection[str] = ()
    """Names of fields of `args` that a subclass acts on, though TrainerTask refuses or does not know them; a config may
    override them."""

    _function = "model_init"  # the argument that is a function which returns a model
    _bounds_loss = True  # whether `causal_lm_loss` may take the place of a model's own loss

    def __init__(
        self,
        model_init: Callable[..., nn.Module] | None = None,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        callbacks: Sequence[Any] = others.get("callbacks") or ()
        if are_callbacks(callbacks, "EarlyStoppingCallback"):
            others.pop("callbacks", None)
        for name in others:
            raise TaskError(f"{type(self).__name__} takes no `{name}`: {_OTHERS.get(name, 'nor does Trainer')}")
        if not callable(model_init) or isinstance(model_init, nn.Module):
            given = "nothing" if model_init is None else f"a {type(model_init).__name__}"
            raise TaskError(f"`model_init` must be a function that returns a model, got {given}: {_MODEL}")
        if not isinstance(args, TrainingArguments):
            raise TaskError(f"`args` must be TrainingArguments, got {type(args).__name__}")
        if eval_dataset is None:
            raise TaskError("TrainerTask needs an `eval_dataset`: trials are compared by an evaluation set")
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if isinstance(dataset, dict) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise TaskError(
                    f"`{name}` must be one data set with a length and indices, got {type(dataset).__name__}"
                )
        check_methods(type(self), TrainerTask)
        check(args, self.honoured)
        check_environment(args)
        self.args = args
        self._early_stops = [early_stop(each, args) for each in callbacks]
        self.loader_workers = args.dataloader_num_workers
        self.model_init = model_init
        self.peft_config, own_names = peft_config, adapter_fields(peft_config)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.data_collator = data_collator or _default_collator(processing_class)
        self.processing_class = processing_class
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._takes_config = _takes_config(model_init, self._function)
        self._other_names = None if self._takes_config else own_names  # None: any
        self._asked: tuple[str, ...] = ()  # metrics of the study
        model = self._first_model()
        self._traits = _Traits.of(model, args)
        save_memory(model, args)
        if type(self).optimizer is TrainerTask.optimizer:
            optimizer_class(args, model)

    def arguments(self, config: Config) -> TrainingArguments:
        """The arguments of a trial.

        Raises:
            TaskError: The config has a name or a value that is not possible.
        """
        return override(self.args, config, self._other_names, self.honoured, self._function)

    def data(self, config: Config) -> tuple[Dataset[Any] | DataLoader[Any], Dataset[Any] | DataLoader[Any]]:
        """Return both data sets; with `dataloader_drop_last`, loaders that leave out the last partial batch."""
        train, valid = self._sets(config)
        if not self.args.dataloader_drop_last:
            return train, valid
        sizes = ("per_device_train_batch_size", "per_device_eval_batch_size")
        args = self.arguments({name: config[name] for name in sizes if name in config})  # the rest changes no data
        workers = self.loader_workers
        return (
            DataLoader(train, args.per_device_train_batch_size, shuffle=True, num_workers=workers, drop_last=True),
            DataLoader(valid, args.per_device_eval_batch_size, num_workers=workers, drop_last=True),
        )

    def _sets(self, config: Config) -> tuple[Any, Any]:
        """The training and the evaluation set of a config, of whose values only those that change them are read."""
        return self.train_dataset, self.eval_dataset

    def base(self, config: Config) -> nn.Module | None:
        """Return the model of `model_init` if there is a `peft_config`."""
        return None if self.peft_config is None else self._initial(config)

    def _initial(self, config: Config) -> nn.Module:
        model = self.model_init(config) if self._takes_config else self.model_init()
        if not isinstance(model, nn.Module):
            raise TaskError(f"`{self._function}` must return a model, got {type(model).__name__}")
        return model

    def model(self, config: Config, *base: Any, **_: Any) -> nn.Module:
        """Return a new model of `model_init`, or a new adapter on that."""
        args = self.arguments(config)
        found = base[0] if base else self._initial(config)
        model = found if self.peft_config is None else with_adapter(found, self.peft_config, config)
        settings = getattr(model, "config", None)
        if settings is not None:
            settings.use_cache = args.use_cache
        save_memory(model, args)
        if args.label_smoothing_factor:
            if getattr(settings, "problem_type", None) == "multi_label_classification":
                raise TaskError("label_smoothing_factor has no meaning for several labels of one sample; set it to 0")
            dtype = next(model.parameters()).dtype
            model.register_buffer(SMOOTHING, torch.tensor(args.label_smoothing_factor, dtype=dtype), persistent=False)
        elif self._bounds_loss:
            mark_bounded(model)
        return model

    def optimizer(self, model: nn.Module, config: Config) -> Optimizer:
        """Return the optimizer of `args.optim` with two groups, of which the second has no weight decay."""
        args = self.arguments(config)
        kind, settings = optimizer_class(args, model)
        decayed = set(Trainer.get_decay_parameter_names(cast("Any", None), model))
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        groups = [
            {"params": [each for name, each in trained if name in decayed], "weight_decay": args.weight_decay},
            {"params": [each for name, each in trained if name not in decayed], "weight_decay": 0.0},
        ]
        optimizer = kind(groups, **settings)
        if "bitsandbytes" in str(kind) and settings.get("optim_bits") == 8:
            keep_embeddings_whole(optimizer, model)
        return cast("Optimizer", optimizer)

    def scheduler(self, optimizer: Any, config: Config) -> Any:
        """Return the schedule of `args.lr_scheduler_type`, with warm-up."""
        args = self.arguments(config)
        steps = total_steps(args, len(self._sets(config)[0]))
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=cast("Any", args.lr_scheduler_kwargs),
        )

    def batch_size(self, config: Config) -> int:
        """Return `per_device_train_batch_size`."""
        return self.arguments(config).per_device_train_batch_size

    def eval_batch_size(self, config: Config) -> int:
        """Return `per_device_eval_batch_size`."""
        return self.arguments(config).per_device_eval_batch_size

    def accumulate(self, config: Config) -> int:
        """Return `gradient_accumulation_steps`."""
        return self.arguments(config).gradient_accumulation_steps

    def clip_norm(self, config: Config) -> float | None:
        """Return `max_grad_norm` if it is above 0."""
        norm = self.arguments(config).max_grad_norm
        return norm if norm > 0 else None

    def precision(self, config: Config) -> str:
        """Return "bf16-mixed" if `bf16` is set, else "32"."""
        return "bf16-mixed" if self.arguments(config).bf16 else "32"

    def steps_per_epoch(self, config: Config) -> int | None:
        """Return `eval_steps` if `eval_strategy` is "steps"."""
        return eval_every(self.arguments(config), len(self._sets(config)[0]))

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch of `data_collator`, with the number of labels if the model scales its loss by it."""
        if self.args.remove_unused_columns:
            samples = [self._used(sample) for sample in samples]
        batch = self.data_collator(samples)
        if not isinstance(batch, Mapping):
            raise TaskError(f"`data_collator` must return a dict of the model's arguments, got {type(batch).__name__}")
        return self._counted(batch)

    def _counted(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch with the number of its labels, if the model scales its loss by it."""
        items = self._traits.items(batch)
        return dict(batch) if items is None else {**batch, ITEMS: items}

    def _study_warnings(self, objectives: Sequence[Objective], longest: int | None, config: Config) -> list[str]:
        self._asked = tuple(each.metric for each in objectives)
        found = warnings_for(self.arguments(config), len(self._sets(config)[0]), objectives, longest)
        return [*found, _GENERATES] if self._generates else found

    def _best_epoch(self) -> tuple[str, Objective] | None:
        return best_evaluation(self.args)

    def _stop_rules(self, objectives: Sequence[Objective]) -> list[StopRule]:
        return rules_for(self._early_stops, objectives)

    def _check_trained(self, model: nn.Module, optimizer: Any, config: Config) -> None:
        check_trained(model, optimizer, self.clip_norm(config))

    def _used(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name in self._traits.columns}

    def _weigh(self, batches: Sequence[Any], accumulate: int, micro_batches: int = 1) -> Sequence[tuple[Any, float]]:
        if all(ITEMS in batch for batch in batches):
            items = sum(batch[ITEMS] for batch in batches)
            return [({**batch, ITEMS: items}, 1.0) for batch in batches]
        whole = [batches[first : first + micro_batches] for first in range(0, len(batches), micro_batches)]
        return [(batch, share / len(whole)) for parts in whole for batch, share in Task._weigh(self, parts, 1)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the model's own loss, or the smoothed one if `label_smoothing_factor` is above 0."""
        if bounds_loss(model, batch):
            return causal_lm_loss(model, batch)
        found, labels = _forward(model, batch)
        if labels is not None:
            smoother = LabelSmoother(getattr(model, SMOOTHING))
            shift, items = self._traits.causal, batch.get(ITEMS)
            return cast("Tensor", smoother(found, labels, shift_labels=shift, num_items_in_batch=items))
        if isinstance(found, Mapping) and "loss" not in found:
            raise TaskError(
                f"the model returns no loss for {', '.join(batch)}, only {', '.join(found)}; its samples need labels, "
                "under the name that the model's forward takes, or its batches return_loss=True, if that is one"
            )
        return cast("Tensor", found["loss"] if isinstance(found, Mapping) else found[0])

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Return logits and labels of a batch if there is a `compute_metrics`."""
        labels = tuple(batch[name] for name in self._traits.label_names if batch.get(name) is not None)
        if self.compute_metrics is None or self.args.prediction_loss_only or self._generates:
            return None
        if not labels or len(labels) < len(self._traits.label_names):
            return None  # without labels, `Trainer` does not call `compute_metrics`
        found, _ = _forward(model, batch)
        if isinstance(found, Mapping):
            hidden = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
            logits: Any = tuple(value for name, value in found.items() if name not in (*hidden, "loss"))
        else:
            logits = found[1:]
        logits = pytree.tree_map(_full_precision, logits[0] if len(logits) == 1 else logits)
        wanted = labels[0] if len(labels) == 1 else labels
        if self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, wanted)
        return {"logits": logits, "labels": wanted}

    def evaluate(self, outputs: list[Any], config: Config) -> Mapping[str, float]:
        """Return the numbers of `compute_metrics` of the whole evaluation set, without the prefix `"eval_"`; what
        differs in length is padded with -100.

        Raises:
            TaskError: `compute_metrics` returns no mapping of names, or no number for a metric of the study.
        """
        if self.compute_metrics is None:
            return {}
        logits, labels = (EvalLoopContainer(self.args.eval_do_concat_batches, padding_index=-100) for _ in range(2))
        for each in outputs:
            logits.add(each["logits"])
            labels.add(each["labels"])
        prediction = EvalPrediction(predictions=logits.get_arrays(), label_ids=labels.get_arrays())
        return reported(self.compute_metrics(prediction), self._asked)

    @property
    def _generates(self) -> bool:
        return getattr(self.args, "predict_with_generate", False)

    def evaluate_generated(self, model: nn.Module, config: Config | None = None) -> dict[str, float]:
        """Return the metrics of `Seq2SeqTrainer.evaluate`, for which a model generates for the whole evaluation set.

        A study reports none of them, as generating takes as long as many epochs. Give it `study.best_model()`, or
        `study.model(number)` of the best trials, one after another.

        Args:
            model: Trained model, which is moved to the device of `args`.
            config: Config of its trial, if that overrides arguments of the evaluation.

        Returns:
            The numbers of `compute_metrics` and `valid_loss`, by name.

        Raises:
            TaskError: `args` has no predict_with_generate=True.
        """
        if not self._generates:
            raise TaskError(
                "evaluate_generated needs `args` with predict_with_generate=True, of Seq2SeqTrainingArguments; got "
                f"{type(self.args).__name__} without it"
            )
        found: dict[str, float] = {}

        def compute(prediction: EvalPrediction) -> dict[str, Any]:
            given = self.compute_metrics(prediction) if self.compute_metrics is not None else {}
            found.update(reported(given, ()))
            return given

        trainer = Seq2SeqTrainer(
            cast("Any", model),
            cast("Any", self.arguments(config or {})),
            data_collator=self.data_collator,
            eval_dataset=self.eval_dataset,
            processing_class=self.processing_class,
            compute_metrics=compute,
            preprocess_logits_for_metrics=self.preprocess_logits_for_metrics,
        )
        evaluated = trainer.evaluate()
        return {"valid_loss": evaluated["eval_loss"], **found} if "eval_loss" in evaluated else found

    def _first_model(self) -> nn.Module:
        """A model for inspection; torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            try:
                return self.model_init(None) if self._takes_config else self.model_init()
            except Exception as error:
                if self._takes_config:
                    error.add_note(
                        f"`{self._function}` is called with None once, as Trainer does, to see what the model takes; "
                        "let it begin with defaults, as by `config = config or {...}`"
                    )
                raise


@dataclass(frozen=True)
class _Traits:
    """Properties of a model that `Trainer` reads before training."""

    columns: frozenset[str]
    label_names: tuple[str, ...]
    scales: bool
    shifts: bool
    causal: bool

    @classmethod
    def of(cls, model: nn.Module, args: TrainingArguments) -> "_Traits":
        base = unwrap_peft_model(model)
        parameters = inspect.signature(base.forward).parameters
        free = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        names = find_labels(type(base)) if args.label_names is None else args.label_names
        if not names and "return_loss" not in parameters:
            raise TaskError(
                f"{type(base).__name__} takes no labels, so it has no loss; take a model with a head, or set "
                "label_names of TrainingArguments"
            )
        shifts = LOSS_MAPPING.get(getattr(base, "loss_type", "")) is ForCausalLMLoss
        return cls(
            columns=frozenset([*parameters, "label", "label_ids", *names]),
            label_names=tuple(names),
            scales=bool(getattr(base, "accepts_loss_kwargs", free)),
            shifts=shifts and not getattr(getattr(base, "config", None), "is_encoder_decoder", False),
            causal=base._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        )

    def items(self, batch: Mapping[str, Any]) -> Tensor | None:
        """The number of labels of a batch, a scalar; None if the model does not take it."""
        labels = batch.get("shift_labels", batch.get("labels"))
        if not self.scales or not isinstance(labels, Tensor) or "labels" not in batch:
            return None
        if self.shifts and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(-100).sum()


def _forward(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
    """The outputs of the model for a batch, and the labels that it was not given since they are to be smoothed."""
    inputs = dict(batch)
    labels = inputs.pop("labels", None) if hasattr(model, SMOOTHING) else None
    return model(**inputs), labels


def _default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Return the collator that `Trainer` takes if it is given none."""
    pads = isinstance(processing_class, (PreTrainedTokenizerBase, SequenceFeatureExtractor))
    return DataCollatorWithPadding(processing_class) if pads else default_data_collator


def _takes_config(model_init: Any, name: str) -> bool:
    count = number_of_arguments(model_init)
    if count > 1:
        raise TaskError(f"`{name}` must take no argument, or the config, got a function of {count} arguments")
    return bool(count)


def _full_precision(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value
