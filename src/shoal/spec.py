"""The specification of a study: what `tune` was called with, as JSON values."""

import re
import reprlib
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import inf
from types import NoneType
from typing import Any, Literal, Self

from msgspec import ValidationError, convert

from shoal.algorithms.base import Totals, check_integer
from shoal.algorithms.rules import NoImprovement
from shoal.core.constraint import Constraint, parse_constraints
from shoal.core.epoch_order import EpochOrder
from shoal.core.errors import ShoalError
from shoal.core.job import HANG_SECONDS
from shoal.core.objective import Objective, objectives
from shoal.core.plain import plain_fields
from shoal.core.repeats import Repeats
from shoal.core.resources import parse_bytes
from shoal.core.rows import TrialRow
from shoal.core.space import Space
from shoal.core.trial import Config, EarlierTrial, derive_seed
from shoal.core.version import VERSION

__all__ = ["StudySpec", "check_keep"]

MIN_HANG_SECONDS = 3.0
MIN_PROCESS_MEMORY = 32 << 20
"""Bytes without which a process of Python may not even start."""


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """Specification of a study: `tune` makes it, and the journal keeps it unchanged.

    What changes while the study runs is a value of the journal instead, see `JournalView.study`. Of the fields that
    have the name of an argument of `tune`, those that are not listed here are that argument.

    Args:
        space: Text of `Space.to_json`.
        algorithm: Call that makes the algorithm, for people; the journal has its pickle.
        chosen_because: Why Shoal chose the algorithm; "" if the caller did.
        policy: Name of a policy, or a text of `strategy_text`.
        packing: The same of a packing.
        earlier: Trials of earlier studies that the algorithm's model uses, a copy.
        earlier_from: Where they come from, and what could not be used, for people: a line for each study.
        callbacks: Name and pickle of each callback.
        task: Name of the task's class, or of the function or command.
        opaque: Key of the function or command in the profile history; "" for a `Task`.
        kept: Whether the pickle of the task holds its definition, so that an edit has no effect.
        project: Directory of the task's source files; None if the task is of no project.
        batches: Batch sizes, for people; "" if Shoal does not know them.
        timeout: Seconds that the study may run, or None; `JournalView.time_left` has what is left of them.
        trial_timeout: Seconds that each trial may train, or None.
        totals: Trials and epochs that the algorithm requests in all; None if they are unknown.
        paths: Entries of `sys.path`.
        settings: Settings of torch in the process that called `tune`, for its workers.
        shoal: Version of Shoal.

    Raises:
        ShoalError: A value is invalid; the message names it.
    """

    metric: str | Sequence[str]
    mode: str | Sequence[str]
    space: str = Space({}).to_json()
    algorithm: str = ""
    chosen_because: str = ""
    policy: str = "auto"
    objective: str = "makespan"
    target: float | None = None
    stop_after: NoImprovement | None = None
    constraints: Mapping[str, str] = field(default_factory=dict)
    rank_by: str = "best"
    best_by: str | Mapping[str, str] | None = None
    keep: int | str = "all"
    packing: str = "cost"
    fuse: bool = True
    devices: str | Sequence[str] = "auto"
    backend: str = "local"
    ray_address: str | None = None
    sbatch: str | None = None
    sharing: str = "auto"
    oversubscription: float = 1.0
    seed: int = 0
    data_seed: int | Literal["trial"] | None = None
    initial: Sequence[Config] = field(default_factory=list)
    earlier: Sequence[EarlierTrial] = field(default_factory=list)
    earlier_from: Sequence[str] = field(default_factory=list)
    repeats: int = 1
    folds: int = 1
    aggregate: str = "mean"
    retries: int = 2
    memory_limit: int | str | None = "auto"
    checkpoint_seconds: float = 30.0
    hang_seconds: float = HANG_SECONDS
    loss: str | None = None
    timeout: float | None = None
    trial_timeout: float | None = None
    max_concurrent: int | None = None
    callbacks: Sequence[Mapping[str, str]] = field(default_factory=list)
    task: str = ""
    opaque: str = ""
    kept: bool = False
    project: str | None = None
    batches: str = ""
    totals: Totals | None = None
    paths: Sequence[str] = field(default_factory=list)
    settings: Mapping[str, bool | int | str] = field(default_factory=dict)
    shoal: str = VERSION

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("best_by", "constraints"):
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, dict(value))
        for name, (is_valid, expected) in _CHECKS.items():
            if not is_valid(value := getattr(self, name)):
                raise ShoalError(f"`{name}` must be {expected}, got {reprlib.repr(value)}")
        check_integer("retries", self.retries, least=0)
        if self.max_concurrent is not None:
            check_integer("max_concurrent", self.max_concurrent)
        check_keep(self.keep)
        _ = self.repetition
        metrics = len(self.objectives)
        if self.stop_after is not None and metrics > 1:
            raise ShoalError(f"`stop_after` needs one metric, and this study has {metrics}; leave it out")
        _ = self.of_best

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make the specification of `to_json`."""
        given = dict(values)
        for name, (kind, expected) in _OBJECTS.items():
            try:
                given[name] = convert(values[name], kind | None, str_keys=True)
            except ValidationError as error:
                text = reprlib.repr(values[name])
                raise ShoalError(f"`{name}` must be {expected}, or None, got {text}") from error
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @cached_property
    def objectives(self) -> tuple[Objective, ...]:
        """The metrics with their modes."""
        return objectives(self.metric, self.mode)

    @cached_property
    def repetition(self) -> Repeats:
        """How the study repeats its configurations."""
        return Repeats(self.repeats, self.folds, self.aggregate)

    def configurations(self, rows: Sequence[TrialRow]) -> list[TrialRow]:
        """A row for each configuration of some trials of the study, see `Repeats.rows`."""
        return self.repetition.rows(rows, self.objectives, self.bounds, self.of_best)

    @property
    def process_memory(self) -> int:
        """Bytes of main memory that each process of a function or command may allocate; 0: no limit."""
        return _process_memory(self.memory_limit) or 0

    @cached_property
    def bounds(self) -> tuple[Constraint, ...]:
        """The constraints."""
        return parse_constraints(self.constraints)

    @cached_property
    def of_best(self) -> EpochOrder:
        """Which epoch of a trial is its best."""
        return EpochOrder.of(self.objectives, self.bounds, self.rank_by, self.best_by)

    @property
    def loss_metric(self) -> str | None:
        """The reported value that policies take as the loss of a program: the named one, else the first metric that is
        minimised; None if there is none.
        """
        return self.loss or next((objective.metric for objective in self.objectives if objective.mode == "min"), None)

    @property
    def shared_data_seed(self) -> int | None:
        """Seed of the order of samples of all trials; None if each trial has its own."""
        if self.data_seed == "trial":
            return None
        return derive_seed(self.seed, "data") if self.data_seed is None else self.data_seed

    @property
    def unit(self) -> str:
        """Unit of budgets: "epochs", or "reports" of a function or command."""
        return "reports" if self.opaque else "epochs"


def check_keep(keep: object) -> None:
    """Check which ended trials shall keep their weights."""
    if keep in ("best", "all"):
        return
    if isinstance(keep, str):
        raise ShoalError(f'`keep` must be a number of trials, "best" or "all", got {keep!r}')
    check_integer("keep", keep)


def _is(*kinds: type) -> Callable[[Any], bool]:
    """Return whether a value is of one of these types; True and False are no integers."""
    return lambda value: isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _is_metric(value: object) -> bool:
    return isinstance(value, str) and value != "" and all(unicodedata.category(char) != "Cc" for char in value)


def _is_data_seed(value: Any) -> bool:
    if isinstance(value, str):
        return value == "trial"
    return value is None or (_is(int)(value) and -(2**63) <= value < 2**63)


def _is_target(value: Any) -> bool:
    return value is None or (_is(int, float)(value) and not sys.float_info.max < abs(value) < inf)


def _process_memory(limit: Any) -> int | None:
    """Return the bytes that a limit of memory names; None if it names none."""
    return parse_bytes(limit) if isinstance(limit, str) else limit if _is(int)(limit) else None


def _is_memory_limit(value: Any) -> bool:
    return value in (None, "auto") or MIN_PROCESS_MEMORY <= (_process_memory(value) or 0) <= sys.maxsize


def _is_callback(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("name", "pickled"))


def _list_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def _are_settings(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(x, str) for x in value) and all(map(_is_setting, value.values()))


def _one_or_more(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: all(map(is_valid, value if isinstance(value, list | tuple) else [value]))


_is_setting = _is(bool, int, str)

_OBJECTS: dict[str, tuple[Any, str]] = {
    "totals": (Totals, "numbers of trials and epochs"),
    "stop_after": (NoImprovement, "a number of trials and a delta"),
    "earlier": (list[EarlierTrial], "a list of trials with their values"),
}
"""Name of a field -> its type, of which JSON has the settings, and what is valid in words."""

_TEXTS = (
    *("space", "algorithm", "chosen_because", "policy", "objective", "rank_by", "packing", "backend", "sharing"),
    *("task", "batches"),
)

_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "metric": (
        _one_or_more(_is_metric),
        "the name of a reported value, without control characters, or a list of such names",
    ),
    "loss": (lambda value: value is None or _is_metric(value), "the name of a reported value, or None"),
    **dict.fromkeys(_TEXTS, (_is(str), "a text")),
    **dict.fromkeys(("ray_address", "sbatch", "project"), (_is(str, NoneType), "a text or None")),
    "best_by": (
        lambda value: value is None or all(map(_is_metric, value if isinstance(value, dict) else [value])),
        'the name of a metric, one with its mode, such as {"loss": "min"}, or None',
    ),
    **dict.fromkeys(("fuse", "kept"), (_is(bool), "True or False")),
    "target": (_is_target, "a number or None"),
    "stop_after": (_is(NoImprovement, NoneType), "shoal.NoImprovement(trials=...) or None"),
    "constraints": (_is(dict), 'names of reported values with bounds, such as {"latency_ms": "<= 10"}'),
    "devices": (_one_or_more(_is(str)), 'a name such as "auto" or "cpu:2", or a list of names'),
    "opaque": (
        lambda value: isinstance(value, str) and bool(re.fullmatch(r"(opaque .* [0-9a-f]{16})?", value, re.DOTALL)),
        'the key of a function or command, or "" for a Task',
    ),
    "oversubscription": (lambda value: _is(int, float)(value) and 1 <= value < inf, "a number of at least 1"),
    "seed": (_is(int), "an integer"),
    "data_seed": (_is_data_seed, 'an integer of 64 bits, "trial" or None'),
    "memory_limit": (
        _is_memory_limit,
        '"auto", None, or the bytes that each process of a trial may allocate, at least 32 MiB, such as "8GiB"',
    ),
    "checkpoint_seconds": (lambda value: _is(int, float)(value) and value >= 0, "a number of seconds, at least 0"),
    "hang_seconds": (
        lambda value: _is(int, float)(value) and MIN_HANG_SECONDS <= value < inf,
        f"a finite number of at least {MIN_HANG_SECONDS:g}, because a job sends a heartbeat once a second",
    ),
    **dict.fromkeys(
        ("timeout", "trial_timeout"),
        (lambda value: value is None or (_is(int, float)(value) and 0 < value < inf), "seconds above 0, or None"),
    ),
    "callbacks": (_list_of(_is_callback), "a list of names with pickles"),
    "initial": (_list_of(_is(dict)), "a list of configurations, each a dict of some or all values"),
    "earlier": (_list_of(_is(EarlierTrial)), "a list of trials of earlier studies"),
    "earlier_from": (_list_of(_is(str)), "a list of texts"),
    "paths": (_list_of(_is(str)), "a list of paths"),
    "settings": (_are_settings, "names of settings of torch with their values"),
}
"""Name of a field -> whether a value is valid, and what is valid in words."""
