"""What a person asks of a running study."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Request", "Verb"]

Verb = Literal[
    "add devices",
    "remove devices",
    "retry",
    "pause",
    "resume",
    "stop",
    "policy",
    "add trial",
    "clone",
    "pause study",
    "resume study",
    "end study",
]


@dataclass(frozen=True)
class Request:
    """A change of a study that a person asks for.

    Args:
        name: no other request has it; names are in the order in which the requests were made.
        verb: what is to be done.
        devices: with which.
        trials: numbers of the trials.
        given: what else it says, JSON values.
    """

    name: str
    verb: Verb
    devices: tuple[str, ...] = ()
    trials: tuple[int, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
