"""What users ask of a study that another process runs: a file for each request, and one for its answer.

A journal has one writer, so whoever wants its study changed leaves `<directory>/requests/<name>.request`; the engine
looks for requests in every turn of its loop. Names are of the time, and never used again. Whoever asks for devices
waits for `<name>.answer`. A request for trials is kept until a process runs the study, and has no answer.
"""

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from shoal.core.errors import DeviceError, JournalError
from shoal.core.request import Request, Verb
from shoal.journal.lock import holder
from shoal.journal.schema import readable, translated

__all__ = ["answer", "ask", "carried_out", "leave", "pending"]

_PAUSE_SECONDS = 0.05
"""Between two looks for an answer."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def ask(
    directory: Path,
    verb: Literal["add", "remove"],
    devices: Sequence[str],
    *,
    patience: float = 60.0,
    pause: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Have the process that runs a study change its devices, and wait until it has.

    Args:
        directory: of the study.
        verb: what is to be done.
        devices: with which.
        patience: seconds to wait at most.
        pause: waits so many seconds.

    Returns:
        Names of the devices that the study has then.

    Raises:
        DeviceError: it refuses, and nothing is changed; or nobody answers.
        JournalError: nothing can be asked of the study, as its directory cannot be written.
    """
    file = leave(directory, verb, devices=devices)
    waited = 0.0
    try:
        while not (reply := file.with_suffix(".answer")).exists():
            runs = holder(directory) is not None
            if (not runs or waited >= patience) and _withdrawn(file):
                why = f"did not answer within {patience:g} s" if runs else "ended before it answered"
                raise DeviceError(f"the process that runs the study in {directory} {why}; look at it and ask again")
            pause(_PAUSE_SECONDS)
            waited += _PAUSE_SECONDS
    except KeyboardInterrupt:
        _withdrawn(file)
        raise
    said = json.loads(reply.read_text(encoding="utf-8"))
    reply.unlink()
    if said["error"]:
        raise DeviceError(said["error"])
    return list(said["devices"])


def leave(
    directory: Path,
    verb: Verb,
    *,
    devices: Sequence[str] = (),
    trials: Sequence[int] = (),
    given: Mapping[str, Any] = _NOTHING,
) -> Path:
    """Have the process that runs a study, now or later, do something; nobody waits for it.

    Args:
        directory: of the study.
        verb: what is to be done.
        devices: with which.
        trials: numbers of the trials.
        given: what else is to be said, JSON values.

    Returns:
        The file of the request, which is there wholly or not at all.

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
        return partial.rename(folder / f"{name}.request")


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


def answer(directory: Path, request: str, devices: Sequence[str], error: str = "") -> None:
    """Say what became of a request to whoever waits for that; it is then no longer pending.

    Args:
        directory: of the study.
        request: its name.
        devices: names of those that the study has now.
        error: why it was refused; "" if it was not.
    """
    file = directory / "requests" / f"{request}.request"
    partial = file.with_suffix(".partial")
    with translated(directory):
        partial.write_text(json.dumps({"error": error, "devices": list(devices)}), encoding="utf-8")
        os.replace(partial, file.with_suffix(".answer"))
    carried_out(directory, request)


def _withdrawn(file: Path) -> bool:
    """Take a request back, and say whether it was still there to be taken."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True
