"""Which LightningModules can train as arrays, and the metrics that they hold, computed for each trial by itself.

Others are refused by the name of what they use. Metrics of torchmetrics are recorded in validation.
"""

import copy
import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import TaskError
from shoal.train.metrics import MetricMeans

__all__ = [
    "BATCHES",
    "EPOCH_END",
    "REMEDY",
    "EpochMetrics",
    "MetricCall",
    "MetricStandIn",
    "check_class",
    "check_module",
    "find_metrics",
    "parameters_of",
    "stand_ins",
    "uses",
]

BATCHES = "_shoal_batches"
"""Buffer of a module: training batches of its trial so far, int64, not in its state dict."""

EPOCH_END = "on_validation_epoch_end"
"""Hook of a module that is called for the metrics of torchmetrics that it holds, so only if it holds any."""

REMEDY = (
    "Train it as a function instead: shoal.tune(train, ...), where train(config) calls Trainer.fit with a "
    "ReportCheckpointCallback"
)

_HOOKS = (
    *("backward", "clip_gradients", "configure_callbacks", "configure_gradient_clipping", "configure_model"),
    *("configure_sharded_model", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "prepare_data"),
    *("setup", "teardown", "train_dataloader", "transfer_batch_to_device", "val_dataloader"),
)
_LIBRARIES = ("lightning", "pytorch_lightning")
_ELSEWHERE = ("on_test_", "on_predict_")


def check_class(module: Any) -> None:
    """Check that a class is a LightningModule whose methods have equals in a task."""
    bases = module.__mro__ if isinstance(module, type) else ()
    base = next(
        (x for x in bases if x.__name__ == "LightningModule" and x.__module__.split(".")[0] in _LIBRARIES), None
    )
    if base is None:
        raise TaskError(f"`module` must be a subclass of LightningModule, not an object of it, got {module!r}")
    hooks = [name for name in dir(base) if name.startswith("on_") and callable(getattr(base, name))]
    names = [name for name in (*hooks, *_HOOKS) if not name.startswith(_ELSEWHERE) and name != EPOCH_END]
    if wrong := sorted(name for name in names if _overrides(module, base, name)):
        raise TaskError(f"{module.__name__} defines {', '.join(wrong)}, which arrays do not call. {REMEDY}")
    for name in ("training_step", "validation_step", "configure_optimizers"):
        if not _overrides(module, base, name):
            raise TaskError(f"{module.__name__} must define `{name}`")
    if uses(module, "validation_step", "batch_idx"):
        raise TaskError(
            f"{module.__name__}.validation_step uses batch_idx, which arrays do not count in validation; do without "
            f"it. {REMEDY}"
        )


def _overrides(module: type, base: type, name: str) -> bool:
    return getattr(module, name, None) is not getattr(base, name, None)


def check_module(model: Any, has_metrics: bool) -> None:
    """Refuse a new module that optimizes manually, or ends validation without metrics or with a call of `super`."""
    if not model.automatic_optimization:
        raise TaskError(
            f"{type(model).__name__} sets automatic_optimization = False; manual optimization cannot be an array. "
            f"{REMEDY}; or write a shoal.Task with a `step` of your own, in which several optimizers are fused"
        )
    end = inspect.unwrap(getattr(type(model), EPOCH_END))
    if not has_metrics and end.__module__.split(".")[0] not in _LIBRARIES:
        raise TaskError(
            f"{type(model).__name__} defines {EPOCH_END} and holds no metrics of torchmetrics, of which alone arrays "
            f"keep a state in validation; log means in validation_step, or use such metrics. {REMEDY}"
        )
    if "__class__" in getattr(getattr(end, "__code__", None), "co_freevars", ()):
        raise TaskError(
            f"{type(model).__name__}.{EPOCH_END} calls super(), and is called without a module; leave the call out if "
            f"it is that of LightningModule, which does nothing. {REMEDY}"
        )


