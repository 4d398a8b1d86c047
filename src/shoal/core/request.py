"""What a person asks of a running study."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Request", "Verb"]

Verb = Literal["add", "remove", "retry"]


@dataclass(frozen=True)
class Request:
    """A change of the devices of a study, or of its trials.

    Args:
        name: no other request has it; names are in the order in which the requests were made.
        verb: what is to be done: devices to be added or removed, trials to be tried again.
        devices: with which.
        trials: numbers of the trials.
    """

    name: str
    verb: Verb
    devices: tuple[str, ...] = ()
    trials: tuple[int, ...] = ()
