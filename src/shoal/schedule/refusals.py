"""Why jobs wait, worked out only when somebody asks."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import overload

from shoal.core.device import Cluster
from shoal.schedule.action import JobState, Refusal, Resume, Start
from shoal.schedule.base import JobView
from shoal.schedule.ledger import Ledger

__all__ = ["Refusals"]


class Refusals(Sequence[Refusal]):
    """A refusal for every job that waits or is suspended and is not begun, oldest first.

    They are made at the first look at one of them. Jobs with the very same demand are given the same reason.

    Args:
        count: how many there are.
        jobs: gives all jobs the plan was made of, oldest first.
        actions: those of the plan, each beginning a job on one device.
        cluster: the cluster the plan was made of.
        exclusive: a device holds one job at a time.
    """

    def __init__(
        self,
        count: int,
        jobs: Callable[[], Sequence[JobView]],
        actions: Sequence[Start | Resume],
        cluster: Cluster,
        *,
        exclusive: bool = False,
    ) -> None:
        self._count = count
        self._jobs = jobs
        self._actions = actions
        self._cluster = cluster
        self._exclusive = exclusive

    @cached_property
    def _made(self) -> tuple[Refusal, ...]:
        jobs = self._jobs()
        ledger = Ledger(self._cluster, jobs, exclusive=self._exclusive)
        rooms = {room.device.name: room for room in ledger.rooms}
        begun = {action.job: rooms[action.devices[0]] for action in self._actions}
        waiting: list[JobView] = []
        for job in jobs:
            if job.id in begun:
                ledger.take(job, begun[job.id])
            elif job.state is not JobState.RUNNING:
                waiting.append(job)
        alike = {id(job.demand): job for job in waiting}
        reasons = {demand: ledger.refusal(job).reason for demand, job in alike.items()}
        return tuple(Refusal(job.id, reasons[id(job.demand)]) for job in waiting)

    @overload
    def __getitem__(self, index: int) -> Refusal: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Refusal]: ...
    def __getitem__(self, index: int | slice) -> Refusal | Sequence[Refusal]:
        return self._made[index]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Refusal]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list, Refusals)):
            return NotImplemented
        return self._made == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made)

    def __repr__(self) -> str:
        return repr(self._made)
