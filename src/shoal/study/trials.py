"""Where the trials of a study stand, at hand: what the journal says of them."""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from shoal.core.array import Member
from shoal.core.job import Job, Purpose
from shoal.core.trial import FIRST_ADDED, Decision, Report, Trial, TrialState
from shoal.planner.partition import ResourceLimit

__all__ = ["TrialRecord", "TrialTable", "retried_through"]

_NUMBERS = 10**12
"""Above all numbers of trials."""


@dataclass(slots=True)
class TrialRecord:
    """Where a trial stands.

    Args:
        trial: which.
        target: epochs up to which it was asked for.
        epoch: epochs it has reported.
        state: set by `TrialTable.move` alone.
        failures: jobs that failed while they trained it.
        job: id of the one that trains it, or trained it last.
        story: of its last failure, and how it is tried again; "" before the first one, and once it was well.
        cause: epochs that it had reported when it last failed by itself, and of what; None if it did not.
        seen: epoch -> states with which it has reported that epoch, but for FAILED.
        reason: why it waits, as was told last; "" if it does not, or that was not told yet.
    """

    trial: Trial
    target: int
    epoch: int = 0
    state: TrialState = TrialState.PENDING
    failures: int = 0
    job: str = ""
    story: str = ""
    cause: tuple[int, str] | None = None
    seen: dict[int, tuple[TrialState, ...]] = field(default_factory=dict)
    reason: str = ""
    _member: Member | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.trial.number

    @property
    def has_failed(self) -> bool:
        """Whether it has failed for good."""
        return self.state is TrialState.FAILED

    @property
    def member(self) -> Member:
        """The stretch that it is to be trained next."""
        member = self._member
        if member is None or member.start != self.epoch or member.target != self.target:
            member = self._member = Member(self.trial, self.epoch, self.target)
        return member

    def failed(self, reason: str) -> Report:
        """A report that it has failed where it stands."""
        return Report(self.number, self.epoch, state=TrialState.FAILED, reason=reason)


