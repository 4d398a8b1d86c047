"""What a program says of its trial."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FunctionFailure", "Said"]


@dataclass(frozen=True)
class Said:
    """A report.

    Args:
        metrics: as they came; of a line of output not all need be numbers.
        step: as it came; None where there was none.
        caller: who waits for an answer; None of a line of output.
    """

    metrics: Mapping[str, Any]
    step: Any
    caller: socket.socket | None = None

    def answer(self, **content: object) -> None:
        """Let the caller go on, or not."""
        if self.caller is None:
            return
        with self.caller:
            try:
                self.caller.sendall(json.dumps(content).encode() + b"\n")
            except OSError:  # it was killed while it waited
                return


@dataclass(frozen=True)
class FunctionFailure:
    """A function has raised: the outcome, and what its user can act on."""

    outcome: str
    message: str
