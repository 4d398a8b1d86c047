"""Validation of the values of a study in a journal, because SQLite and JSON accept any value."""

import reprlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, ValidationError, convert

from shoal.algorithms.base import Totals
from shoal.core.cause import Cause
from shoal.core.errors import JournalError, ShoalError
from shoal.core.rows import PROGRESS, TrialRow
from shoal.core.trial import numbers_text
from shoal.host.remedy import command
from shoal.journal.view import JournalView

__all__ = ["check_not_paused", "check_study", "check_values", "named_trials"]


def check_study(journal: JournalView) -> None:
    """Check that a study can be resumed from its journal, without writing or running code; JournalError names the
    remedy.
    """
    check_values(journal)
    _ = journal.space
    for name in ("task", "algorithm"):
        journal.blob(name)


def check_not_paused(directory: Path) -> None:
    """Refuse to resume a study that is paused in a running process."""
    with JournalView.read(directory) as now:
        if now.study.get("paused") and (owner := now.writer()) is not None:
            raise JournalError(
                f"the study in {directory} is paused, and {owner} runs it; resume it with: "
                f"{command('study resume', now.directory)}"
            )


def named_trials(journal: JournalView, numbers: Sequence[int]) -> list[TrialRow]:
    """The trials that a user names by their numbers; a ShoalError if there is none of a number."""
    rows = {row.number: row for row in journal.trials()}
    for number in numbers:
        if number not in rows:
            known = f"its trials are {numbers_text(list(rows))}" if rows else "it has none yet"
            raise ShoalError(f"the study in {journal.directory} has no trial {number!r}; {known}")
    return [rows[number] for number in numbers]


def check_values(journal: JournalView) -> None:
    """Check the values of a study that change while it runs."""
    for key in journal.study.keys() & _VALUES.keys():
        value, (kind, wanted) = journal.study[key], _VALUES[key]
        try:
            convert(value, kind)
        except ValidationError as error:
            raise journal.tables.damaged(f"of its study `{key}` must be {wanted}, got {reprlib.repr(value)}") from error


_NotNegative = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class _Source(Struct):
    digest: str
    text: str | None


class _Script(Struct):
    name: str
    text: str | None


class _FleetSpec(Struct):
    devices: str | list[str]
    added: list[str]
    removed: list[str]


class _EditSpec(Struct):
    time: float
    files: dict[str, str]
    open: list[int]
    next: int


class _SavingsSpec(Struct):
    epochs: int
    together: _NotNegative
    alone: _NotNegative
    packed: float
    measuring: _NotNegative


class _SpeedupSpec(Struct):
    least: _NotNegative
    most: _NotNegative
    members: int
    fills: str


class _ProgressSpec(Struct):
    trials: list[int]
    epoch: int
    step: Annotated[int, Meta(ge=0)]
    steps: Annotated[int, Meta(ge=1)]
    loss: float | None
    steps_per_second: _NotNegative | None


class _ExtensionSpec(Struct):
    trials: int
    seq: int


_NAME = (str, "a text")
_FLAG = (bool, "true or false")
_TRIAL_NUMBERS = (list[int], "a list of numbers of trials")

_VALUES: dict[str, tuple[object, str]] = {
    "policy": _NAME,
    "finished": _FLAG,
    "paused": _FLAG,
    "end_requested": _FLAG,
    "ended_because": _NAME,
    "ended": _FLAG,
    "note": _NAME,
    "sources": (dict[str, _Source], "files and their digests"),
    "script": (_Script | None, "the name and the text of a script, or null"),
    "pins": _TRIAL_NUMBERS,
    "keep": (Annotated[int, Meta(ge=1)] | Literal["best", "all"], 'a number of at least 1, "best" or "all"'),
    "common_failure_trials": _TRIAL_NUMBERS,
    "fleet": (_FleetSpec, "devices, with those that were added and removed"),
    "edits": (list[_EditSpec], "a list of edits of the task"),
    "savings": (_SavingsSpec | None, "epochs and seconds, or null"),
    "speedup": (_SpeedupSpec | None, "a speed-up with the size of an array, or null"),
    PROGRESS: (dict[str, list[_ProgressSpec]], "the progress of running jobs"),
    "extensions": (list[_ExtensionSpec], "a list of numbers of trials"),
    "totals": (Totals | None, "numbers of trials and epochs, or null"),
    "time_left": (_NotNegative | None, "seconds, or null"),
    "stopped": (Cause | None, "the common failure of the first trials"),
}
"""Key of a value -> its type, and the type in words."""
