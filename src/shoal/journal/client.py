"""Requests of users to a study. Each request is checked against the journal and then written for the engine.

`shoal.Study` has a method for each request, with its arguments, results and errors. The first argument here is the
directory of the study. Each function raises a `JournalError` if that directory cannot be written.
"""

import copy
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import Any, Literal

from shoal.algorithms.base import check_integer
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError, ShoalError
from shoal.core.plain import plain
from shoal.core.request import Verb
from shoal.core.rows import TrialRow
from shoal.core.space import flatten
from shoal.core.space_tree import constant
from shoal.core.trial import FIRST_ADDED, Config, TrialState, state_name
from shoal.host.fleet import REMOVED, Fleet
from shoal.host.remedy import command
from shoal.journal.check import named_trials
from shoal.journal.codec import encode
from shoal.journal.requests import delete_request, pending_requests, write_request
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.plan.schedule.registry import make_policy
from shoal.spec import check_keep
from shoal.train.checkpoint_paths import checkpoint_files, program_checkpoints

__all__ = [
    *("add", "change_devices", "changed", "clone", "keep", "pause", "pin", "policy", "resume", "retry", "stop"),
    *("end_study", "pause_study", "resume_study"),
]

_PAUSE_SECONDS = 0.05
"""Seconds between two checks for the result of a request."""


def pause(directory: Path, numbers: int | Iterable[int]) -> list[int]:
    """Request that trials leave their jobs after a checkpoint and wait until they are resumed; see `Study.pause`."""
    paused = _paused_after_requests(directory)
    return _request(directory, "pause", numbers, lambda row: "paused already" if row.number in paused else "")


def resume(directory: Path, numbers: int | Iterable[int]) -> list[int]:
    """Request that paused trials continue; see `Study.resume`."""
    paused = _paused_after_requests(directory)
    return _request(directory, "resume", numbers, lambda row: "" if row.number in paused else "not paused")


def stop(directory: Path, numbers: int | Iterable[int]) -> list[int]:
    """Request that trials stop for good; see `Study.stop`."""
    asked = {x for each in pending_requests(directory) if each.verb == "stop" for x in each.trials}
    return _request(directory, "stop", numbers, lambda row: "to be stopped already" if row.number in asked else "")


def retry(directory: Path, numbers: int | Iterable[int] | None) -> list[int]:
    """Request that failed trials are tried again; see `Study.retry`."""
    with JournalView.read(directory) as journal:
        runs = journal.writer() is not None
        asked = [number for number, _ in journal.failed()] if numbers is None else _trial_numbers(numbers)
        if numbers is None and not asked:
            raise ShoalError(f"no trial of the study in {directory} has failed, so none can be tried again")
        rows = _rows(journal, asked)
    for row in rows:
        if row.state is not TrialState.FAILED:
            raise ShoalError(
                f"trial {row.number} of the study in {directory} has not failed, it is {state_name(row.state, runs)}; "
                "only failed trials can be tried again"
            )
    write_request(directory, "retry", trials=asked)
    return asked


def policy(directory: Path, name: str) -> None:
    """Request another policy; see `Study.policy`."""
    make_policy(name)
    write_request(directory, "policy", arguments={"policy": name})


def keep(directory: Path, keep: int | str) -> None:
    """Request that other numbers of trials keep their weights; see `Study.keep`."""
    kept = plain(keep)
    check_keep(kept)
    with JournalView.read(directory):  # a study must be there
        write_request(directory, "keep", arguments={"keep": kept})


def pin(directory: Path, numbers: int | Iterable[int]) -> list[int]:
    """Request that the checkpoints of trials stay; see `Study.pin`."""
    asked = _trial_numbers(numbers)
    with JournalView.read(directory) as journal:
        rows, deleted = _rows(journal, asked), StudyStatistics(journal).deleted()
    for row in rows:
        if deleted.get(row.number):
            raise ShoalError(
                f"the weights of trial {row.number} of the study in {directory} were deleted; train it again with: "
                f"{command('rerun', directory, str(row.number))}"
            )
    write_request(directory, "pin", trials=asked)
    return asked


def add(directory: Path, config: Config, epochs: int, *, outside: bool) -> tuple[int, Config]:
    """Request a trial in addition to those of the algorithm; return its number and its config. See `Study.add`."""
    with JournalView.read(directory) as journal:
        given = constant(config, "")
        whole = journal.space.recomputed(_with_constants(journal.space.constants(), given), flatten(given))
        epochs = plain(epochs)
        _check(journal, whole, epochs, outside)
    given = {"config": whole, "epochs": epochs, "outside": outside}
    return _number(directory, write_request(directory, "add trial", arguments=given)), whole


