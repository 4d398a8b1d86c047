"""Where the trials of a study stand, at hand: what the journal says of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.planner.job import Member
from shoal.trial import Trial, TrialState

__all__ = ["Standing", "Standings"]


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
    """

    trial: Trial
    target: int
    epoch: int = 0
    state: TrialState = TrialState.PENDING
    failures: int = 0
    job: str = ""

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.trial.number

    @property
    def member(self) -> Member:
        """The stretch that it is to be trained next."""
        return Member(self.trial, self.epoch, self.target)


class Standings:
    """All trials of a study by their numbers; who waits is known without a look at the others."""

    def __init__(self) -> None:
        self.alone: set[int] = set()
        """Numbers of trials that failed in company, and are to be trained by themselves."""
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

    def has_waiting(self) -> bool:
        """Whether any trial waits to be trained."""
        return bool(self._waiting)

    def waiting(self) -> list[Standing]:
        """The trials that wait: those that failed last, else in the order of their numbers."""
        return sorted(map(self._all.__getitem__, self._waiting), key=lambda x: (x.failures, x.number))
