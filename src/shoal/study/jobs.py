"""The running jobs of a study, with their rows in the journal."""

from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import asdict, replace
from math import inf
from typing import Any

from shoal.core.array import Array
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.event import ArrayFailed, Ended, EpochProgress, MembersLeft, Outcome, Reported
from shoal.core.job import Job, Purpose, job_id
from shoal.core.rows import PROGRESS, JobRow, Joined, Kill, Reservation, Row, StudyValue

__all__ = ["RunningJobs", "ended_with_engine"]

RECORD_SECONDS = 5.0
"""Least seconds between two records of the progress within epochs, which is one row of a study."""


class RunningJobs(Mapping[str, tuple[Job, Device]]):
    """Id of each job that holds a device -> the job and the device, oldest first.

    A job on several devices is a leader on the first one, and a helper (`Purpose.ASSIST`) on each of the others.

    Args:
        next_job: Number of the next job of the study.
    """

    def __init__(self, next_job: int = 1) -> None:
        self.next_job = next_job
        self.changes = 0
        self.helpers: dict[str, set[str]] = {}
        """Id of a job, which may have ended -> ids of the running jobs that assist it."""
        self.teams: dict[str, frozenset[str]] = {}
        """Id of each job on several devices -> ids of the helpers that it was told to train with."""
        self.dismissed: set[str] = set()
        """Ids of the running helpers that were asked to stop."""
        self.cores: dict[str, int] = {}
        """Id of each job that may use more CPU cores than those of its slot -> how many in all."""
        self.progress: dict[str, tuple[EpochProgress, ...]] = {}
        """Id of a job -> progress of each of its arrays within its epoch, of arrays that have reported any."""
        self._recorded_progress: dict[str, list[dict[str, Any]]] = {}
        self._progress_time = -inf  # when it was recorded
        self._all: dict[str, tuple[Job, Device]] = {}
        self._on: Counter[str] = Counter()
        self._rows: dict[str, JobRow] = {}
        self._changed: dict[str, JobRow] = {}
        self._added: list[Row] = []

    def __getitem__(self, job: str) -> tuple[Job, Device]:
        return self._all[job]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def values(self) -> ValuesView[tuple[Job, Device]]:
        """The jobs with their devices, without a look-up of each."""
        return self._all.values()

    def items(self) -> ItemsView[str, tuple[Job, Device]]:
        """As `values`, with the ids."""
        return self._all.items()

    def take_rows(self) -> list[Row]:
        """The rows that are new or have changed since the last call."""
        rows = [*self._changed.values(), *self._added]
        self._changed, self._added = {}, []
        return rows

    def new_id(self) -> str:
        """A new id of a job, unique in the study."""
        self.next_job += 1
        return job_id(self.next_job - 1)

    def begin(self, job: Job, device: Device, time: float) -> None:
        """Add a job that starts on a device."""
        self._all[job.id] = (job, device)
        self._on[device.name] += 1
        if job.assists:
            self.helpers.setdefault(job.assists, set()).add(job.id)
        self.changes += 1
        message = f"continues with {job.resumes}" if job.resumes else ""
        members: dict[str, tuple[int, ...]] = {}
        for array in job.arrays if job.purpose is Purpose.TRAIN else ():
            numbers = tuple(member.trial.number for member in array.members)
            members[array.key.steps] = (*members.get(array.key.steps, ()), *numbers)
        trials = tuple(member.trial.number for member in job.members)
        purpose, device_name = job.purpose, device.name
        row = JobRow(job.id, purpose, device_name, trials, time, None, "", message, None, members)
        self._write(replace(row, resumes=job.resumes, assists=job.assists))
        self._reserve(job.id, job.demand, time)

    def change(self, job: Job) -> None:
        """Update a job whose arrays have changed."""
        self._all[job.id] = (job, self._all[job.id][1])

    def reserve(self, job: Job, demand: Demand, time: float) -> Job:
        """Change the reservation of a job; return the job with it."""
        self._reserve(job.id, demand, time)
        self.change(job := replace(job, demand=demand))
        return job

    def join(self, job: str, arrays: Iterable[Array]) -> None:
        """Write that members of arrays join a job."""
        self._added += [Joined(job, array.key.steps, x.trial.number) for array in arrays for x in array.members]

    def note(self, job: str, text: str) -> None:
        """Add a text to the message of a running job."""
        self._write(_with_text(self._rows[job], text))

    def set_progress(self, event: Reported | MembersLeft | ArrayFailed, time: float) -> None:
        """Set the progress of an array within its epoch; remove that of trials which have ended it or left the job.

        It is written when trials end a long epoch, and within one at most every `RECORD_SECONDS`.
        """
        new = event.progress if isinstance(event, Reported) else None
        gone = {report.trial for report in event.reports} if isinstance(event, Reported) else set(event.trials)
        if new is not None:
            gone |= set(new.trials)
        others = [each for each in self.progress.get(event.job, ()) if gone.isdisjoint(each.trials)]
        self.progress[event.job] = (*others, *filter(None, [new]))
        if not self.progress[event.job]:
            del self.progress[event.job]
        if new is None or time - self._progress_time >= RECORD_SECONDS:
            self._record_progress(time)

    def _record_progress(self, time: float) -> None:
        value = {job: list(map(asdict, some)) for job, some in self.progress.items()}
        if value != self._recorded_progress:
            self._recorded_progress, self._progress_time = value, time
            self._added.append(StudyValue(PROGRESS, value))

    def kill(self, job: str, kill: Kill) -> None:
        """Write that a job is about to be killed."""
        self._write(replace(self._rows[job], kill=kill))

    def killed(self, job: str) -> Kill | None:
        """The kill of a running job that was killed or is about to be, else None."""
        return self._rows[job].kill

    def forget_kills(self) -> None:
        """Forget all kills, which a full disk may have prevented, so that they are repeated and written again."""
        self._rows = {job: replace(row, kill=None) for job, row in self._rows.items()}

    def end(self, ended: Ended, outcome: Outcome, time: float) -> tuple[Job, Device]:
        """Remove a job that has left its device."""
        job, device = self._all.pop(ended.job)
        self._on[device.name] -= 1
        if job.assists:
            self.helpers[job.assists].remove(job.id)
            if not self.helpers[job.assists]:
                del self.helpers[job.assists]
        self.changes += 1
        row = _with_text(self._rows[job.id], ended.message)
        self._write(replace(row, ended=time, outcome=outcome, activities=ended.activities))
        del self._rows[job.id]
        self.progress.pop(job.id, None)
        self._record_progress(time)
        return job, device

    def on(self, device: str) -> int:
        """Number of jobs that hold a device."""
        return self._on[device]

    def _write(self, row: JobRow) -> None:
        self._rows[row.id] = self._changed[row.id] = row

    def _reserve(self, job: str, demand: Demand | None, time: float) -> None:
        """Write a reservation, in which a memory or cores of 0 mean unknown."""
        amounts = (
            (None, None, None) if demand is None else (demand.compute, demand.memory or None, demand.cores or None)
        )
        self._added.append(Reservation(time, *amounts, job=job))


def ended_with_engine(row: JobRow, time: float) -> JobRow:
    """The row of a job that has ended with its engine: killed, if it was about to be, else ORPHANED."""
    if row.kill is None:
        return replace(_with_text(row, "the engine died"), ended=time, outcome=Outcome.ORPHANED)
    return replace(_with_text(row, row.kill.reason), ended=time, outcome=row.kill.outcome)


def _with_text(row: JobRow, text: str) -> JobRow:
    return replace(row, message=f"{row.message}\n{text}".strip("\n"))
