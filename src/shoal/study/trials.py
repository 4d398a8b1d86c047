"""In-memory records of all trials of a study, and the queue of waiting trials."""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, itemgetter

from shoal.core.array import FusionKey, Member
from shoal.core.constraint import Constraint, violation
from shoal.core.epoch_order import LAST_EPOCHS, EpochOrder
from shoal.core.job import Job, Purpose
from shoal.core.objective import Objective, first_objective, merge_best
from shoal.core.rows import TrialRow
from shoal.core.trial import FIRST_ADDED, Report, Trial, TrialGroup, TrialState
from shoal.plan.waiting import OutOfMemoryLimit, WaitingClass

__all__ = ["TrialRecord", "TrialTable"]

_ClassKey = tuple[int, FusionKey, int, int, bool, OutOfMemoryLimit | None]
"""Properties that the trials of a `WaitingClass` have in common."""

_number = attrgetter("trial.number")


@dataclass(slots=True)
class TrialRecord:
    """State and history of a trial: the values of its `TrialRow`, and what only its study knows.

    Args:
        target: Epochs up to which the trial shall train.
        state: Only `TrialTable.move` sets it.
        key: Its fusion key; None if it is not known yet.
        failure_note: Text on its last failure and its retry; "" before the first failure, and after it reached a
            target.
        last_cause: Epoch and cause of its last failure alone; None if it has not failed alone.
        reported_states: Epoch -> states with which it was reported, without FAILED.
        checkpoint: Beginning of the name of its newest checkpoint that was reported, as in `Report`; "" if none was.
    """

    trial: Trial
    target: int
    epoch: int = 0
    state: TrialState = TrialState.PENDING
    failures: int = 0
    reason: str = ""
    device: str = ""
    job: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    objective: float | None = None
    violation: float = 0.0
    ranked: Mapping[str, float] = field(default_factory=dict)
    best_epoch: int | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    paused_by: str = ""
    key: FusionKey | None = None
    failure_note: str = ""
    last_cause: tuple[int, str] | None = None
    reported_states: dict[int, tuple[TrialState, ...]] = field(default_factory=dict)
    checkpoint: str = field(default="", compare=False)
    _member: Member | None = field(default=None, init=False, compare=False, repr=False)

    @staticmethod
    def of(row: TrialRow, reported_states: dict[int, tuple[TrialState, ...]], checkpoint: str) -> "TrialRecord":
        """The record of a row, with what the reports of the trial say."""
        return TrialRecord(
            *(row.trial, row.target, row.epoch, row.state, row.failures, row.reason, row.device, row.job, row.seconds),
            *(row.metrics, row.best, row.objective, row.violation, row.ranked, row.best_epoch, row.errors),
            row.paused_by,
            reported_states=reported_states,
            checkpoint=checkpoint,
        )

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.trial.number

    @property
    def row(self) -> TrialRow:
        """Its row in the journal."""
        return TrialRow(
            *(self.trial, self.state, self.reason, self.epoch, self.target, self.failures, self.device, self.job),
            *(self.seconds, self.metrics, self.best, self.objective, self.violation, self.ranked, self.best_epoch),
            *(self.errors, self.paused_by),
        )

    @property
    def held_reason(self) -> str:
        """Why it does not train while it is PAUSED."""
        pause = f", then paused by {self.paused_by}" if self.paused_by else ""
        return f"waiting for others at epoch {self.epoch}{pause}"

    @property
    def has_failed(self) -> bool:
        """Whether the trial has failed for good."""
        return self.state is TrialState.FAILED

    @property
    def member(self) -> Member:
        """The trial as an array member, from its present epoch to its target."""
        member = self._member
        present = (self.epoch, self.target, self.checkpoint)
        if member is None or (member.start, member.target, member.checkpoint) != present:
            member = self._member = Member(self.trial, *present)
        return member

    def failed(self, reason: str) -> Report:
        """A report that the trial has failed at its present epoch."""
        return Report(self.number, self.epoch, state=TrialState.FAILED, reason=reason)


