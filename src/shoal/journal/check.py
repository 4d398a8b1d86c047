"""Validation of the study values in a journal, because SQLite and JSON accept any value."""

import math
import re
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.errors import JournalError
from shoal.core.space import is_number
from shoal.journal.view import JournalView
from shoal.remedy import command

__all__ = ["check_not_paused", "check_optional_values", "check_study"]

_Test = Callable[[Any], bool]


def check_study(journal: JournalView) -> None:
    """Check that a study can be resumed from its journal. This writes nothing and runs no code of the study.

    Raises:
        JournalError: a value is missing or invalid; the message names the file, the key, the value and the remedy.
    """
    for key, (test, wanted) in _REQUIRED.items():
        if key not in journal.study:
            raise journal.tables.damaged(f"`{key}` of its study is missing; it must be {wanted}")
        _check(journal, key, test, wanted)
    check_optional_values(journal)
    _ = journal.space
    for name in ("task", "algorithm"):
        journal.blob(name)


def check_not_paused(directory: Path) -> None:
    """Refuse to resume a study that is paused in a running process.

    Raises:
        JournalError: names the process and the command that lets the study go on.
    """
    with JournalView.read(directory) as now:
        if now.study.get("paused") and (owner := now.writer()) is not None:
            raise JournalError(
                f"the study in {directory} is paused, and {owner} runs it; let it go on with: "
                f"{command('study resume', now.directory)}"
            )


def check_optional_values(journal: JournalView) -> None:
    """Check the values that only some studies have.

    Raises:
        JournalError: a value is invalid, as in `check_study`.
    """
    for key, (test, wanted) in _OPTIONAL.items():
        if key in journal.study:
            _check(journal, key, test, wanted)


def _check(journal: JournalView, key: str, test: _Test, wanted: str) -> None:
    value = journal.study[key]
    if not test(value):
        raise journal.tables.damaged(f"`{key}` of its study must be {wanted}, and is {reprlib.repr(value)}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_seed(value: object) -> bool:
    return value == "trial" or (_is_integer(value) and -(2**63) <= value < 2**63)  # type: ignore[operator]


def _is_opaque(value: object) -> bool:
    return isinstance(value, str) and (value == "" or re.fullmatch(r"opaque .* [0-9a-f]{16}", value, re.S) is not None)


def _are_devices(value: object) -> bool:
    return isinstance(value, str) or _list_of(_is_text)(value)


def _at_least(least: float) -> _Test:
    return lambda value: is_number(value) and least <= value < math.inf


def _list_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _fields(**tests: _Test) -> _Test:
    """A test of an object that has these fields; further fields are allowed."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and test(value[name]) for name, test in tests.items())
    )


def _values(test: _Test) -> _Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _or_null(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


_TRIAL_NUMBERS = (_list_of(_is_integer), "a list of numbers of trials")
_NAME = (_is_text, "a text")
_FLAG = (_is_flag, "true or false")

_REQUIRED: dict[str, tuple[_Test, str]] = {
    "task": _NAME,
    "opaque": (_is_opaque, 'the key of a function or command, or "" for a Task'),
    "space": _NAME,
    "algorithm": _NAME,
    "policy": _NAME,
    "packing": _NAME,
    "fuse": _FLAG,
    "devices": (_are_devices, "a name of devices, or a list of names"),
    "backend": _NAME,
    "sharing": _NAME,
    "seed": (_is_integer, "an integer"),
    "data_seed": (_is_seed, 'an integer of 64 bits or "trial"'),
    "retries": (lambda value: _is_integer(value) and value >= 0, "an integer of at least 0"),
    "checkpoint_seconds": (_at_least(0), "a number of seconds, at least 0"),
    "hang_seconds": (_at_least(0), "a number of seconds, at least 0"),
    "paths": (_list_of(_is_text), "a list of paths"),
}
"""Values of every study, in all journal versions that can be read."""

_EDIT = _fields(time=is_number, files=_values(_is_text), open=_list_of(_is_integer), next=_is_integer)

_OPTIONAL: dict[str, tuple[_Test, str]] = {
    "callbacks": (_list_of(_fields(name=_is_text, pickled=_is_text)), "a list of names with pickles"),
    "kept": _FLAG,
    "finished": _FLAG,
    "paused": _FLAG,
    "end_requested": _FLAG,
    "objective": _NAME,
    "target": (_or_null(is_number), "a number or null"),
    "target_reached": (_or_null(_is_integer), "the number of a trial or null"),
    "ended": _FLAG,
    "project": (_or_null(_is_text), "a path or null"),
    "batches": _NAME,
    "loss": (_or_null(_is_text), "the name of a reported value or null"),
    "note": _NAME,
    "oversubscription": (lambda value: value == "auto" or _at_least(1)(value), 'a number of at least 1, or "auto"'),
    "sources": (_values(_fields(digest=_is_text, text=_or_null(_is_text))), "files and their digests"),
    "totals": (
        _or_null(_fields(trials=_is_integer, least=_is_integer, most=_is_integer)),
        "numbers of trials and epochs",
    ),
    "paused_trials": _TRIAL_NUMBERS,
    "common_failure_trials": _TRIAL_NUMBERS,
    "fleet": (
        _fields(devices=_are_devices, added=_list_of(_is_text), removed=_list_of(_is_text)),
        "devices, with those that were added and removed",
    ),
    "edits": (_list_of(_EDIT), "a list of edits of the task"),
    "savings": (
        _or_null(
            _fields(
                epochs=_is_integer,
                together=_at_least(0),
                alone=_at_least(0),
                packed=is_number,
                measuring=_at_least(0),
            )
        ),
        "epochs and seconds, or null",
    ),
    "stopped": (
        _or_null(_fields(text=_is_text, trials=_list_of(_is_integer), log=_is_text)),
        "the common failure of the first trials",
    ),
}
"""Values of studies of newer versions, or after certain events."""
