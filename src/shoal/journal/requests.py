"""What users ask of a study that another process runs, or none: a file for each request.

A journal has one writer, so whoever wants its study changed leaves `<directory>/requests/<name>.request`; the engine
looks for requests in every turn of its loop. Names are of the time, and never used again. A request is kept until a
process runs the study; what came of it is in the journal then, under its name.
"""

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shoal.core.errors import JournalError
from shoal.core.request import Request, Verb
from shoal.journal.schema import readable, translated

__all__ = ["carried_out", "leave", "pending"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def leave(
    directory: Path,
    verb: Verb,
    *,
    devices: Sequence[str] = (),
    trials: Sequence[int] = (),
    given: Mapping[str, Any] = _NOTHING,
) -> str:
    """Have the process that runs a study, now or later, do something; nobody waits for it.

    Args:
        directory: of the study.
        verb: what is to be done.
        devices: with which.
        trials: numbers of the trials.
        given: what else is to be said, JSON values.

    Returns:
        The name of the request.

    Raises:
        JournalError: nothing can be asked of the study, as its directory cannot be written.
    """
    folder = directory / "requests"
    place = folder if folder.exists() else directory
    if not os.access(place, os.W_OK):
        raise JournalError(
            f"nothing can be asked of the study in {directory}, for {place} cannot be written; have its owner ask, or "
            "let you write there"
        )
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
    partial = folder / f"{name}.partial"
    said = {"verb": verb, "devices": devices, "trials": trials, "given": dict(given)}
    with translated(directory):
        folder.mkdir(exist_ok=True)
        partial.write_text(json.dumps(said), encoding="utf-8")
        partial.rename(folder / f"{name}.request")  # there wholly or not at all
    return name


def carried_out(directory: Path, request: str) -> None:
    """What was asked for is done: the request of that name is no longer pending."""
    with translated(directory):
        (directory / "requests" / f"{request}.request").unlink(missing_ok=True)


def pending(directory: Path) -> list[Request]:
    """The requests that nobody has carried out, in order.

    Raises:
        JournalError: this process may not read them.
    """
    requests = []
    with readable(directory):
        try:
            names = os.listdir(directory / "requests")
        except FileNotFoundError:
            return []
        for name in sorted(name for name in names if name.endswith(".request")):
            with suppress(FileNotFoundError):  # withdrawn just now
                said = json.loads((directory / "requests" / name).read_text(encoding="utf-8"))
                devices, trials = (tuple(said.get(key, ())) for key in ("devices", "trials"))
                requests.append(Request(Path(name).stem, said["verb"], devices, trials, said.get("given", {})))
    return requests
