"""Finds the fusion key of a trial from the model, optimizer and data sets of its config."""

import logging
import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.core.array import FusionKey
from shoal.core.trial import Config, Trial
from shoal.fuse.generators import seed_all
from shoal.fuse.optim.table import update_kind_of
from shoal.fuse.structure import family_digest, structure_digest
from shoal.fuse.structure_serializer import digest
from shoal.task import Task, call
from shoal.train.bases import bases_of, without_data
from shoal.train.data.datasets import DataSets
from shoal.train.data.tracked_config import values_read
from shoal.train.step_settings import METHODS, StepSettings
from shoal.train.trial_runtime import check_model, check_optimizer, optimizers_in, parameter_warning

__all__ = ["SignatureBuilder", "WithoutValues"]

_log = logging.getLogger("shoal.train")

_READS_ALL = (
    "what builds the task's `base` reads all of the config, as `dict(config)` does, so each config has a base of its "
    "own, and such trials form no array; read only the names that it needs, as `config['name']`"
)


class SignatureBuilder:
    """Finds the `FusionKey` of each trial.

    Models are built on the meta device, once for all configs that agree in the values that `model` reads. A model that
    needs real tensors is built on the CPU.
    """

    def __init__(self, task: Task, sets: DataSets) -> None:
        self._task = task
        self._sets = sets
        self._bases = bases_of(task, sets.device)
        self._cache: list[tuple[dict[str, Any], nn.Module, str, str]] = []
        self._note = ""  # about the first trial with an unusual base or unusual parameters
        self._unread: frozenset[str] | None = None  # names that no trial so far has read; None: no trial so far

    def find_keys(self, trials: Sequence[Trial], load: bool = True) -> tuple[dict[int, FusionKey], dict[int, str], str]:
        """Find the keys of trials; if not `load`, only of those whose data sets are loaded.

        A trial whose methods raise or return invalid values gets a unique key, and raises again when it trains. Returns
        trial number -> key; number of each trial that raised -> the error, in a line; and a note on an unusual base,
        unusual parameters or unread names, or "".
        """
        keys: dict[int, FusionKey] = {}
        raised: dict[int, str] = {}
        for trial in trials:
            if not load and not self._sets.is_loaded(trial.config):
                continue
            try:
                keys[trial.number] = self.key(trial)
            except Exception as error:
                _log.warning(
                    "trial %d has no signature, since a method of its task raised:\n%s",
                    trial.number,
                    traceback.format_exc(),
                )
                keys[trial.number] = FusionKey(f"trial {trial.number}", "", 1)
                raised[trial.number] = " ".join(f"{type(error).__name__}: {error}".split())
        return keys, raised, self._note or self._unread_note()

    def key(self, trial: Trial) -> FusionKey:
        """Return the key of one trial."""
        train, valid = self._sets.of(trial.config)
        settings = StepSettings.of(self._task, trial.config, train.batch_size, valid.batch_size)
        with torch.random.fork_rng(devices=[]):
            seed_all(trial.seed, torch.device("cpu"))
            model, structure, family = self._model(trial)
            optimizer = self._optimizer(model, trial)
            self._unread = self._unread_names(trial.config, model, optimizer)
        optimizers = optimizers_in(optimizer)
        update_kinds = [str(x) for x in map(update_kind_of if type(self._task).step is Task.step else type, optimizers)]
        base = self._bases.key(trial.config)
        if self._bases.reads_all(trial.config):
            self._note = _READS_ALL
        shared = settings.of_structure(bool(base))
        return FusionKey(
            digest((structure, *update_kinds, *shared, *base)),
            digest(self._sets.key(trial.config)),
            settings.batch_size,
            trial.data_seed,
            family=digest((family, *update_kinds, *shared, *base)) if family else "",
        )

    def _model(self, trial: Trial) -> tuple[nn.Module, str, str]:
        """Return the model of a trial, with digests of its structure and its family."""
        for read, model, structure, family in self._cache:
            if all(trial.config.get(key) == value for key, value in read.items()):
                return model, structure, family
        self._bases.key(trial.config)  # builds the base, outside of the meta device
        try:
            with torch.device("meta"), WithoutValues():
                model, read = values_read(partial(self._bases.model, meta=True), trial.config)
        except Exception:  # the model needs real tensors, or `model` has an error and raises again here
            model, read = values_read(self._bases.model, trial.config)
        checked = check_model(model)
        found = without_data(model), structure_digest(checked), family_digest(checked)
        self._cache.append((read, *found))
        return found

    def _unread_names(self, config: Config, model: nn.Module, optimizer: Any) -> frozenset[str]:
        """Return the names of the config that no method of the task reads, of those that no earlier trial has read."""
        task = self._task
        names = frozenset(config) if self._unread is None else self._unread
        unread = names - self._sets.names_read(config)
        unread -= next(read for read, known, *_ in self._cache if known is model).keys()
        if not unread:
            return unread

        def read_all(given: Config) -> None:
            call(task, "optimizer", model, given)
            call(task, "scheduler", optimizer, given)
            for method in METHODS:
                call(task, method, given)

        try:
            return unread - values_read(read_all, config)[1].keys()
        except Exception:  # a method needs real tensors: what it reads is not known
            return frozenset()

    def _unread_note(self) -> str:
        if not self._unread:
            return ""
        kind = type(self._task)
        given_config = ("evaluate", "step", "end_epoch")
        own = [each for each in given_config if not getattr(kind, each).__module__.startswith("shoal.")]
        unread = self._unread - _words_in([getattr(kind, each) for each in own], kind)
        if not unread:
            return ""
        names = ", ".join(map(repr, sorted(unread)))
        while_training = f", unless `{'` or `'.join(own)}` reads it" if own else ""
        return (
            f"no method of the task reads {names} of the config; its values change nothing{while_training}: "
            "check the spelling"
        )

    def _optimizer(self, model: nn.Module, trial: Trial) -> Any:
        try:
            optimizer = call(self._task, "optimizer", model, config=trial.config)
        except Exception:  # the optimizer needs real tensors, or `optimizer` has an error and raises again here
            model = check_model(values_read(self._bases.model, trial.config)[0])
            optimizer = call(self._task, "optimizer", model, config=trial.config)
        checked_ones = check_optimizer(self._task, optimizer)
        if not self._note and (text := parameter_warning(model, optimizers_in(checked_ones))):
            self._note = f"trial {trial.number}: {text}"
        return checked_ones


