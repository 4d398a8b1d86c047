"""When the task of a study was edited, and which trials have trained with more than one definition of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Edited", "edited", "edited_json"]


@dataclass(frozen=True)
class Edited:
    """Files of the task were found to be edited when the study went on, and that was accepted.

    Args:
        time: seconds since 1970.
        files: path of each -> what had changed, in a line or as a unified diff.
        open: numbers of the trials that had not ended.
        next: number of the first trial that was proposed afterwards.
    """

    time: float
    files: Mapping[str, str]
    open: tuple[int, ...]
    next: int


def edited(study: Mapping[str, Any]) -> tuple[Edited, ...]:
    """Every time that a study went on so, in order.

    Args:
        study: as of `JournalView.study`.
    """
    entries = study.get("edits", ())
    return tuple(Edited(each["time"], each["files"], tuple(each["open"]), each["next"]) for each in entries)


def edited_json(edit: Edited) -> dict[str, Any]:
    """The same as plain values."""
    return {"time": edit.time, "files": dict(edit.files), "open": list(edit.open), "next": edit.next}
