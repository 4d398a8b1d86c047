"""What people ask of a study: refused at once as far as its journal shows, else left for the engine."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.core.request import Verb
from shoal.core.trial import TrialState
from shoal.journal.requests import leave, pending
from shoal.journal.rows import TrialRow
from shoal.journal.view import JournalView
from shoal.report.text import numbers_text
from shoal.schedule.registry import make_policy

__all__ = ["held", "known_text", "pause", "policy", "resume", "stop"]


def pause(directory: Path, numbers: Iterable[int]) -> list[int]:
    """Have trials leave their jobs, saved, and wait until they are resumed.

    Returns:
        Their numbers.

    Raises:
        ShoalError: a number is no trial's, or of one that is over or paused already; or there is none.
        JournalError: nothing can be asked of the study, as its directory cannot be written.
    """
    with JournalView.read(directory) as journal:
        paused = held(journal)
    return _ask(directory, "pause", numbers, lambda row: "paused already" if row.number in paused else "")


def resume(directory: Path, numbers: Iterable[int]) -> list[int]:
    """Let trials go on that were paused.

    Returns:
        Their numbers.

    Raises:
        ShoalError: a number is no trial's, or of one that is over or not paused; or there is none.
        JournalError: as of `pause`.
    """
    with JournalView.read(directory) as journal:
        paused = held(journal)
    return _ask(directory, "resume", numbers, lambda row: "" if row.number in paused else "not paused")


def stop(directory: Path, numbers: Iterable[int]) -> list[int]:
    """End trials.

    Returns:
        Their numbers.

    Raises:
        ShoalError: a number is no trial's, or of one that is over or was to be stopped already; or there is none.
        JournalError: as of `pause`.
    """
    with JournalView.read(directory) as journal:
        asked = {x for each in pending(journal.directory) if each.verb == "stop" for x in each.trials}
    return _ask(directory, "stop", numbers, lambda row: "to be stopped already" if row.number in asked else "")


def policy(directory: Path, name: str) -> None:
    """Have another policy decide which job runs where.

    Raises:
        PolicyError: there is none of that name.
        JournalError: as of `pause`.
    """
    make_policy(name)
    leave(directory, "policy", given={"policy": name})


def held(journal: JournalView) -> set[int]:
    """Numbers of the trials that are paused once all is done that was asked for."""
    numbers = set(journal.study.get("held", ()))
    for request in pending(journal.directory):
        if request.verb == "pause":
            numbers |= set(request.trials)
        elif request.verb in ("resume", "retry"):
            numbers -= set(request.trials)
    return numbers


def known_text(numbers: Sequence[int]) -> str:
    """Which trials there are, in words."""
    return f"its trials are {numbers_text(numbers)}" if numbers else "it has none yet"


def _ask(directory: Path, verb: Verb, numbers: Iterable[int], fault: Callable[[TrialRow], str]) -> list[int]:
    with JournalView.read(directory) as journal:
        rows = {row.number: row for row in journal.trials()}
    asked = sorted(set(numbers))
    for number in asked:
        if number not in rows:
            raise ShoalError(f"the study in {directory} has no trial {number}; {known_text(list(rows))}")
        state = rows[number].state
        if why := f"over: it is {state}" if state.final else fault(rows[number]):
            again = "; shoal trial retry has it tried again" if state is TrialState.FAILED else ""
            raise ShoalError(f"trial {number} of the study in {directory} is {why}{again}")
    if not asked:
        raise ShoalError(f"no trial of the study in {directory} is named; name at least one")
    leave(directory, verb, trials=asked)
    return asked
