"""Trials and snapshots to be shown."""

from shoal.core.job import Purpose
from shoal.core.rows import DeviceRow, JobRow, TrialRow
from shoal.core.trial import Trial, TrialState
from shoal.look.snapshot import Best, DeviceUse, JobUse, Snapshot


def device(name, **changes):
    values = {"name": name, "node": "one", "node_cores": 2, "kind": "cpu/1", "memory": 8 * 10**9, "cores": 1}
    return DeviceRow(**(values | changes))


def failed_job(outcome, message="", trials=(0, 1)):
    return JobRow("job-00003", Purpose.TRAIN, "cpu:0", trials, 1.0, 2.0, outcome, message)


def row(number, state=TrialState.COMPLETE, accuracy=0.5, **changes):
    values = {
        "trial": Trial(number, {"lr": 0.00123456 * (number + 1), "optimizer": {"name": "sgd"}}, number, 7),
        "state": state,
        "reason": "",
        "epoch": 3,
        "target": 9,
        "failures": 0,
        "device": "cpu:0",
        "job": "12",
        "seconds": 1.25,
        "metrics": {} if accuracy is None else {"accuracy": accuracy, "valid_loss": 0.25},
        "best": {} if accuracy is None else {"accuracy": accuracy + 0.125, "valid_loss": 0.125},
        "objective": accuracy,
        "best_epoch": None if accuracy is None else 2,
    }
    values |= changes
    return TrialRow(**{"ranked": values["metrics"], **values})


def snapshot(**changes):
    values = {
        "metric": "accuracy",
        "mode": "max",
        "states": dict.fromkeys(TrialState, 0) | {TrialState.PENDING: 15, TrialState.RUNNING: 8},
        "waiting": {"its model is being measured": [*range(3, 15)], "needs 9.1 GB, cuda:0 has 4.2 GB free": [0, 1, 2]},
        "best": Best(7, {"lr": 0.0031234, "width": 128}, 0.98125),
        "epochs_done": 25,
        "epochs_asked": 100,
        "elapsed": 61.2,
        "seconds_left": 183.6,
        "devices": (
            DeviceUse(device("cpu:0"), (JobUse("job-00012", Purpose.TRAIN, 8, 0.95, 120_000_000, 1.0),)),
            DeviceUse(device("cpu:1")),
        ),
        "pid": 4321,
    }
    return Snapshot(**(values | changes))