def clone(
    directory: Path,
    numbers: int | Iterable[int],
    changes: Mapping[str, Any],
    *,
    epochs: int | None,
    anew: bool,
    outside: bool,
) -> list[tuple[int, Config]]:
    """Request clones of trials with some values changed; return the number and the whole config of each. See
    `Study.clone`.
    """
    asked = _trial_numbers(numbers)
    with JournalView.read(directory) as journal:
        clones = [_clone(journal, row, changes, epochs, anew, outside) for row in _rows(journal, asked)]
    requests = [write_request(directory, "clone", arguments=arguments) for arguments in clones]
    return [(_number(directory, name), given["config"]) for name, given in zip(requests, clones, strict=True)]


def _number(directory: Path, request: str) -> int:
    """Return the number of a trial that a request adds: the next one after those of all earlier requests."""
    pending = [each.name for each in pending_requests(directory) if each.verb in ("add trial", "clone")]
    with JournalView.read(directory) as journal:  # after the requests, since one is deleted once it is recorded
        result = journal.intervention(request)
        if result is not None and result.refused:
            raise ShoalError("; ".join(result.refused))
        if result is not None:
            return result.trials[0]
        ahead = sum(journal.intervention(name) is None for name in pending if name < request)
        ((newest,),) = journal.tables.rows("SELECT max(number) FROM trials")
        return max(FIRST_ADDED, 0 if newest is None else newest + 1) + ahead


def _clone(
    journal: JournalView, row: TrialRow, changes: Mapping[str, Any], epochs: int | None, anew: bool, outside: bool
) -> dict[str, Any]:
    config = journal.space.recomputed(constant(changed(row.config, changes), ""), flatten(changes))
    epochs = row.target if epochs is None else plain(epochs)
    _check(journal, config, epochs, outside)
    given = {"config": config, "epochs": epochs, "outside": outside, "source": row.number}
    if not anew:
        begins = _newest_epoch(journal, row)
        if epochs <= begins:
            raise ShoalError(
                f"the clone begins at epoch {begins}, where trial {row.number} stands, and is to be trained up to "
                f"epoch {epochs}; name a later one (epochs=, --epochs), or let it begin anew (anew=True, --anew)"
            )
        given["origin"] = {"trial": row.number, "epoch": begins}
    return given


def _check(journal: JournalView, config: Config, epochs: int, outside: bool) -> None:
    check_integer("epochs", epochs)
    encode(config, "the config of the trial")
    faults = journal.spec.repetition.faults(journal.space, config)
    if faults and not outside:
        raise ShoalError(
            f"the config lies outside the space of the study in {journal.directory}: {'; '.join(faults)}. Correct it, "
            "or allow it (outside=True, --outside)"
        )


