"""The measurements of `growth.py`: each takes a size, and returns seconds by name."""

import json
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from growth_function import report_at_once
from growth_study import EPOCHS, bound, cluster_of, reports_of, study_spec
from page import Client, serve
from support.recorded import RecordedJournal

import shoal
from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm
from shoal.algorithms.random import Random
from shoal.cli.app import app
from shoal.core.array import Array, FusionKey, Member
from shoal.core.command import CopyCheckpoint, Step
from shoal.core.demand import Profile
from shoal.core.event import Event, Heartbeat
from shoal.core.job import Job, WorkerContext
from shoal.core.space import Space, choice, uniform
from shoal.core.trial import Report, Trial, TrialState
from shoal.host.fleet import Fleet
from shoal.journal.view import JournalView
from shoal.look.page.views import curves_view
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.schedule.registry import make_policy
from shoal.run.virtual import Virtual, Workload
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig
from shoal.study.core import StudyCore
from shoal.study.devices import DeviceTracker
from shoal.study.event import Due
from shoal.study.hangs import HangDetector
from shoal.study.recovery import restore
from shoal.study.state import CoreConfig

Seconds = dict[str, float]

STRUCTURES = 60
EVENTS = 20
"""Least number of events after each of which a decision is timed; their mean counts."""
ARRAY = 16
"""Trials that report at once."""
_GB = 10**9


def cpu_of(action: Callable[[], object]) -> float:
    """CPU seconds of this process for an action."""
    began = time.process_time()
    action()
    return time.process_time() - began


def functions(count: int, folder: Path) -> Seconds:
    """A study of so many functions on two slots: seconds of the engine, with its journal."""
    study = partial(
        shoal.tune,
        report_at_once,
        {"lr": shoal.loguniform(1e-4, 1e-1)},
        metric="loss",
        mode="min",
        algorithm=shoal.Random(count, epochs=1),
        devices="cpu:2",
        directory=folder / "study",
        show_progress=False,
    )
    return {"functions": cpu_of(study)}


