"""Where the trials of a study stand, at hand: what the journal says of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from shoal.core.array import Member
from shoal.core.job import Job, Purpose
from shoal.core.trial import Decision, Report, Trial, TrialState
from shoal.planner.limit import Limit

__all__ = ["Standing", "Standings", "retried_through"]


@dataclass
class Standing:
    """Where a trial stands.

    Args:
        trial: which.
        target: epochs up to which it was asked for.
        epoch: epochs it has reported.
        state: set by `Standings.move` alone.
        failures: jobs that failed while they trained it.
        job: id of the one that trains it, or trained it last.
        story: of its last failure, and how it is tried again; "" before the first one, and once it was well.
        cause: epochs that it had reported when it last failed by itself, and of what; None if it did not.
    """

    trial: Trial
    target: int
    epoch: int = 0
    state: TrialState = TrialState.PENDING
    failures: int = 0
    job: str = ""
    story: str = ""
    cause: tuple[int, str] | None = None

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.trial.number

    @property
    def member(self) -> Member:
        """The stretch that it is to be trained next."""
        return Member(self.trial, self.epoch, self.target)

    def failed(self, reason: str) -> Report:
        """A report that it has failed where it stands."""
        return Report(self.number, self.epoch, state=TrialState.FAILED, reason=reason)


class Standings:
    """All trials of a study by their numbers; who waits is known without a look at the others."""

    def __init__(self) -> None:
        self.alone: set[int] = set()
        """Numbers of trials that failed in company, and are to be trained by themselves."""
        self.limits: dict[int, Limit] = {}
        """Number of a trial that ran out of memory -> what it is held to."""
        self.retried: set[int] = set()
        """Numbers of trials that are or were tried again after they had failed: no algorithm decides about them."""
        self.tried: set[int] = set()
        """Numbers of trials that earlier runs ended on, as they failed alike: others come before them."""
        self._all: dict[int, Standing] = {}
        self._waiting: set[int] = set()

    def __getitem__(self, number: int) -> Standing:
        return self._all[number]

    def __iter__(self) -> Iterator[Standing]:
        return iter(self._all.values())

    def get(self, number: int) -> Standing | None:
        """Where a trial stands; None of one that was never asked for."""
        return self._all.get(number)

    def move(self, standing: Standing, state: TrialState) -> None:
        """Let a trial, a new one too, be in a state."""
        self._all[standing.number] = standing
        standing.state = state
        (self._waiting.add if state is TrialState.PENDING else self._waiting.discard)(standing.number)

    def restore(self, standing: Standing, state: TrialState) -> None:
        """A trial stands where it did before its engine ended."""
        self.move(standing, state)
        if standing.failures > 0 and state is TrialState.PENDING:
            self.alone.add(standing.number)
            standing.story = f"failed in {standing.failures} jobs before, is tried again by itself"

    def begin(self, job: str, members: Iterable[Member]) -> None:
        """A job trains these from now on."""
        for member in members:
            standing = self._all[member.trial.number]
            standing.job = job
            self.move(standing, TrialState.RUNNING)

    def wait_again(self, failures: Mapping[int, int]) -> None:
        """Trials are not trained any more and have not reached their targets.

        Args:
            failures: their numbers, each with the count of jobs that failed.
        """
        for number, count in failures.items():
            standing = self._all[number]
            standing.failures = count
            self.move(standing, TrialState.PENDING)

    def was_well(self, standing: Standing) -> None:
        """A trial has reached its target: it may be in company again."""
        self.alone.discard(standing.number)
        self.limits.pop(standing.number, None)
        standing.story, standing.cause = "", None

    def try_again(self, standing: Standing, epoch: int) -> None:
        """A trial that has failed waits again, as if it had never failed.

        Args:
            standing: the trial's.
            epoch: epochs that it had reported before.
        """
        self.was_well(standing)
        standing.epoch, standing.failures = epoch, 0
        self.retried.add(standing.number)
        self.move(standing, TrialState.PENDING)

    def told(self, reasons: Mapping[int, str]) -> dict[int, str]:
        """Why trials wait, those that failed with what came of it."""
        stories = {number: self._all[number].story for number in reasons}
        return {number: f"{why}; {stories[number]}" if stories[number] else why for number, why in reasons.items()}

    def present(self, job: Job) -> Job:
        """A training job with those members that it still trains, from where they are now; any other as it is."""
        if job.purpose is not Purpose.TRAIN:
            return job
        arrays = []
        for array in job.arrays:
            standings = [self._all[member.trial.number] for member in array.members]
            present = tuple(x.member for x in standings if x.state is TrialState.RUNNING and x.job == job.id)
            arrays.append(replace(array, members=present))
        return replace(job, arrays=tuple(array for array in arrays if array.members))

    def retrying(self) -> bool:
        """Whether there are trials that are tried again and have not ended."""
        return any(not self._all[number].state.final for number in self.retried)

    def has_waiting(self) -> bool:
        """Whether any trial waits to be trained."""
        return bool(self._waiting)

    def waiting(self) -> list[Standing]:
        """The trials that wait: those that failed last, else in the order of their numbers."""
        waiting = map(self._all.__getitem__, self._waiting)
        return sorted(waiting, key=lambda x: (x.failures, x.number in self.tried, x.number))


def retried_through(number: int) -> Decision:
    """A trial that failed has come as far as it was to, when it was tried again."""
    return Decision(number, TrialState.COMPLETE, "failed and was tried again, up to the budget at which it had failed")