class TrialTable:
    """All trials of a study by number, with the waiting ones in classes.

    Args:
        of_best: Which epoch of a trial is its best; by default trials rank by their last epochs.
    """

    def __init__(
        self,
        objectives: Sequence[Objective] = (),
        constraints: Sequence[Constraint] = (),
        of_best: EpochOrder = LAST_EPOCHS,
    ) -> None:
        self.own_job_trials: set[int] = set()
        """Numbers of trials that failed together with others."""
        self.oom_limits: dict[int, OutOfMemoryLimit] = {}
        """Number of a trial that ran out of memory -> its limit."""
        self.trial_groups: dict[int, TrialGroup] = {}
        """Number of a trial -> the TrialGroup in which the algorithm proposed it last."""
        self.without_algorithm: set[int] = set()
        """Numbers of trials that the algorithm does not decide about: added by a user, or retried after a failure."""
        self.common_failures: set[int] = set()
        """Numbers of trials whose common failure ended earlier runs; they wait behind all other trials."""
        self.paused: set[int] = set()
        """Numbers of trials that a user has paused."""
        self.ended: set[int] = set()
        """Numbers of trials that have become COMPLETE or STOPPED, until `Retention` takes them."""
        self.arrived: dict[int, float] = {}
        """Number of a trial in a class -> time of the first call of `classes` since it is in one."""
        self.copies: dict[int, list[TrialRecord]] = {}
        """Number of a trial -> the trials that begin with its checkpoint."""
        self.changes = 0
        self.unexplained: set[int] = set()
        """Numbers of waiting trials without a recorded reason."""
        self.explained: set[int] = set()
        """Numbers of waiting trials with a reason of their own, instead of that others are ahead in the queue."""
        self.without_key: set[int] = set()
        """Numbers of waiting trials without a fusion key."""
        self._objectives = objectives
        self._constraints = constraints
        self._directions = of_best.directions(objectives, constraints)
        self._bounded = {each.metric for each in constraints}
        self._of_best = of_best
        self._new: list[Trial] = []
        self._changed: set[int] = set()
        self._all: dict[int, TrialRecord] = {}
        self._waiting: set[int] = set()
        self._suspended: frozenset[int] = frozenset()  # trials of suspended jobs
        self._class_of: dict[int, _ClassKey] = {}
        self._new_in_class: set[int] = set()  # trials that were put into a class since the last call of `classes`
        self._classes: dict[_ClassKey, list[Member]] = {}  # each by number
        self._heads: list[tuple[tuple[int, int], _ClassKey]] = []  # rank and first number of each class, ascending
        self._cached_classes: dict[_ClassKey, WaitingClass] = {}  # cache of the classes that have not changed
        self._members: dict[str, set[int]] = {}  # id of a job -> its trials, also ended ones until it lets them go
        self._present: dict[str, tuple[Job, Job]] = {}  # cache: id -> the job, and it with its present members

    def __getitem__(self, number: int) -> TrialRecord:
        return self._all[number]

    def __iter__(self) -> Iterator[TrialRecord]:
        return iter(self._all.values())

    def get(self, number: int) -> TrialRecord | None:
        """The record of a trial; None if there is no such trial."""
        return self._all.get(number)

    def take_rows(self) -> list[Trial | TrialRow]:
        """The trials that are new since the last call, and the rows that have changed, by number."""
        rows: list[Trial | TrialRow] = [*self._new, *(self._all[number].row for number in sorted(self._changed))]
        self._new.clear()
        self._changed.clear()
        return rows

    def move(self, record: TrialRecord, state: TrialState, reason: str = "") -> None:
        """Set the state of a trial, which may be new, and the reason for it."""
        if record.number not in self._all:
            self._new.append(record.trial)
            if record.trial.origin is not None:
                self.copies.setdefault(record.trial.origin.trial, []).append(record)
        self._all[record.number] = record
        self._changed.add(record.number)
        self._present.pop(record.job, None)
        if record.state is not state or state is TrialState.PENDING:
            self.changes += 1
        record.reason = reason or (record.held_reason if state is TrialState.PAUSED else "")
        if state is TrialState.RUNNING:  # also after a late report; it waits again when its job ends
            self._members.setdefault(record.job, set()).add(record.number)
        record.state = state
        number = record.number
        if state is TrialState.PENDING:
            self._waiting.add(number)
            self.unexplained.add(number)
        else:
            self._waiting.discard(number)
            self.unexplained.discard(number)
            self.explained.discard(number)
        self._reclassify([number])
        if state.final and state is not TrialState.FAILED:  # a failed trial may be retried
            record.reported_states.clear()
            self.ended.add(number)

    def restore(self, records: Iterable[TrialRecord], failed_jobs: Collection[str]) -> None:
        """Add trials in the states that they had when their engine ended; RUNNING ones wait again, with one failure
        more if their job is among the failed ones.
        """
        for record in records:
            ran = record.state is TrialState.RUNNING
            record.failures += ran and record.job in failed_jobs
            self.move(record, TrialState.PENDING if ran else record.state, "" if ran else record.reason)
            if not ran:
                self._changed.discard(record.number)
            if record.failures > 0 and record.state is TrialState.PENDING:
                self.isolate(record)
                record.failure_note = f"failed in {record.failures} jobs before, is tried again by itself"
        self._new.clear()  # the journal has them

    def register_trial_groups(self, groups: Iterable[TrialGroup]) -> None:
        """Register TrialGroups that the algorithm proposed, before the trials themselves."""
        self.trial_groups.update((trial.number, group) for group in groups for trial in group.trials)

    def set_keys(self, keys: Mapping[int, FusionKey]) -> None:
        """Set the fusion keys of trials."""
        for number, key in keys.items():
            self._all[number].key = key
        self._reclassify(keys)

    def isolate(self, record: TrialRecord) -> None:
        """Let a trial train in a job of its own."""
        self.own_job_trials.add(record.number)
        self._reclassify([record.number])

    def set_oom_limit(self, record: TrialRecord, limit: OutOfMemoryLimit) -> None:
        """Limit the array or the device of a trial."""
        self.oom_limits[record.number] = limit
        self._reclassify([record.number])

    def pause(self, numbers: Collection[int], user: str) -> None:
        """Let trials wait until they are released."""
        self.paused.update(numbers)
        self._set_paused(numbers, user)

    def release(self, numbers: Collection[int]) -> None:
        """Let paused trials continue."""
        self.paused.difference_update(numbers)
        self._set_paused(numbers, "")

    def _set_paused(self, numbers: Collection[int], user: str) -> None:
        for record in map(self._all.__getitem__, numbers):
            record.paused_by = user
            record.reason = record.held_reason if record.state is TrialState.PAUSED else record.reason
        self._changed.update(numbers)
        self._reclassify(numbers)

    def suspend(self, jobs: Iterable[Job]) -> None:
        """Take the trials of all suspended jobs out of the classes, and put those of other jobs back."""
        numbers = frozenset(member.trial.number for job in jobs for member in job.members)
        changed, self._suspended = numbers ^ self._suspended, numbers
        self._reclassify(changed)

    def begin(self, job: str, device: str, members: Iterable[Member]) -> None:
        """Set the state of members of a job on a device to RUNNING."""
        for member in members:
            record = self._all[member.trial.number]
            record.job, record.device = job, device
            self.move(record, TrialState.RUNNING)

    def left(self, job: str, numbers: Collection[int]) -> None:
        """Record that a job has let trials go, which until then are its members and have memory, even if ended."""
        members = self._members.get(job, set())
        self.changes += not members.isdisjoint(numbers)
        members.difference_update(numbers)
        self._present.pop(job, None)

    def reported(self, report: Report) -> bool:
        """Apply a report, if its trial has not ended and it is no repetition; return whether it was applied.

        After a resume a repetition counts if it says for the first time that the trial is PAUSED or FAILED.
        """
        record = self._all[report.trial]
        seen = record.reported_states.get(report.epoch, ())
        if record.state.final or (seen and (report.state is TrialState.RUNNING or report.state in seen)):
            return False
        if report.state is not TrialState.FAILED:
            record.reported_states[report.epoch] = (*seen, report.state)
        record.epoch = max(record.epoch, report.epoch)
        record.checkpoint = max(record.checkpoint, report.checkpoint)
        record.seconds += report.seconds
        kept = record.metrics
        if self._constraints and report.metrics:  # a constraint reads the values of one epoch
            kept = {name: value for name, value in kept.items() if name not in self._bounded}
        record.metrics = {**kept, **report.metrics}
        record.best = merge_best(record.best, report.metrics, self._directions)
        if not self._of_best.objectives:
            record.ranked, record.errors = record.metrics, report.errors if report.metrics else record.errors
        elif report.state is not TrialState.FAILED and self._of_best.improves(report.metrics, record.ranked):
            record.ranked, record.best_epoch = report.metrics, report.epoch  # a failed trial keeps no weights of it
            record.errors = report.errors
        record.objective = first_objective(record.ranked, self._objectives)
        record.violation = violation(self._constraints, record.ranked) if record.ranked else 0.0
        self.move(record, report.state, report.reason)
        if report.state is TrialState.PAUSED:
            self.clear_failures(record)
        return True

    def requeue(self, job: str, trials: Collection[int] | None, *, failed: bool) -> set[int]:
        """Record that a job has let trials (None: all) go; make those RUNNING wait again, and return their numbers."""
        gone = set(self._members.get(job, ())) if trials is None else trials
        left = self.running_in(job) & set(gone)
        self.left(job, gone)
        for number in left:
            self._all[number].failures += failed
            self.move(self._all[number], TrialState.PENDING)
        if trials is None:
            self._members.pop(job, None)
        return left

    def clear_failures(self, record: TrialRecord) -> None:
        """Clear the failures of a trial that has reached its target: it may share arrays again."""
        self.own_job_trials.discard(record.number)
        self.oom_limits.pop(record.number, None)
        record.failure_note, record.last_cause = "", None
        self._reclassify([record.number])

    def retry(self, record: TrialRecord) -> None:
        """Make a failed trial wait again from its last reported epoch, with its failures cleared."""
        self.clear_failures(record)
        record.epoch, record.failures = max(record.reported_states, default=record.trial.start), 0
        self.without_algorithm.add(record.number)
        self.move(record, TrialState.PENDING)

    def explain(self, reasons: Mapping[int, str]) -> None:
        """Set the reasons why trials wait, with the last failure of retried trials."""
        for number, why in reasons.items():
            record = self._all[number]
            reason = f"{why}; {record.failure_note}" if record.failure_note else why
            if reason != record.reason:
                record.reason = reason
                self._changed.add(number)
        self.unexplained.difference_update(reasons)
        self.explained.update(reasons)

    def explain_others(self, explained: Collection[int], reason: str) -> None:
        """Give all waiting trials but those that were just explained this reason."""
        others = (self.unexplained | self.explained).difference(explained)
        self.explain(dict.fromkeys(others, reason))
        self.explained -= others

    def present(self, job: Job) -> Job:
        """A training job with its present members at their present epochs; any other job unchanged.

        A job without a RUNNING member is about to end and has no present ones.
        """
        if job.purpose is not Purpose.TRAIN:
            return job
        known = self._present.get(job.id)
        if known is not None and known[0] is job:
            return known[1]
        members = self._members.get(job.id, set()) if self.running_in(job.id) else set()
        arrays = []
        for array in job.arrays:
            numbers = [number for number in (x.trial.number for x in array.members) if number in members]
            arrays.append(replace(array, members=tuple(self._all[number].member for number in numbers)))
        shown = replace(job, arrays=tuple(array for array in arrays if array.members))
        self._present[job.id] = (job, shown)
        return shown

    def running_in(self, job: str) -> set[int]:
        """Numbers of the trials that are RUNNING in a job."""
        members = (self._all[number] for number in self._members.get(job, ()))
        return {x.number for x in members if x.state is TrialState.RUNNING and x.job == job}

    def has_member(self, record: TrialRecord) -> bool:
        """Whether the last job of a trial has not let it go."""
        return record.number in self._members.get(record.job, ())

    def retrying(self) -> bool:
        """Whether a retried or added trial has not ended."""
        return any(not self._all[number].state.final for number in self.without_algorithm)

    def clear_all_failures(self) -> None:
        """Set the number of failures of all open trials to 0."""
        for record in self._all.values():
            if record.failures and not record.state.final:
                record.failures = 0
                self._changed.add(record.number)

    def add(self, record: TrialRecord) -> None:
        """Add a waiting trial that a user requested."""
        self.without_algorithm.add(record.number)
        self.move(record, TrialState.PENDING)

    @property
    def next_added(self) -> int:
        """The number of the next trial that a user adds."""
        return max((number + 1 for number in self._all if number >= FIRST_ADDED), default=FIRST_ADDED)

    def has_waiting(self) -> bool:
        """Whether a trial waits that is not paused by a user."""
        return len(self._waiting) > len(self._waiting & self.paused)

    def paused_waiting(self) -> list[TrialRecord]:
        """The waiting trials that a user has paused, by number."""
        return [self._all[number] for number in sorted(self._waiting & self.paused)]

    def waiting(self) -> list[TrialRecord]:
        """The waiting trials that are not paused: by failures, ascending, then by number."""
        return self.in_order(self._waiting)

    def in_order(self, numbers: Iterable[int]) -> list[TrialRecord]:
        """The waiting trials among some numbers, in the order of `waiting`."""
        waiting = (self._all[number] for number in numbers if number in self._waiting and number not in self.paused)
        return sorted(waiting, key=lambda record: (self._rank(record), record.number))

    def waits(self, number: int) -> tuple[Member, FusionKey] | None:
        """The member of a trial that waits and is not paused, with its key; None of any other trial."""
        record = self._all[number]
        if record.key is None or number not in self._waiting or number in self.paused:
            return None
        return record.member, record.key

    def classes(self, now: float, most: int | None = None) -> list[WaitingClass]:
        """The first `most` classes (None: all) of waiting trials with a key, except paused ones and those of suspended
        jobs, in the order of their first trials in the queue.
        """
        found: list[WaitingClass] = []
        for _, class_key in self._heads[:most]:
            if class_key not in self._cached_classes:
                rank, key, _, _, own_job, oom_limit = class_key
                members = tuple(self._classes[class_key])
                self._cached_classes[class_key] = WaitingClass(key, members, rank, own_job, oom_limit)
            found.append(self._cached_classes[class_key])
        for number in self._new_in_class & self._class_of.keys():
            self.arrived.setdefault(number, now)
        self._new_in_class.clear()
        return found

    def _reclassify(self, numbers: Iterable[int]) -> None:
        """Put trials into the classes in which they belong now."""
        for number in numbers:
            record, before = self._all[number], self._class_of.pop(number, None)
            waits = number in self._waiting
            (self.without_key.add if waits and record.key is None else self.without_key.discard)(number)
            if before is not None:
                self._change(before, partial(_remove, number=number))
            if record.key is None or not waits or number in self.paused or number in self._suspended:
                self.arrived.pop(number, None)
                continue
            place = self._rank(record), record.key, record.epoch, record.target
            key = (*place, number in self.own_job_trials, self.oom_limits.get(number))
            self._class_of[number] = key
            self._new_in_class.add(number)
            self._change(key, partial(insort, x=record.member, key=_number))

    def _change(self, key: _ClassKey, change: Callable[[list[Member]], object]) -> None:
        """Change the members of a class, and its place in the order of classes."""
        members = self._classes.setdefault(key, [])
        before = members[:1]
        change(members)
        self._cached_classes.pop(key, None)
        if before != members[:1]:
            for head in before:
                del self._heads[bisect_left(self._heads, (key[0], head.trial.number), key=itemgetter(0))]
            for head in members[:1]:
                insort(self._heads, ((key[0], head.trial.number), key), key=itemgetter(0))
        if not members:
            del self._classes[key]

    def _rank(self, record: TrialRecord) -> int:
        return 2 * record.failures + (record.number in self.common_failures)


def _remove(members: list[Member], number: int) -> None:
    del members[bisect_left(members, number, key=_number)]
