"""Requests for devices of a study: refused at once as far as its journal shows, else left for the engine."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError
from shoal.journal.requests import carried_out, leave, pending
from shoal.journal.view import JournalView
from shoal.study.fleet import REMOVED, Fleet

__all__ = ["change_devices"]

_PAUSE_SECONDS = 0.05
"""Between two looks for what came of a request."""

_VERBS: tuple[Literal["add devices"], Literal["remove devices"]] = ("add devices", "remove devices")


def change_devices(
    directory: Path,
    verb: Literal["add devices", "remove devices"],
    names: Sequence[str],
    *,
    patience: float = 60.0,
    pause: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Have the devices of a study changed, and wait for it where a process runs the study.

    Args:
        directory: of the study.
        verb: what is to be done.
        names: of the devices.
        patience: seconds to wait at most; 0: not at all.
        pause: waits so many seconds.

    Returns:
        Names of the devices that the study has then, or will have once a process runs it.

    Raises:
        DeviceError: that makes no sense, or the process that runs the study refuses it, and nothing is changed; or it
            has not come to it in time, and is still asked to.
        JournalError: nothing can be asked of the study, as its directory cannot be written.
    """
    with JournalView.read(directory) as journal:
        fleet = _expected(journal)
        if journal.study.get("finished") and not pending(directory):
            raise DeviceError(f"the study in {directory} has ended, and needs no other devices")
    if fleet is not None:
        _change(fleet, verb, names)
    request = leave(directory, verb, devices=names)
    waited = 0.0
    try:
        while True:
            with JournalView.read(directory) as journal:
                runs = journal.writer() is not None
                found, now = journal.intervention(request), _recorded(journal)
            if found is not None:
                if found.refused:
                    raise DeviceError(found.refused[0])
                return now.used
            if not runs or patience == 0:
                return now.used if fleet is None else fleet.used
            if waited >= patience:
                raise DeviceError(
                    f"the process that runs the study in {directory} has not changed its devices within {patience:g} "
                    "s; it is still asked to, look at it with shoal status"
                )
            pause(_PAUSE_SECONDS)
            waited += _PAUSE_SECONDS
    except KeyboardInterrupt:
        carried_out(directory, request)
        raise


def _expected(journal: JournalView) -> Fleet | None:
    """The devices once all that was asked for is done; None where no process has run the study so far."""
    fleet = _recorded(journal)
    if not fleet.used and not fleet.reduced:
        return None
    for request in pending(journal.directory):
        for verb in _VERBS:
            if request.verb == verb:
                with suppress(DeviceError):
                    _change(fleet, verb, request.devices)
    return fleet


def _recorded(journal: JournalView) -> Fleet:
    """The devices as the journal has them."""
    rows = journal.devices()
    nodes = {row.node: [x for x in rows if x.node == row.node] for row in rows}
    fleet = Fleet(
        Cluster(
            tuple(
                Node(name, some[0].node_cores, tuple(Device(x.name, x.kind, x.memory) for x in some))
                for name, some in nodes.items()
            )
        )
    )
    if removed := [row.name for row in rows if row.reason == REMOVED]:
        fleet.remove(removed)
    return fleet


def _change(fleet: Fleet, verb: Literal["add devices", "remove devices"], names: Sequence[str]) -> None:
    if verb == "add devices":
        fleet.add(names, _taken_for_granted)
    else:
        fleet.remove(names)


def _taken_for_granted(names: str | Sequence[str]) -> Cluster:
    """Devices that only the process which runs the study can look for."""
    return Cluster((Node("", 1, tuple(Device(name, "", 1) for name in names)),))