def _with_constants(constants: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    whole = dict(constants)
    for name, value in config.items():
        inner = constants.get(name)
        whole[name] = (
            _with_constants(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
        )
    return whole


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with changes applied: name, with dots where it is nested -> value."""
    changed = copy.deepcopy(dict(config))
    for path, value in changes.items():
        *parts, last = path.split(".")
        place = changed
        for part in parts:
            place = place.setdefault(part, {}) if isinstance(place, dict) else {}
        if not isinstance(place, dict):
            raise ShoalError(
                f"`{path}` cannot be changed, because `{'.'.join(parts)}` is {place!r} and holds no values"
            )
        place[last] = value
    return changed


def _newest_epoch(journal: JournalView, row: TrialRow) -> int:
    directory = journal.directory
    files = [*checkpoint_files(directory, row.number), *program_checkpoints(directory, row.number)]
    ends = [int(epoch) for epoch, step, *_ in (path.name.split("-") for path in files) if int(step) == 0]
    found = max((epoch for epoch in ends if 0 < epoch <= row.epoch), default=None)
    if found is None:
        state = state_name(row.state, journal.writer() is not None)
        raise ShoalError(
            f"trial {row.number} of the study in {directory} has no checkpoint of the end of an epoch now, it is "
            f"{state} at epoch {row.epoch}; clone it when it has reached its budget, or anew (anew=True, --anew)"
        )
    return found


def pause_study(directory: Path) -> None:
    """Request that all jobs stop after a checkpoint, and that no job starts until the study is resumed."""
    _request_for_study(directory, "pause study")


def resume_study(directory: Path) -> None:
    """Request that a paused study continues."""
    _request_for_study(directory, "resume study")


def end_study(directory: Path) -> None:
    """Request that all jobs stop after a checkpoint, and that the study ends."""
    _request_for_study(directory, "end study")


def _request_for_study(directory: Path, verb: Literal["pause study", "resume study", "end study"]) -> None:
    with JournalView.read(directory) as journal:
        paused, ended = journal.study.get("paused", False), journal.study.get("end_requested", False)
        finished = journal.study.get("finished", False)
    for request in pending_requests(directory):
        if request.verb in ("pause study", "resume study"):
            paused = request.verb == "pause study"
        ended = ended or request.verb == "end study"
    if finished or ended:
        raise ShoalError(f"the study in {directory} {'has ended' if finished else 'is to end'} already")
    if verb != "end study" and paused == (verb == "pause study"):
        raise ShoalError(f"the study in {directory} is {'paused already' if paused else 'not paused'}")
    write_request(directory, verb)


def _paused_after_requests(directory: Path) -> set[int]:
    """Numbers of the trials that are paused once all pending requests are carried out."""
    with JournalView.read(directory) as journal:
        numbers = set(journal.paused_trials())
    for request in pending_requests(directory):
        if request.verb == "pause":
            numbers |= set(request.trials)
        elif request.verb in ("resume", "retry"):
            numbers -= set(request.trials)
    return numbers


def _trial_numbers(numbers: object) -> list[int]:
    """The trial numbers that a user names, sorted and without duplicates."""
    several = isinstance(numbers, Iterable) and not isinstance(numbers, str) and getattr(numbers, "shape", None) != ()
    return sorted({_trial_number(each) for each in (numbers if several else [numbers])})  # type: ignore[attr-defined]


def _trial_number(number: Any) -> int:
    try:
        if not isinstance(number, bool):
            return index(number)
    except TypeError:
        pass
    raise ShoalError(f"name a trial by its number, such as 3, several as a list, [3, 7]; got {reprlib.repr(number)}")


def _request(directory: Path, verb: Verb, numbers: int | Iterable[int], fault: Callable[[TrialRow], str]) -> list[int]:
    asked = _trial_numbers(numbers)
    with JournalView.read(directory) as journal:
        rows = _rows(journal, asked)
    for row in rows:
        if why := f"over: it is {row.state}" if row.state.final else fault(row):
            again = "; to train it again, use shoal trial retry" if row.state is TrialState.FAILED else ""
            raise ShoalError(f"trial {row.number} of the study in {directory} is {why}{again}")
    write_request(directory, verb, trials=asked)
    return asked


def _rows(journal: JournalView, numbers: Sequence[int]) -> list[TrialRow]:
    if not numbers:
        raise ShoalError(f"no trial of the study in {journal.directory} is named; name at least one")
    return named_trials(journal, numbers)


def change_devices(
    directory: Path,
    verb: Literal["add devices", "remove devices"],
    names: Sequence[str],
    *,
    patience: float,
    pause: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Request other devices, and wait for the result if a process runs the study; see `Study.add_devices`."""
    with JournalView.read(directory) as journal:
        fleet = _fleet_after_requests(journal)
        if journal.study.get("finished") and not pending_requests(directory):
            raise DeviceError(f"the study in {directory} has ended, and needs no other devices")
    if fleet is not None:
        _change(fleet, verb, names)
    request = write_request(directory, verb, devices=names)
    waited = 0.0
    try:
        while True:
            with JournalView.read(directory) as journal:
                runs = journal.writer() is not None
                found, now = journal.intervention(request), _recorded_fleet(journal)
            if found is not None:
                if found.refused:
                    raise DeviceError(found.refused[0])
                return now.used
            if not runs or patience == 0:
                return now.used if fleet is None else fleet.used
            if waited >= patience:
                raise DeviceError(
                    f"the process that runs the study in {directory} has not changed its devices within {patience:g} "
                    "s; the request stays pending, see shoal status"
                )
            pause(_PAUSE_SECONDS)
            waited += _PAUSE_SECONDS
    except KeyboardInterrupt:
        delete_request(directory, request)
        raise


def _fleet_after_requests(journal: JournalView) -> Fleet | None:
    """The devices once all pending requests are carried out; None if no process has run the study yet."""
    fleet = _recorded_fleet(journal)
    if not fleet.used and not fleet.any_removed:
        return None
    for request in pending_requests(journal.directory):
        if request.verb in ("add devices", "remove devices"):
            with suppress(DeviceError):
                _change(fleet, request.verb, request.devices)
    return fleet


def _recorded_fleet(journal: JournalView) -> Fleet:
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


def _change(fleet: Fleet, verb: Verb, names: Sequence[str]) -> None:
    if verb == "add devices":
        fleet.add(names, _unchecked_devices)
    else:
        fleet.remove(names)


def _unchecked_devices(names: str | Sequence[str]) -> Cluster:
    """A cluster of the named devices, unchecked: only the process that runs the study can find them."""
    return Cluster((Node("", 1, tuple(Device(name, "", 1) for name in names)),))
