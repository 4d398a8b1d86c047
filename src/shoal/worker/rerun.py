"""One trial trained again from its start, alone, in this process."""

from shoal.cluster.device import Device
from shoal.cluster.temporary import TemporaryFolder
from shoal.planner.event import Reported
from shoal.planner.job import Array, ArrayKey, Job, Member, Workplace
from shoal.planner.orders import Orders
from shoal.trial import Report, Trial
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
    array = Array(ArrayKey(f"trial {trial.number}", "", 1, trial.data_seed), (Member(trial, 0, epochs),))
    with TemporaryFolder() as folder:
        events = run(Job("rerun", (array,)), device, Workplace(folder.path, task), Orders(prompt=True))
        return [report for event in events if isinstance(event, Reported) for report in event.reports]