def parameters_of(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Names of the arguments of a function or class, and whether it takes others by `**`."""
    parameters = inspect.signature(function).parameters.values()
    fixed = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY)
    return [x.name for x in parameters if x.kind not in fixed], any(x.kind == Parameter.VAR_KEYWORD for x in parameters)


def uses(module: type[nn.Module], method: str, default_name: str) -> bool:
    """Whether a step may use its second argument, the number of the batch.

    Args:
        default_name: Name of the argument, which it has if the step takes any number of arguments.
    """
    function = inspect.unwrap(getattr(module, method))
    names = [x for x in parameters_of(function)[0] if x != "self"]
    if not inspect.isfunction(function) or len(names) < 2:
        return default_name in names
    code = function.__code__
    loads = (each for each in dis.get_instructions(code) if each.opname.startswith("LOAD"))
    return names[1] in code.co_cellvars or any(_names(each.argval, names[1]) for each in loads)


def _names(argument: Any, name: str) -> bool:
    """Whether the argument of an instruction is a name, or several with it."""
    return argument == name or (isinstance(argument, tuple) and name in argument)


_KEYS = "_shoal_metrics"
"""Attribute of a model: name of each metric that it holds -> keys of a collection, or None."""

_ATTRIBUTE = "make it an attribute of the LightningModule, or put it into a MetricCollection"

_OF_LIBRARIES = ("_modules", "_hparams", "_hparams_initial")
"""Attributes that torch and `save_hyperparameters` fill."""


def find_metrics(model: nn.Module) -> dict[str, Any]:
    """Return the metrics and collections of metrics among the attributes of a new module, by name."""
    library = sys.modules.get("torchmetrics")
    if library is None:
        return {}
    kinds = (library.Metric, library.MetricCollection)
    found = {name: each for name, each in model._modules.items() if isinstance(each, kinds)}
    for name, each in found.items():
        first = next(other for other, metric in found.items() if metric is each)
        if first != name:
            raise TaskError(
                f"{type(model).__name__} holds one metric as self.{first} and as self.{name}, so its value mixes both "
                "uses; make one metric for each"
            )
    for name, value in vars(model).items():
        if not isinstance(value, (dict, list, tuple)) or name in _OF_LIBRARIES:
            continue
        if any(isinstance(each, kinds) for each in (value.values() if isinstance(value, dict) else value)):
            raise TaskError(
                f"{type(model).__name__} holds metrics of torchmetrics in self.{name}, a {type(value).__name__}; "
                f"{_ATTRIBUTE}. {REMEDY}"
            )
    for name, each in model.named_modules():
        if isinstance(each, library.Metric) and name.split(".")[0] not in found:
            raise TaskError(
                f"{type(model).__name__} holds the metric {name} of torchmetrics in another module; {_ATTRIBUTE}. "
                f"{REMEDY}"
            )
    for name, each in found.items():
        if any(True for _ in (*each.parameters(), *each.buffers())):
            raise TaskError(f"the metric self.{name} holds a model, which arrays do not train. {REMEDY}")
    vars(model)[_KEYS] = {name: [*each] if isinstance(each, nn.ModuleDict) else None for name, each in found.items()}
    return found


@dataclass(frozen=True, eq=False)
class MetricCall:
    """Stands for the value that a call of a metric returns for its batch. It can be logged, and nothing else.

    Args:
        index: Number of the call among those of this metric (or collection) in the batch.

    Raises:
        TaskError: A step computes with the value.
    """

    name: str
    index: int

    def _refuse(self, *_: Any) -> Any:
        raise TaskError(
            f"a step computes with the value of the metric self.{self.name}, which is known only after the validation; "
            f"log it as it is, or use a function of torchmetrics.functional. {REMEDY}"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __float__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


class MetricStandIn:
    """Stands for a metric within a step: keeps the arguments of its calls.

    Args:
        keys: Keys of a collection; None for a single metric.
        training: Whether the step is a training step, of which nothing is kept.

    Raises:
        TaskError: The step asks for more than to update the metric, or to log it.
    """

    def __init__(self, name: str, keys: Sequence[str] | None, epoch: "EpochMetrics", training: bool) -> None:
        self.name = name
        self.calls: list[Any] = []
        """For each call its positional and keyword arguments, and whether the value of the batch was asked for."""
        self._keys = keys
        self._epoch = epoch
        self._training = training

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Keep the arguments."""
        self._keep(args, kwargs, forward=False)

    def _keep(self, args: Sequence[Any], kwargs: Mapping[str, Any], forward: bool) -> None:
        if self._training:
            self._epoch.trained.add(self.name.partition(".")[0])
            return
        if self.name in self._epoch.trained:
            raise TaskError(
                f"training_step and validation_step update the same metric self.{self.name}, so its value mixes both; "
                "make one metric for each"
            )
        if "." in self.name:
            raise TaskError(
                f"validation_step updates self.{self.name} of a collection by itself; update the collection, "
                f"self.{self.name.partition('.')[0]}, or make the metric an attribute of the LightningModule"
            )
        # The step may change its tensors in place after the call.
        self.calls.append((*pytree.tree_map_only(Tensor, torch.clone, (list(args), kwargs)), forward))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the arguments; return what stands for the value of the batch."""
        self._keep(args, kwargs, forward=True)
        index = len(self.calls) - 1
        if self._keys is None:
            return MetricCall(self.name, index)
        return {key: MetricCall(f"{self.name}.{key}", index) for key in self._keys}

    forward = __call__

    def items(self) -> Iterator[tuple[str, "MetricStandIn"]]:
        """Return the metrics of a collection, for `self.log_dict`."""
        for key in self._keys or ():
            yield key, MetricStandIn(f"{self.name}.{key}", None, self._epoch, self._training)

    def __getitem__(self, key: str) -> "MetricStandIn":
        """Return a metric of a collection, for `self.log`."""
        found = dict(self.items())
        return found[key] if key in found else self.__getattr__(f"[{key!r}]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(
            f"a step uses self.{self.name}.{name}; a step of an array can only update a metric, and log it: "
            f"self.log(..., self.{self.name}). {REMEDY}"
        )


def stand_ins(model: nn.Module, epoch: "EpochMetrics") -> dict[str, MetricStandIn]:
    """Return what stands for the metrics of a model, or of an array of models, within one step."""
    return {name: MetricStandIn(name, keys, epoch, model.training) for name, keys in vars(model).get(_KEYS, {}).items()}


@dataclass
class EpochMetrics:
    """Computes the metrics of a validation from the calls of its batches.

    A trial has metric objects of its own, on the CPU, which are reset before each validation.
    """

    trained: set[str] = field(default_factory=set)
    """Names of metrics that training steps update."""
    _metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of a module, as text -> copies of its metrics."""

    def __getstate__(self) -> dict[str, Any]:
        return {"trained": set(), "_metrics": {}}

    def keep(self, arguments: Mapping[str, Any], metrics: Mapping[str, nn.Module]) -> None:
        """Keep copies of the metrics of a new module, unless it is on the meta device."""
        each = [one for metric in metrics.values() for one in metric.modules()]
        if not any(getattr(getattr(one, "device", None), "type", "") == "meta" for one in each):
            self._metrics[repr(arguments)] = {name: copy.deepcopy(one).cpu() for name, one in metrics.items()}

    def values(self, module: type, arguments: Mapping[str, Any], batches: Sequence[Any]) -> dict[str, float]:
        """Return what a validation logs of its metrics.

        Args:
            batches: For each batch its samples, and the calls and the logged metrics; see `ValidationLog.recorded`.
        """
        metrics = self._metrics[repr(arguments)]
        for each in metrics.values():
            each.reset()
        means = MetricMeans(1)
        log = _EpochLog(metrics)
        for batch in batches:
            found = {name: _called(metrics[name], calls) for name, calls in batch["calls"].items()}
            for logged, target in batch["logged"].items():
                ((path, index),) = target.items()
                name, _, key = path.partition(".")
                if index is None:
                    log.objects[logged] = path
                else:
                    value = found[name][int(index)]
                    if key and key not in value:
                        raise TaskError(
                            f"self.{path} has several values; make it an attribute outside the collection, "
                            f"and log each value by a name of its own in {EPOCH_END}"
                        )
                    means.add_each([{logged: value[key] if key else value}], int(batch["samples"]))
        (values,) = means.per_trial()
        values |= {name: _number(name, _at(metrics, path).compute()) for name, path in log.objects.items()}
        end: Any = module
        end.on_validation_epoch_end(log)
        log.check_reset()
        return {**values, **log.values}


class _EpochLog:
    """Stands for the module in its `on_validation_epoch_end`: has its metrics and `log`."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.values: dict[str, float] = {}
        self.objects: dict[str, str] = {}
        """Logged name -> metric that is logged as an object, so that it is reset after the epoch."""
        self._metrics = metrics
        self._used: set[str] = set()

    def log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Keep a value, or the value of a metric; the other arguments concern loggers and several processes."""
        own = next((n for n, metric in self._metrics.items() if any(each is value for each in metric.modules())), None)
        if own is not None:
            self.objects[name] = own
            value = value.compute()
        self.values[name] = _number(name, value)

    def log_dict(self, dictionary: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in self._metrics:
            raise TaskError(
                f"{EPOCH_END} uses self.{name}; for the trials of an array it can only use self.log, self.log_dict and "
                f"metrics that validation_step updates. {REMEDY}"
            )
        self._used.add(name)
        return self._metrics[name]

    def check_reset(self) -> None:
        """Check that the metrics that the method used start anew at the next epoch."""
        reset = {path.partition(".")[0] for path in self.objects.values()}
        for name in sorted(self._used - reset):
            metric = self._metrics[name]
            each = [metric] if not isinstance(metric, nn.ModuleDict) else [*metric.values()]
            if any(one.update_called for one in each):
                raise TaskError(
                    f"{EPOCH_END} uses the metric self.{name} and does not reset it, so its value is that of several "
                    f"epochs; call self.{name}.reset() at its end, or log the metric itself. {REMEDY}"
                )


def _called(metric: Any, calls: Sequence[Any]) -> list[Any]:
    """Call a metric with the arguments of each call; return the values of the batch, or None for an update."""
    return [metric(*args, **kwargs) if forward else metric.update(*args, **kwargs) for args, kwargs, forward in calls]


def _at(metrics: Mapping[str, Any], path: str) -> Any:
    name, _, key = path.partition(".")
    return dict(metrics[name].items())[key] if key else metrics[name]


def _number(name: str, value: Any) -> float:
    if isinstance(value, Mapping) or (isinstance(value, Tensor) and value.numel() != 1):
        raise TaskError(f"self.log({name!r}, ...) is given a metric with several values; log each by a name of its own")
    if not isinstance(value, (Tensor, int, float)):
        raise TaskError(f"self.log({name!r}, ...) is given {type(value).__name__}; log a tensor or a number")
    return float(value)
