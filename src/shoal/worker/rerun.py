"""One trial trained again from its start, alone, in this process."""

from shoal.cluster.temporary import TemporaryFolder
from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Device
from shoal.core.event import Reported
from shoal.core.job import Job, WorkerContext
from shoal.core.trial import Report, Trial
from shoal.worker.control import JobControl
from shoal.worker.run import run

__all__ = ["trained_again"]


def trained_again(task: bytes, trial: Trial, epochs: int, device: Device) -> list[Report]:
    """What the trial reports when it is trained by itself; its checkpoints go to a temporary directory.

    Args:
        task: the user's, pickled by cloudpickle.
        trial: one that begins with weights of its own.
        epochs: to train for. There are fewer reports if its loss is no number before.
        device: where to train.

    Raises:
        Exception: whatever the user's methods raise.
    """
    array = Array(FusionKey(f"trial {trial.number}", "", 1, trial.data_seed), (Member(trial, 0, epochs),))
    with TemporaryFolder() as folder:
        events = run(Job("rerun", (array,)), device, WorkerContext(folder.path, task), JobControl(prompt=True))
        return [report for event in events if isinstance(event, Reported) for report in event.reports]
