"""Request files, by which users change a study, whether or not a process runs it.

A journal has one writer, so other processes write requests to `<directory>/requests/<name>.request`. The engine reads
them in every turn of its loop. A name contains the time and the user, and is never used again. A request stays until a
process runs the study and records the result in the journal, under the request's name.
"""

import json
import os
import pwd
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shoal.core.errors import JournalError
from shoal.core.request import Request, Verb
from shoal.journal.schema import require_read_permission, translate_errors

__all__ = ["current_user", "delete_request", "pending_requests", "write_request"]

_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


def write_request(
    directory: Path,
    verb: Verb,
    *,
    devices: Sequence[str] = (),
    trials: Sequence[int] = (),
    arguments: Mapping[str, Any] = _NO_ARGUMENTS,
) -> str:
    """Write a request for the process that runs the study now or later, without waiting for it; return the request's
    name.
    """
    folder = directory / "requests"
    written = folder if folder.exists() else directory
    if not os.access(written, os.W_OK):
        raise JournalError(
            f"the study in {directory} cannot take a request, because {written} cannot be written; ask its owner for "
            "the request, or for permission to write there"
        )
    name = f"{time.time_ns():020d}-{secrets.token_hex(4)}-{current_user()}"
    partial = folder / f"{name}.partial"
    content = {"verb": verb, "devices": devices, "trials": trials, "given": dict(arguments)}
    with translate_errors(directory):
        folder.mkdir(exist_ok=True)
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.rename(folder / f"{name}.request")  # atomic
    return name


def delete_request(directory: Path, request: str) -> None:
    """Delete a request that is carried out or refused."""
    with translate_errors(directory):
        (directory / "requests" / f"{request}.request").unlink(missing_ok=True)


def pending_requests(directory: Path) -> list[Request]:
    """The pending requests, in order."""
    requests = []
    with require_read_permission(directory):
        try:
            names = os.listdir(directory / "requests")
        except FileNotFoundError:
            return []
        for name in sorted(name for name in names if name.endswith(".request")):
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                content = json.loads((directory / "requests" / name).read_text(encoding="utf-8"))
                devices, trials = (tuple(content.get(key, ())) for key in ("devices", "trials"))
                requests.append(Request(Path(name).stem, content["verb"], devices, trials, content.get("given", {})))
    return requests


def current_user() -> str:
    """Login name of this process's user, in characters of a file name; its number if it has none.

    The environment, which any user may set, does not decide it.
    """
    user = os.geteuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:  # a container may run under a number without a name
        name = f"uid {user}"
    return re.sub(r"[^\w.@+-]", "_", name)[:64]
