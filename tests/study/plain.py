"""The same trainings in plain PyTorch, and the numbers of a study to hold against them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tasks
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

import shoal
from shoal.core.job import Purpose
from shoal.core.trial import Report, Trial
from shoal.journal.view import JournalView

Curve = dict[int, dict[str, float]]
"""Epoch to metrics."""

RELATIVE = 1e-9


def plain_loop(task: shoal.Task, trial: Trial, epochs: int) -> Curve:
    """A plain training loop of one trial, with the sample order and the seeds that Shoal uses."""
    torch.manual_seed(trial.seed)
    model = task.model(trial.config)
    optimizer = task.optimizer(model, trial.config)
    scheduler = task.scheduler(optimizer, trial.config)
    train, valid = task.data(trial.config)
    size = task.batch_size(trial.config)
    curve: Curve = {}
    step = 0
    for epoch in range(epochs):
        model.train()
        for number, part in enumerate(shoal.sample_order(trial, epoch, len(train)).split(size)):
            with shoal.sample_randomness(trial, epoch, number):
                batch = collated(train, part)
            with shoal.randomness(trial, step):
                task.step(model, batch, optimizer)
            step += 1
        model.eval()
        totals: dict[str, float] = {}
        with torch.no_grad():
            for number, part in enumerate(torch.arange(len(valid)).split(size)):
                with shoal.sample_randomness(trial, None, number):
                    batch = collated(valid, part)
                with shoal.randomness(trial, -1 - number):
                    values = {"valid_loss": task.loss(model, batch), **task.metrics(model, batch)}
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + float(value) * len(part)
        curve[epoch + 1] = {name: total / len(valid) for name, total in totals.items()}
        for one in scheduler if isinstance(scheduler, list) else [scheduler]:
            if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
                one.step(curve[epoch + 1]["valid_loss"])
            elif one is not None:
                one.step()
    return curve


def collated(data: Any, rows: Tensor) -> Any:
    """The result of `default_collate` for these samples, in one operation if they are tensors."""
    return list(data[rows]) if type(data) is TensorDataset else default_collate([data[int(row)] for row in rows])


def digits(directory: Path, **where: Any) -> shoal.Study:
    """Search the learning rate of the digits, three epochs each, on the given devices and back end."""
    return shoal.tune(
        tasks.Digits(),
        {"lr": shoal.grid([0.0003, 0.001, 0.003])},
        metric="accuracy",
        mode="max",
        algorithm=shoal.Grid(epochs=3),
        directory=directory,
        show_progress=False,
        **where,
    )


def curves(directory: Path) -> dict[int, Curve]:
    """All that the trials of a study have reported, by number."""
    found: dict[int, Curve] = {}
    with JournalView.read(directory) as journal:
        for event in journal.events():
            if isinstance(event, Report) and event.metrics:
                found.setdefault(event.trial, {})[event.epoch] = dict(event.metrics)
    return found


def rounding(one: Curve, other: Curve) -> dict[int, float]:
    """Epoch to the largest relative difference up to there, of two trainings that only round differently."""
    largest = 0.0
    so_far: dict[int, float] = {}
    for epoch in sorted(one):
        ratio = other[epoch]["valid_loss"] / one[epoch]["valid_loss"]
        so_far[epoch] = largest = max(largest, abs(ratio - 1))
    return so_far


def check_equal(
    found: Mapping[int, Curve], wanted: Mapping[int, Curve], amplified: Mapping[int, Mapping[int, float]] | None = None
) -> None:
    """Every trial, every epoch, every metric.

    Args:
        found: what a study reported.
        wanted: what it should have.
        amplified: trial to epoch to `rounding`: what two correct trainings may differ by. Where it is above the
            tolerance by itself, a hundred times as much is tolerated.
    """
    assert found.keys() == wanted.keys()
    for number, curve in wanted.items():
        assert found[number].keys() == curve.keys(), f"trial {number}"
        for epoch, metrics in curve.items():
            assert found[number][epoch].keys() == metrics.keys()
            for name, value in metrics.items():
                got = found[number][epoch][name]
                where = f"{name} of trial {number} at epoch {epoch}: {got!r}, not {value!r}"
                tolerance = max(RELATIVE, 0.0 if amplified is None else 100 * amplified[number][epoch])
                same = math.isclose(got, value, rel_tol=tolerance, abs_tol=1e-300)
                assert same or (math.isnan(got) and math.isnan(value)), where


def check_plain(study: shoal.Study, task: shoal.Task) -> None:
    """A study against the plain loop for each of its trials, up to the epoch that it reached."""
    wanted = {row.number: plain_loop(task, row.trial, row.epoch) for row in study.trials}
    check_equal(curves(study.directory), wanted)


def array_sizes(directory: Path) -> list[int]:
    """Members of each training job, in the order of their starts."""
    return [len(job.trials) for job in jobs(directory) if job.purpose is Purpose.TRAIN]


def jobs(directory: Path) -> list[Any]:
    with JournalView.read(directory) as journal:
        return journal.jobs()


def table(study: shoal.Study) -> list[tuple[Any, ...]]:
    """The results that a kill must not change: everything except times and devices."""
    return [(r.number, r.config, r.state, r.epoch, r.target, dict(r.metrics), dict(r.best)) for r in study.trials]


def tune(task: shoal.Task, space: Mapping[str, Any], directory: Path, **arguments: Any) -> shoal.Study:
    """`shoal.tune` with what all tests want: jobs of one array, so that they show what was fused."""
    usual: dict[str, Any] = {
        "metric": "accuracy",
        "mode": "max",
        "algorithm": shoal.Grid(epochs=4),
        "devices": "cpu:1",
        "backend": "inline",
        "packing": "none",
        "directory": directory,
        "show_progress": False,
    }
    return shoal.tune(task, space, **{**usual, **arguments})
