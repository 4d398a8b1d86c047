"""Common base of the tasks of TRL's trainers: model, adapter, prepared data and metrics of an evaluation."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments
from trl.trainer.utils import create_model_from_path, disable_dropout_in_model

from shoal.core.errors import TaskError
from shoal.core.objective import Objective
from shoal.core.trial import Config
from shoal.integrations.adapters import adapter_fields, with_adapter
from shoal.integrations.causal_lm import why_adapter_unsupported
from shoal.integrations.transformers import TrainerTask
from shoal.integrations.trl.arguments import LOADING, ConfigFields, check, check_type
from shoal.integrations.trl.prepared_data import PreparedData, check_columns, prepare

__all__ = ["TRLTask"]

_PROBED_ROWS = 2
"""Rows of each set that the constructor prepares, to refuse early what TRL refuses."""

_MAX_PREPARED = 8
"""Prepared data sets that a task keeps, those used last: one for each value of the fields that change them."""

_OTHERS = {
    "compute_metrics": "TRL's own metrics are reported; for others subclass and override `outputs` and `evaluate`",
    "preprocess_logits_for_metrics": "it belongs to `compute_metrics`",
}

Scores = tuple[Tensor, Mapping[str, Tensor]]
"""Loss and metrics of a batch."""

_evaluated: ContextVar[tuple[ref[nn.Module], ref[Tensor], Mapping[str, Tensor]] | None]
_evaluated = ContextVar("trl_evaluated", default=None)
"""Model and tokens of the last loss of an evaluation, with the metrics found with it, which `outputs` takes."""


class TRLTask(TrainerTask):
    """Base of the tasks that train as a trainer of TRL; see the subclasses."""

    known: ClassVar[ConfigFields]
    _function = "model"
    _bounds_loss = False
    _preparation: Mapping[str, Any] = {}  # arguments of TRL's trainer for `prepare`

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
        **others: Any,
    ) -> None:
        name = type(self).__name__
        if args is None:
            args = self.known.kind(output_dir="trl")
        check_type(args, self.known, name)
        if isinstance(model, nn.Module) or not (isinstance(model, str) or callable(model)):
            raise TaskError(
                f"`model` of {name} must be a name or path, or a function that returns a model, got a "
                f"{type(model).__name__}: trials need models of their own"
            )
        named = isinstance(model, str)
        check(args, self.known, named)
        for other in others:
            if other in _OTHERS:
                raise TaskError(f"{name} takes no `{other}`: {_OTHERS[other]}")
        if quantization_config is not None and not named:
            raise TaskError("`quantization_config` needs the name of a model; quantise the model in your function")
        adapter_fields(peft_config)  # which refuses what is no configuration of peft
        if peft_config is not None and peft_config.is_prompt_learning:
            raise TaskError(
                f"{name} takes no {type(peft_config).__name__}, which puts virtual tokens before each row; take an "
                "adapter of layers, such as LoraConfig(...)"
            )
        for which, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if dataset is None:
                raise TaskError(f"{name} needs a `{which}`: trials are compared by an evaluation set")
            check_columns(args, which, dataset, free=bool(self._preparation.get("formatting_func")))
        self._name = model if isinstance(model, str) else None
        self._quantization_config = quantization_config
        self._tokenizer = _tokenizer(processing_class, model, args, name)
        self._preparation = {**self._preparation, "data_collator": data_collator}
        self._prepared: dict[str, PreparedData] = {}  # pickled, too: to prepare again takes longer than to read
        first, other = (each.select(range(min(len(each), _PROBED_ROWS))) for each in (train_dataset, eval_dataset))
        prepare(args, first, other, self._tokenizer, probe=True, **self._preparation)
        super().__init__(
            self._load_first if isinstance(model, str) else model,
            args,
            train_dataset,
            eval_dataset,
            peft_config=peft_config,
            **others,
        )
        self.arguments({})

    def arguments(self, config: Config) -> TrainingArguments:
        """The arguments of a trial.

        Raises:
            TaskError: The config has a name or a value that is not possible.
        """
        args = super().arguments(config)
        check(args, self.known, self._name is not None)
        return args

    def _initial(self, config: Config) -> nn.Module:
        if self._name is None:
            return super()._initial(config)
        return self._load(self.arguments({name: config[name] for name in LOADING if name in config}))

    def model(self, config: Config, *base: Any, **_: Any) -> nn.Module:
        """Return a new adapter on the base model, or a new model if there is no `peft_config`."""
        return self._completed(super().model(config, *base), self.arguments(config))

    def _completed(self, model: Any, args: TrainingArguments) -> nn.Module:
        """A model with what TRL's constructors do to it."""
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            raise TaskError(f"`model` must be a model of transformers, with its `config`, got {type(model).__name__}")
        self._name_tokens(model, args)
        self._check_model(model, args)
        if isinstance(getattr(model, "get_output_embeddings", lambda: None)(), BaseTunerLayer):
            raise TaskError(
                "an adapter of the output embeddings ('lm_head') is not trained by TRL; remove it from target_modules, "
                "or train it whole by modules_to_save"
            )
        if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
            if self.peft_config is None and not hasattr(model, "peft_config"):
                raise TaskError(
                    "a quantised model trains adapters alone, as transformers says; pass a `peft_config`, such as "
                    "LoraConfig(...)"
                )
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "lora_magnitude_vector" not in name:
                    parameter.data = parameter.data.to(torch.bfloat16)
        if getattr(args, "disable_dropout", False):
            disable_dropout_in_model(model)
        return cast("nn.Module", model)

    def _name_tokens(self, model: Any, args: Any) -> None:
        """Write the ids of the padding and of an eos_token of `args` to the configs of a model."""
        tokenizer, eos = self._tokenizer, getattr(args, "eos_token", None)
        pad = args.pad_token or tokenizer.pad_token or eos or tokenizer.eos_token
        ids = {"pad_token_id": pad, "eos_token_id": eos}
        for holder in (model.config.get_text_config(), getattr(model, "generation_config", None)):
            for name, token in ids.items():
                if holder is not None and token is not None:
                    setattr(holder, name, tokenizer.convert_tokens_to_ids(token))

    def _check_model(self, model: Any, args: TrainingArguments) -> None:
        """Refuse a model on which TRL adds a loss of its experts, or whose adapter is not in its layers."""
        if found := why_adapter_unsupported(model):
            raise TaskError(
                f"{found}, and {type(self).__name__} runs the layers alone; take LoraConfig(...) or the like"
            )
        text = model.config.get_text_config()
        coefficient = getattr(args, "router_aux_loss_coef", None)
        if hasattr(text, "output_router_logits"):
            if coefficient is None:
                coefficient = getattr(text, "router_aux_loss_coef", 0.0)
            if coefficient:
                raise TaskError(
                    f"{type(model).__name__} has experts, and router_aux_loss_coef={coefficient} would add a loss of "
                    f"them, which a study does not compute; set router_aux_loss_coef=0.0 in {self.known.kind.__name__}"
                )
            text.output_router_logits, text.router_aux_loss_coef = False, 0.0
        elif coefficient:
            raise TaskError(f"router_aux_loss_coef={coefficient}, and {type(model).__name__} has no experts; remove it")

    def _first_model(self) -> nn.Module:
        model = super()._first_model()
        if self.peft_config is not None and hasattr(model, "peft_config"):
            raise TaskError("`model` has an adapter already, and there is a `peft_config`; return the model without it")
        with torch.random.fork_rng(devices=[]):
            return self._completed(
                model if self.peft_config is None else with_adapter(model, self.peft_config, {}), self.args
            )

    def _load_first(self) -> nn.Module:
        with _readable(self._name):
            return self._load(self.args)

    def _load(self, args: Any) -> nn.Module:
        """The model of the given name, as the constructors of TRL read it."""
        settings = {"trust_remote_code": args.trust_remote_code, "device_map": None, **(args.model_init_kwargs or {})}
        if self._quantization_config is not None:
            settings["quantization_config"] = self._quantization_config
        return self._from_pretrained(str(self._name), settings)

    def _from_pretrained(self, name: str, settings: dict[str, Any]) -> nn.Module:
        return create_model_from_path(name, **settings)

    def _sets(self, config: Config) -> tuple[Any, Any]:
        found = self._prepare(self.arguments({name: config[name] for name in self.known.data if name in config}))
        return found.train, found.valid

    def _prepare(self, args: TrainingArguments) -> PreparedData:
        """The data of some arguments, prepared once, at the latest in this process."""
        key = repr([(name, getattr(args, name)) for name in sorted(self.known.data)])
        found = self._prepared.pop(key, None)
        if found is None:
            if len(self._prepared) >= _MAX_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            found = prepare(args, self.train_dataset, self.eval_dataset, self._tokenizer, **self._preparation)
        self._prepared[key] = found  # at the end, as the one used last
        return found

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch that TRL's collator makes."""
        collator = samples[0][0]
        batch = collator([row for _, row in samples])
        if not isinstance(batch, Mapping):
            raise TaskError(f"`data_collator` must return a dict of the model's arguments, got {type(batch).__name__}")
        return dict(batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return TRL's loss."""
        loss, metrics = self._scores(model, batch, statistics=not model.training)
        if not model.training:
            _evaluated.set((ref(model), ref(batch["input_ids"]), metrics))
        return loss

    def outputs(self, model: nn.Module, batch: Any) -> Any:
        """Return TRL's metrics of a batch."""
        found = _evaluated.get()
        _evaluated.set(None)
        if found is not None and found[0]() is model and found[1]() is batch["input_ids"]:
            return found[2]
        return self._scores(model, batch, statistics=True)[1]

    def evaluate(self, outputs: list[Any], config: Config) -> Mapping[str, float]:
        """Return the mean of each metric over the batches, as TRL logs it, without the prefix `"eval_"`."""
        return {name: sum(float(each[name]) for each in outputs) / len(outputs) for name in outputs[0]}

    def _study_warnings(self, objectives: Sequence[Objective], longest: int | None, config: Config) -> list[str]:
        found = super()._study_warnings(objectives, longest, config)
        if "lora_dropout" in config and getattr(self.arguments(config), "disable_dropout", False):
            found.append(
                f"lora_dropout of the config changes nothing, since disable_dropout of {self.known.kind.__name__} is "
                "True, its default; set disable_dropout=False, or remove lora_dropout from the space"
            )
        return found

    @abstractmethod
    def _scores(self, model: nn.Module, batch: Any, statistics: bool) -> Scores:
        """Loss and, if `statistics`, metrics of a batch."""


@contextmanager
def _readable(name: str | None) -> Iterator[None]:
    """Context manager in which the constructor reads what a name of a model stands for."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise TaskError(
            f"transformers cannot read the `model` {name!r}; give a directory into which `save_pretrained` has written "
            "model and tokenizer, a name on the Hugging Face Hub, or a function that returns a model, with a "
            f"`processing_class`. It says: {error}"
        ) from error


def _tokenizer(given: Any, model: Any, args: TrainingArguments, task: str) -> PreTrainedTokenizerBase:
    if given is None and isinstance(model, str):
        settings = getattr(args, "model_init_kwargs", None) or {}
        with _readable(model):
            given = AutoTokenizer.from_pretrained(
                model, revision=settings.get("revision"), trust_remote_code=getattr(args, "trust_remote_code", False)
            )
    if not isinstance(given, PreTrainedTokenizerBase):
        raise TaskError(
            f"`processing_class` of {task} must be a tokenizer, got {type(given).__name__}: pass the model's tokenizer"
        )
    if getattr(args, "pad_token", None) is None and given.pad_token is None and given.eos_token is None:
        raise TaskError(
            "the tokenizer has neither a pad_token nor an eos_token, which would be taken for it; set "
            "`tokenizer.pad_token`"
        )
    return given
