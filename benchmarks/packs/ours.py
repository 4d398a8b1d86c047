"""The rows of Shoal itself."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import baselines
from rivals.first import first_search
from torch.utils.data import Dataset

import shoal
from packs.cases import Cell
from packs.tasks import METRIC, SPACE, Cifar
from packs.ways import Way
from shoal.algorithms.base import Algorithm
from shoal.core.array import Array, FusionKey, Member
from shoal.core.event import Reported
from shoal.core.trial import Report, Trial
from shoal.host.discover import discover
from shoal.journal.view import JournalView
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.costs import Costs
from shoal.plan.cost.history import History
from shoal.plan.packing.base import Packing
from shoal.plan.partition import partition
from shoal.plan.waiting import WaitingClass
from shoal.train.array_trainer import ArrayTrainer, WorkerState
from shoal.train.data.datasets import DataSets
from shoal.train.lane_scheduler import LaneScheduler
from shoal.train.profile import measure
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache

__all__ = ["PACKINGS", "Chosen", "searched"]

PACKINGS: dict[str, str | Packing] = {
    **{name: name for name in ("cost", "knn", "batch_size", "random", "none")},
    "knn, measured": baselines.KNN(metric="measured"),
}
"""`cost` fuses before it packs; the others pack single configurations, as in the paper; `none` does neither."""

SETTLED = 30
"""Epochs by which almost all ways of training have been chosen."""


class Chosen(Way):
    """What Shoal makes of a cell's members: arrays, in as many packs as a search on one device would have.

    Args:
        cell: to be trained.
        settled: epochs after which the ways that are still open are not waited for.
        planned: epochs that trials have left, by which it is judged whether to compile pays.
    """

    def __init__(self, cell: Cell, settled: int = SETTLED, planned: int = 1_000_000) -> None:
        super().__init__(cell)
        task, place = cell.task, cell.device
        self.sets = sets = DataSets(task, place)
        trials = [Trial(number, config, seed=number, data_seed=0) for number, config in enumerate(cell.configs)]
        keys, *_ = SignatureBuilder(task, sets).find_keys(trials)
        members: dict[FusionKey, list[Member]] = {}
        for trial in trials:
            members.setdefault(keys[trial.number], []).append(Member(trial, 0, planned))
        worker_state = WorkerState(task, sets, TrialCache(), place, Path(tempfile.mkdtemp()))
        device = next(iter(discover(str(place) if place.type == "cuda" else "cpu:1")))[1]
        history = History("")
        for key, some in members.items():
            profile = measure(worker_state, Array(key, tuple(some)), device.memory)
            history.put(key.structure, key.data, key.batch_size, device.kind, profile)
        waiting = [WaitingClass(key, tuple(some)) for key, some in members.items()]
        arrays = partition(waiting, Costs(history), [device], {}).arrays
        packs = ArrayPacker().packs(arrays, Costs(history), [device], {}, frozenset())
        self.packs = [
            (LaneScheduler(place), [ArrayTrainer("pack", array, worker_state) for array in pack]) for pack in packs
        ]
        while self.epochs < settled and not self.settled:
            self.run()

    @property
    def settled(self) -> bool:
        """Whether nothing is tried any more."""
        return all(
            turns.interleaving is not None and all(lane.settled for lane in lanes) for turns, lanes in self.packs
        )

    def sources(self) -> Iterable[Dataset[Any]]:
        return list(self.sets.sources)

    def epoch(self, number: int) -> None:
        """One of every lane."""
        for turns, lanes in self.packs:
            while left := [lane for lane in lanes if not _has_reported(lane)]:
                for lane in left:
                    lane.prepare()
                for failure in turns.round([lane for lane in left if lane.ready], lambda: False):
                    raise failure.error
            for lane in lanes:
                lane.events.clear()


def _has_reported(lane: ArrayTrainer) -> bool:
    """Whether a lane has ended an epoch; within long ones it tells of its losses."""
    return any(isinstance(event, Reported) and event.reports for event in lane.events)


def searched(
    task: Cifar,
    algorithm: Algorithm,
    packing: str,
    devices: str = f"cpu:{os.cpu_count()}",
    space: Mapping[str, Any] = SPACE,
) -> tuple[float, list[Report]]:
    """A search by `shoal.tune` with one of `PACKINGS`, from the call to its end; profiles are measured anew.

    Returns:
        Seconds, and a report for each epoch.
    """
    baselines.register()
    folder = Path(tempfile.mkdtemp())
    shutil.rmtree(os.environ["SHOAL_CACHE"], ignore_errors=True)
    first_search()
    began = time.perf_counter()
    shoal.tune(
        task, space, metric=METRIC, mode="min", algorithm=algorithm, packing=PACKINGS[packing],
        fuse=packing == "cost", devices=devices, directory=folder / "study", seed=0, show_progress=False,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    with JournalView.read(folder / "study") as journal:
        reports = [report for row in journal.trials() for report in journal.curve(row.number)]
    shutil.rmtree(folder)
    return seconds, reports
