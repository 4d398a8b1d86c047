"""Requests of users to a study."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Request", "Verb", "requester"]

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
    "extend",
    "keep",
    "pin",
]


@dataclass(frozen=True)
class Request:
    """A change of a study that a user requests.

    Args:
        name: Unique name; names sort in the order of the requests.
    """

    name: str
    verb: Verb
    devices: tuple[str, ...] = ()
    trials: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


def requester(name: str) -> str:
    """Login name of the user who wrote a request.

    Args:
        name: Name of the request: time, random digits and user, joined by "-".
    """
    return "".join(name.split("-", 2)[2:])
