"""Validation of the study values in a journal, because SQLite and JSON accept any value."""

import reprlib
import sys
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, ValidationError, convert

from shoal.algorithms.base import Totals
from shoal.core.cause import Cause
from shoal.core.errors import JournalError
from shoal.journal.view import JournalView
from shoal.remedy import command

__all__ = ["check_not_paused", "check_optional_values", "check_study"]


def check_study(journal: JournalView) -> None:
    """Check that a study can be resumed from its journal, without writing or running code; JournalError names the
    remedy.
    """
    for key, (kind, wanted) in _REQUIRED.items():
        if key not in journal.study:
            raise journal.tables.damaged(f"`{key}` of its study is missing; it must be {wanted}")
        _check(journal, key, kind, wanted)
    check_optional_values(journal)
    _ = journal.space
    for name in ("task", "algorithm"):
        journal.blob(name)


def check_not_paused(directory: Path) -> None:
    """Refuse to resume a study that is paused in a running process."""
    with JournalView.read(directory) as now:
        if now.study.get("paused") and (owner := now.writer()) is not None:
            raise JournalError(
                f"the study in {directory} is paused, and {owner} runs it; let it go on with: "
                f"{command('study resume', now.directory)}"
            )


def check_optional_values(journal: JournalView) -> None:
    """Check the values that only some studies have."""
    for key, (kind, wanted) in _OPTIONAL.items():
        if key in journal.study:
            _check(journal, key, kind, wanted)


def _check(journal: JournalView, key: str, kind: object, wanted: str) -> None:
    value = journal.study[key]
    try:
        convert(value, kind)
    except ValidationError as error:
        raise journal.tables.damaged(f"`{key}` of its study must be {wanted}, and is {reprlib.repr(value)}") from error


_NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class _Callback(Struct):
    name: str
    pickled: str


class _Source(Struct):
    digest: str
    text: str | None


class _Fleet(Struct):
    devices: str | list[str]
    added: list[str]
    removed: list[str]


class _Edit(Struct):
    time: float
    files: dict[str, str]
    open: list[int]
    next: int


class _Savings(Struct):
    epochs: int
    together: _NotNegative
    alone: _NotNegative
    packed: float
    measuring: _NotNegative


_NAME = (str, "a text")
_FLAG = (bool, "true or false")
_TRIAL_NUMBERS = (list[int], "a list of numbers of trials")
_SECONDS = (_NotNegative, "a number of seconds, at least 0")

_REQUIRED: dict[str, tuple[object, str]] = {
    "task": _NAME,
    "opaque": (
        Annotated[str, Meta(pattern=r"(?s)\A(opaque .* [0-9a-f]{16})?\Z")],
        'the key of a function or command, or "" for a Task',
    ),
    "space": _NAME,
    "algorithm": _NAME,
    "policy": _NAME,
    "packing": _NAME,
    "fuse": _FLAG,
    "devices": (str | list[str], "a name of devices, or a list of names"),
    "backend": _NAME,
    "sharing": _NAME,
    "seed": (int, "an integer"),
    "data_seed": (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Literal["trial"],
        'an integer of 64 bits or "trial"',
    ),
    "retries": (Annotated[int, Meta(ge=0)], "an integer of at least 0"),
    "checkpoint_seconds": _SECONDS,
    "hang_seconds": _SECONDS,
    "paths": (list[str], "a list of paths"),
}
"""Type of each value of every study, and the type in words."""

_OPTIONAL: dict[str, tuple[object, str]] = {
    "callbacks": (list[_Callback], "a list of names with pickles"),
    "kept": _FLAG,
    "finished": _FLAG,
    "paused": _FLAG,
    "end_requested": _FLAG,
    "objective": _NAME,
    "target": (float | None, "a number or null"),
    "ended_because": _NAME,
    "ended": _FLAG,
    "project": (str | None, "a path or null"),
    "batches": _NAME,
    "loss": (str | None, "the name of a reported value or null"),
    "note": _NAME,
    "oversubscription": (Annotated[float, Meta(ge=1, le=sys.float_info.max)], "a number of at least 1"),
    "sources": (dict[str, _Source], "files and their digests"),
    "totals": (Totals | None, "numbers of trials and epochs"),
    "paused_trials": _TRIAL_NUMBERS,
    "common_failure_trials": _TRIAL_NUMBERS,
    "fleet": (_Fleet, "devices, with those that were added and removed"),
    "edits": (list[_Edit], "a list of edits of the task"),
    "savings": (_Savings | None, "epochs and seconds, or null"),
    "settings": (dict[str, bool | int | str], "names of settings of torch and their values"),
    "stopped": (Cause | None, "the common failure of the first trials"),
}
"""The same of values that only some studies have, or that come with certain events."""