@dataclass(frozen=True)
class Structures(Workload):
    """Trials of sixty structures, that differ in the memory and the time that they take."""

    def key(self, trial: Trial) -> FusionKey:
        """That of its structure."""
        return FusionKey(f"net {trial.config['structure']}", "data", 32)

    def profile(self, key: FusionKey, kind: str) -> Profile:
        """Sixteen models at once take four times as long as one."""
        size = int(key.structure.removeprefix("net "))
        times = {members: (1 + size / 10) * factor / 100 for members, factor in ((1, 1.0), (16, 4.0), (32, 8.8))}
        return Profile(times, 100, 10, 2 * _GB, (1 + size) * _GB // 20, compute=0.4 + size / 120, cores=1.0)

    def report(self, trial: Trial, epoch: int) -> Report:
        """A loss that falls."""
        return Report(trial.number, epoch, {"loss": trial.config["x"] / epoch})


def decisions(trials: int, devices: int, folder: Path) -> Seconds:
    """Plan for waiting trials of structures that were measured: at first, and after an event of a job.

    Heartbeats, which change no plan, are not timed.
    """
    work, history = Structures(), History(folder / "history.sqlite")
    for structure in range(STRUCTURES):
        key = FusionKey(f"net {structure}", "data", 32)
        history.put(key.structure, key.data, key.batch_size, "gpu", work.profile(key, "gpu"))
    algorithm = Random(trials, EPOCHS)
    space = Space({"x": uniform(0.0, 1.0), "structure": choice(list(range(STRUCTURES)))})
    algorithm.bind(space, metric="loss", mode="min", seed=0, data_seed=0)
    backend = Virtual(WorkerContext(folder, b"", checkpoint_seconds=600.0), work)
    tracker = DeviceTracker(Fleet(cluster_of(devices)), lambda names: cluster_of(0), HangDetector(), folder)
    config = CoreConfig(
        directory=folder,
        spec=StudySpec(metric="loss", mode="min"),
        study={},
        algorithm=algorithm,
        policy=make_policy("auto"),
        history=history,
        devices=tracker,
        packer=ArrayPacker(),
        key=work.key,
    )
    core = StudyCore(config)
    core.step(Due.PROPOSE, backend.now)
    first = cpu_of(lambda: _do(core.step(Due.PLAN, backend.now), backend))
    times: list[float] = []
    while len(times) < EVENTS and not core.state.finished:
        for event in backend.poll(60.0):
            if isinstance(event, Heartbeat):
                _do(core.step(event, backend.now), backend)
            else:
                times.append(cpu_of(partial(_decide, core, event, backend)))
    return {"first": first, "event": statistics.fmean(times)}


def _decide(core: StudyCore, event: Event, backend: Virtual) -> None:
    for each in (event, Due.CHECK, Due.PROPOSE, Due.PLAN):
        _do(core.step(each, backend.now), backend)


def _do(step: Step, backend: Virtual) -> None:
    for command in step.commands:
        if not isinstance(command, CopyCheckpoint):
            backend.carry_out(command)


def reports(count: int, folder: Path) -> Seconds:
    """Write so many reports, of sixteen trials at a time; read them as a resume does, and as curves."""
    trials, epochs = max(1, count // 100), min(count, 100)
    algorithm = bound(Random(trials, epochs))
    with RecordedJournal.create(folder / "study", study_spec(), task=b"", algorithm=b"") as journal:
        groups = algorithm.next_groups(1)
        journal.record_proposal(1, groups)
        writing = cpu_of(lambda: _write_reports(journal, groups[0].trials, epochs))
    with JournalView.read(folder / "study") as view:
        reading = cpu_of(lambda: sum(1 for _ in view.events()))
    curves = cpu_of(lambda: curves_view(folder / "study", "loss"))
    return {"written": writing, "replayed": reading, "curves": curves}


def _write_reports(journal: RecordedJournal, trials: Iterable[Trial], epochs: int) -> None:
    numbers = list(trials)
    for first in range(0, len(numbers), ARRAY):
        members = numbers[first : first + ARRAY]
        array = Array(FusionKey("net", "data", 32), tuple(Member(trial, 0, epochs) for trial in members))
        job = Job(f"job-{first}", (array,))
        journal.record_job_start(job, "gpu:0")
        for some in zip(*(reports_of(trial, epochs, epochs) for trial in members), strict=True):
            journal.record_reports(job.id, some)
        journal.record_job_end(job.id, "finished", failed=False)


def resume(study: Path, folder: Path) -> Seconds:
    """Go on with a study whose engine was killed, until its first jobs would start."""
    began = time.process_time()
    with closing(RecordedJournal.open(study)) as journal:
        journal.begin_run()
        algorithm = bound(pickle.loads(journal.blob("algorithm")))
        backend = Virtual(WorkerContext(study, b""), Structures())
        config = EngineConfig(Fleet(cluster_of(8)), make_policy("auto"), History(""))
        core = StudyCore(config.core_config(journal, algorithm, backend))
        journal.write(restore(core.state, journal, time.time()).rows)
        restored = time.process_time() - began
        for due in Due:
            journal.write(core.step(due, 0.0, time.time()).rows)
    return {"restored": restored, "first jobs": time.process_time() - began}


def replayed(algorithm: Algorithm) -> Seconds:
    """Let an algorithm propose trials and take all their reports."""
    bound(algorithm)
    return {"algorithm": cpu_of(lambda: _search(algorithm))}


def asha(trials: int) -> Seconds:
    """ASHA's decisions on a study, which a resume repeats."""
    return replayed(ASHA(trials, max_epochs=9, concurrency=64))


def _search(algorithm: Algorithm) -> None:
    epochs: dict[int, int] = {}
    while not algorithm.finished:
        for group in algorithm.next_groups(8):
            for trial in group.trials:
                for epoch in range(epochs.get(trial.number, 0) + 1, group.budget.epochs + 1):
                    state = TrialState.PAUSED if epoch == group.budget.epochs else TrialState.RUNNING
                    algorithm.observe(Report(trial.number, epoch, {"loss": trial.config["lr"]}, state=state))
                epochs[trial.number] = group.budget.epochs


def command(*line: str) -> Seconds:
    """One command of the command line, without the start of Python."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return {line[0]: cpu_of(lambda: app(list(line), standalone_mode=False))}


def page(study: Path) -> Seconds:
    """The data of the page's first view as a browser asks for it: CPU seconds of the server."""
    process, address = serve(study)
    try:
        client, server, taken = Client(address), psutil.Process(process.pid), Seconds()
        before, began = server.memory_info().rss, sum(server.cpu_times()[:2])
        for name, path in (("figures", f"state?study={study.name}"), ("view", f"overview?study={study.name}")):
            answer = client.open(f"/api/{path}")
            assert json.loads(answer.read())
            taken[name] = sum(server.cpu_times()[:2]) - began
        return {"mib": (server.memory_info().rss - before) / 2**20} | taken
    finally:
        process.terminate()
        process.wait()