class TrialTable:
    """All trials of a study by their numbers; who waits is known without a look at the others."""

    def __init__(self) -> None:
        self.alone: set[int] = set()
        """Numbers of trials that failed in company, and are to be trained by themselves."""
        self.limits: dict[int, ResourceLimit] = {}
        """Number of a trial that ran out of memory -> what it is held to."""
        self.retried: set[int] = set()
        """Numbers of trials about which no algorithm decides: they were added by a user, or failed and tried again."""
        self.tried: set[int] = set()
        """Numbers of trials that earlier runs ended on, as they failed alike: others come before them."""
        self.held: set[int] = set()
        """Numbers of trials that a user has paused: they are not trained until they are resumed."""
        self.changes = 0
        """How often a trial came into another state."""
        self.untold: set[int] = set()
        """Numbers of waiting trials of which nobody has been told why they wait."""
        self.unknown: set[int] = set()
        """Numbers of trials that have begun to wait since somebody last struck out those whose models are known."""
        self._all: dict[int, TrialRecord] = {}
        self._waiting: set[int] = set()
        self._line: list[int] = []  # a heap of turns, of all that have begun to wait and are not in front
        self._front: list[int] = []  # the first turns, in order
        self._by_job: dict[str, set[int]] = {}
        self._present: dict[str, tuple[Job, Job]] = {}  # a job as it is -> with the members it has now, until they move

    def __getitem__(self, number: int) -> TrialRecord:
        return self._all[number]

    def __iter__(self) -> Iterator[TrialRecord]:
        return iter(self._all.values())

    def get(self, number: int) -> TrialRecord | None:
        """Where a trial stands; None of one that was never asked for."""
        return self._all.get(number)

    def move(self, record: TrialRecord, state: TrialState) -> None:
        """Let a trial, a new one too, be in a state."""
        self._all[record.number] = record
        self._present.pop(record.job, None)
        if record.state is not state or state is TrialState.PENDING:
            self.changes += 1
            record.reason = ""
        if state is TrialState.RUNNING:  # by a late report, too: its job's end lets it wait again
            self._by_job.setdefault(record.job, set()).add(record.number)
        elif record.state is TrialState.RUNNING:
            self._by_job.get(record.job, set()).discard(record.number)
        record.state = state
        number = record.number
        if state is TrialState.PENDING:
            self._waiting.add(number)
            self.untold.add(number)
            self.unknown.add(number)
            heappush(self._line, self._turn(record))
        else:
            self._waiting.discard(number)
            self.untold.discard(number)
        if state.final and state is not TrialState.FAILED:  # one that has failed may be tried again
            record.seen.clear()

    def restore(self, record: TrialRecord) -> None:
        """A trial stands where it did before its engine ended."""
        self.move(record, record.state)
        if record.failures > 0 and record.state is TrialState.PENDING:
            self.alone.add(record.number)
            record.story = f"failed in {record.failures} jobs before, is tried again by itself"

    def begin(self, job: str, members: Iterable[Member]) -> None:
        """A job trains these from now on."""
        for member in members:
            record = self._all[member.trial.number]
            record.job = job
            self.move(record, TrialState.RUNNING)

    def reported(self, report: Report) -> bool:
        """Take over a report, if it is news.

        After a resume a worker may repeat epochs that were reported. Such a report is no news, unless it says for the
        first time that the trial is PAUSED or FAILED there. Nor is a report of a trial whose state is final.
        """
        record = self._all[report.trial]
        seen = record.seen.get(report.epoch, ())
        if record.state.final or (seen and (report.state is TrialState.RUNNING or report.state in seen)):
            return False
        if report.state is not TrialState.FAILED:
            record.seen[report.epoch] = (*seen, report.state)
        record.epoch = max(record.epoch, report.epoch)
        self.move(record, report.state)
        if report.state is TrialState.PAUSED:
            self.was_well(record)
        return True

    def wait_again(self, job: str, trials: Collection[int] | None, *, failed: bool) -> set[int]:
        """Trials of a job that have not reached their targets are not trained there any more.

        Args:
            job: its id.
            trials: numbers of those that it trains no more; None: of all that it has.
            failed: whether that counts as a failure of theirs.

        Returns:
            Numbers of those that wait again.
        """
        numbers = self._by_job.get(job, set())
        left = set(numbers) if trials is None else numbers & set(trials)
        for number in left:
            self._all[number].failures += failed
            self.move(self._all[number], TrialState.PENDING)
        if trials is None:
            self._by_job.pop(job, None)
            self._present.pop(job, None)
        return left

    def was_well(self, record: TrialRecord) -> None:
        """A trial has reached its target: it may be in company again."""
        self.alone.discard(record.number)
        self.limits.pop(record.number, None)
        record.story, record.cause = "", None

    def try_again(self, record: TrialRecord) -> None:
        """A trial that has failed waits again from the last epoch that it has reported, as if it had never failed."""
        self.was_well(record)
        record.epoch, record.failures = max(record.seen, default=record.trial.start), 0
        self.retried.add(record.number)
        self.move(record, TrialState.PENDING)

    def explain(self, reasons: Mapping[int, str]) -> dict[int, str]:
        """Why trials wait, those that failed with what came of it; of whom that has changed."""
        changed: dict[int, str] = {}
        for number, why in reasons.items():
            record = self._all[number]
            reason = f"{why}; {record.story}" if record.story else why
            if reason != record.reason:
                record.reason = changed[number] = reason
        self.untold.difference_update(reasons)
        return changed

    def present(self, job: Job) -> Job:
        """A training job with those members that it still trains, from where they are now; any other as it is."""
        if job.purpose is not Purpose.TRAIN:
            return job
        known = self._present.get(job.id)
        if known is not None and known[0] is job:
            return known[1]
        arrays = []
        for array in job.arrays:
            records = [self._all[member.trial.number] for member in array.members]
            present = tuple(x.member for x in records if x.state is TrialState.RUNNING and x.job == job.id)
            arrays.append(replace(array, members=present))
        shown = replace(job, arrays=tuple(array for array in arrays if array.members))
        self._present[job.id] = (job, shown)
        return shown

    def retrying(self) -> bool:
        """Whether there are trials that are tried again, or were added, and have not ended."""
        return any(not self._all[number].state.final for number in self.retried)

    def add(self, record: TrialRecord) -> None:
        """A trial that a user has added waits."""
        self.retried.add(record.number)
        self.move(record, TrialState.PENDING)

    @property
    def next_added(self) -> int:
        """The number of the next trial that a user adds."""
        return max((number + 1 for number in self._all if number >= FIRST_ADDED), default=FIRST_ADDED)

    def has_waiting(self) -> bool:
        """Whether any trial waits to be trained that may be."""
        return len(self._waiting) > len(self._waiting & self.held)

    def held_back(self) -> list[TrialRecord]:
        """The trials that only wait since a user has paused them, by number."""
        return [self._all[number] for number in sorted(self._waiting & self.held)]

    def waiting(self, most: int | None = None) -> list[TrialRecord]:
        """The trials that wait to be trained and may be: those that failed last, else in the order of their numbers.

        Args:
            most: so many of them, the first ones; None: all.
        """
        wanted = len(self._waiting) if most is None else most
        front = [turn for turn in self._front if self._waits(turn)]
        open_ = sum(turn % _NUMBERS not in self.held for turn in front) if self.held else len(front)
        last = front[-1] if front else -1
        while self._line and (open_ < wanted or self._line[0] < last):
            turn = heappop(self._line)
            if self._waits(turn):
                insort(front, turn)
                open_ += turn % _NUMBERS not in self.held
                last = front[-1]
        self._front = list(dict.fromkeys(front))
        if open_ > 2 * wanted:  # more were asked for before
            self._front, behind = self._front[: 2 * wanted], self._front[2 * wanted :]
            for turn in behind:
                heappush(self._line, turn)
        found = [self._all[turn % _NUMBERS] for turn in self._front if turn % _NUMBERS not in self.held]
        return found if most is None else found[:most]

    def in_order(self, numbers: Iterable[int]) -> list[TrialRecord]:
        """Those of some trials that wait and may be trained, in the same order."""
        waiting = (self._all[number] for number in numbers if number in self._waiting and number not in self.held)
        return sorted(waiting, key=self._turn)

    def _turn(self, record: TrialRecord) -> int:
        """Where a trial is in the line, as one number."""
        return (2 * record.failures + (record.number in self.tried)) * _NUMBERS + record.number

    def _waits(self, turn: int) -> bool:
        """Whether a trial still waits at that place of the line."""
        number = turn % _NUMBERS
        return number in self._waiting and self._turn(self._all[number]) == turn


def retried_through(number: int) -> Decision:
    """A trial about which no algorithm decides has come as far as it was to."""
    if number >= FIRST_ADDED:
        return Decision(number, TrialState.COMPLETE, "added by a user, up to its budget")
    return Decision(number, TrialState.COMPLETE, "failed and was tried again, up to the budget at which it had failed")
