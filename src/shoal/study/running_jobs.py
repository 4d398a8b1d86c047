"""The jobs of a study that hold devices."""

from collections import Counter
from collections.abc import Iterator, Mapping

from shoal.core.device import Device
from shoal.core.job import Job

__all__ = ["RunningJobs"]


class RunningJobs(Mapping[str, tuple[Job, Device]]):
    """Id of each job that holds a device -> the job and the device, oldest first."""

    def __init__(self) -> None:
        self.changes = 0
        """How often a job has begun or ended."""
        self._all: dict[str, tuple[Job, Device]] = {}
        self._on: Counter[str] = Counter()

    def __getitem__(self, job: str) -> tuple[Job, Device]:
        return self._all[job]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, job: Job, device: Device) -> None:
        """A job holds a device from now on."""
        self._all[job.id] = (job, device)
        self._on.update((device.name, *job.helpers))
        self.changes += 1

    def change(self, job: Job) -> None:
        """A job has other arrays now, or is promised something else."""
        self._all[job.id] = (job, self._all[job.id][1])

    def end(self, job: str) -> tuple[Job, Device]:
        """A job holds its device no more."""
        ended = self._all.pop(job)
        self._on.subtract((ended[1].name, *ended[0].helpers))
        self.changes += 1
        return ended

    def on(self, device: str) -> int:
        """How many jobs a device holds, those of which it is a helper included."""
        return self._on[device]