def _words_in(functions: Iterable[Any], kind: type) -> set[str]:
    """Return the names and strings in the code of functions, and of all functions, methods of `kind` and constants that
    these name, but those of torch and of Shoal.
    """
    words: set[str] = set()
    seen: set[Any] = set()
    remaining = [(each, dict[str, Any]()) for each in functions]
    while remaining:
        part, known = remaining.pop()
        if isinstance(part, FunctionType):
            if part.__module__.partition(".")[0] in ("shoal", "torch"):
                continue
            remaining += [(cell.cell_contents, known) for cell in part.__closure__ or ()]
            known, part = part.__globals__, part.__code__
        if isinstance(part, str):
            words.add(part)
        elif isinstance(part, (tuple, list, set, frozenset)):
            remaining += [(each, known) for each in part]
        elif isinstance(part, CodeType) and part not in seen:
            seen.add(part)
            words.update(part.co_names, part.co_varnames)
            remaining += [(each, known) for each in part.co_consts]
            for name in part.co_names:
                remaining += [(known.get(name), known), *((vars(each).get(name), known) for each in kind.__mro__)]
    return words


class WithoutValues(TorchFunctionMode):
    """Skip initialization on the meta device, for which torch may import references as slow as torch itself."""

    _FILLS = frozenset(
        getattr(torch.Tensor, f"{name}_")
        for name in (
            "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform",
        )
    )  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._FILLS or getattr(func, "__module__", None) == nn.init.__name__:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        elif func in (torch.rand, torch.randn) and kwargs.keys().isdisjoint({"device", "generator"}):
            func = torch.empty
        elif func is torch.arange and "device" not in kwargs:
            return torch.arange(*args, **kwargs, device="cpu").to("meta")
        return func(*args, **kwargs)
