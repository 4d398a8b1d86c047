"""Runs a study whose journal is open: its collaborators, its display, and how it ends."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shoal.algorithms.base import Algorithm
from shoal.callbacks.follower import following
from shoal.core.errors import PolicyError, ShoalError, StudyFailedError
from shoal.core.job import WorkerContext
from shoal.core.space import Space
from shoal.host.fleet import Fleet
from shoal.host.paths import as_given
from shoal.host.process_lock import TemporaryFolder, remove_abandoned
from shoal.host.remedy import command, next_commands
from shoal.host.sources import written_since_start
from shoal.journal.writer import Journal
from shoal.look.disk import DiskWatch
from shoal.look.failures import check_results, first_failed
from shoal.look.page.beside import beside_study
from shoal.look.progress import progress, summary
from shoal.look.savings import SpeedupWatch, savings
from shoal.look.snapshot import Snapshot, announced, how_ended, snapshot, time_left
from shoal.look.text import epochs_text
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History, environment
from shoal.plan.packing.base import Packing
from shoal.plan.schedule.base import Policy
from shoal.programs.opaque import RUNNER
from shoal.run.gpu_sharing import check_sharing
from shoal.run.registry import backend_class
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig
from shoal.study.engine import Engine
from shoal.study.interrupts import interruptible
from shoal.study.preview import MeasureOnly, Preview, preview
from shoal.train.checkpoint_paths import is_exportable

if TYPE_CHECKING:
    from shoal.results import Study

__all__ = ["directories", "engine_config", "measured", "overridden", "overrides", "run_study"]

TIMED_OUT = "the timeout of the study has passed; everything is saved. Resume with: {}"

directories: list[Path] = []
"""Directories of the studies that this process has run, in order."""


overrides: dict[str, Any] = {}
"""Arguments from the command line for the next `tune`; they override those of the script."""


class _Measured(BaseException):
    """Ends a call of `tune` within `measured`; no `except Exception` around the call catches it."""

    def __init__(self, found: Preview) -> None:
        self.found = found


def engine_config(
    spec: StudySpec,
    policy: Policy,
    packing: Packing,
    *,
    fleet: Mapping[str, Any] = MappingProxyType({}),
    measure: bool = False,
) -> EngineConfig:
    """Collaborators of an engine, made of the names in a specification; raises if a name is unknown or does not fit.

    Args:
        fleet: Devices as users have changed them, of `Fleet.record`; empty if they have not.
    """
    backend = backend_class(spec.backend)
    backend.connect(spec.ray_address, spec.sbatch)
    record = {"devices": spec.devices, "added": [], "removed": []} | dict(fleet)
    devices = Fleet.from_record(record, backend.discover, oversubscription=spec.oversubscription)
    check_sharing(spec.sharing, devices.found, processes=backend.concurrent)
    if devices.oversubscription > 1 and not backend.concurrent:
        ratio = f"oversubscription={devices.oversubscription:g}"
        raise PolicyError(f"{ratio} needs a process for each job; use backend='local', or leave it out")
    history = History(environment=environment())
    packer = ArrayPacker(packing, history.relative_times, Space.from_json(spec.space).axes(), spec.seed)
    return EngineConfig(devices, MeasureOnly() if measure else policy, history, packer, trains=not measure)


def run_study(
    journal: Journal, spec: StudySpec, algorithm: Algorithm, config: EngineConfig, *, show_progress: bool, page: bool
) -> "Study":
    """Run a study to its end; `spec` is that of the study with what this run has in the place of its own."""
    directories.append(as_given(journal.directory))
    remove_abandoned()
    worker_context = WorkerContext(
        journal.directory,
        journal.blob("task"),
        checkpoint_seconds=spec.checkpoint_seconds,
        sharing=spec.sharing,
        fork=not written_since_start(journal.study.get("sources", ())),
        devices=config.fleet.setting,
        hang_seconds=spec.hang_seconds,
        settings=spec.settings,
        trains=config.trains,
        process_memory=spec.process_memory,
        of_best=spec.of_best,
    )
    if spec.opaque:
        worker_context = replace(worker_context, runner=RUNNER)
    with closing(backend_class(spec.backend)(worker_context)) as backend:

        def take() -> Snapshot:
            running = engine.state.running.progress
            return snapshot(journal, time.time(), starting=backend.starting, progress=running)

        display = progress(take, silent=not show_progress)
        begun = f"{epochs_text(snapshot(journal, time.time()))} {spec.unit}" if len(journal.runs()) > 1 else ""
        if config.trains:
            names = [device.name for _, device in config.fleet.found]
            now = replace(spec, totals=announced(journal))
            display.print_lines(summary(now, names, as_given(journal.directory), begun, time_left(journal)))
        if journal.study.get("paused"):
            display.print_lines([f"the study is paused; resume it with: {command('study resume', journal.directory)}"])
        config = replace(config, find=backend.find, monitor=backend.monitor)
        disk, speed = DiskWatch(journal), SpeedupWatch(journal, config.history)

        def observe() -> None:
            display.update()
            disk.update()
            speed.update()

        engine = Engine(journal, algorithm, backend, config, observe)
        engine.begin()
        if journal.study.get("savings"):
            journal.put("savings", None)  # those until the last end; there are new ones at the next
        try:
            with beside_study(journal.directory, page), following(journal), interruptible(engine.interrupt), display:
                engine.run()
                if how_ended(journal) == "timeout":
                    display.print_lines([TIMED_OUT.format(command("resume", as_given(journal.directory)))])
                found = savings(journal, config.history)
                journal.put("savings", found and asdict(found))
                speed.record()
        except StudyFailedError as failure:
            if (cause := engine.state.lifecycle.stopped) is None:
                raise
            if config.trains:  # else the failures are among what is found
                explained = first_failed(cause, journal)
                for note in getattr(failure, "__notes__", ()):
                    explained.add_note(note)
                raise explained from None
        except ShoalError:
            raise
        except Exception as bug:  # raised by an algorithm or a policy
            again = command("resume", journal.directory)
            bug.add_note(f"All reports are recorded. After a correction, resume with: {again}")
            raise
        if not config.trains:
            raise _Measured(preview(engine.state))
    check_results(journal)
    if show_progress:
        shown = take()
        best = shown.best or next(iter(shown.front), None)
        exported = best.trial if best and is_exportable(journal.directory, best.trial, best.epoch) else None
        display.print_lines(next_commands(journal.directory, exported), whole=True)
    from shoal.results import Study  # what it needs to show results is not needed before

    return Study(journal.directory)


@contextmanager
def overridden(**arguments: Any) -> Iterator[list[Path]]:
    """Within this context, these arguments override those that the caller gives to `tune`.

    Args:
        arguments: Arguments of `tune` that replace those of the caller; or `trackers`, callbacks that are added to its.

    Yields:
        The directories of the studies that are run within, the last one last; it grows.
    """
    if arguments.get("policy", "auto") != "auto":
        arguments.setdefault("objective", None)  # only the policy "auto" has one
    overrides.update(arguments)
    directories.clear()
    try:
        yield directories
    finally:
        for name in arguments:
            del overrides[name]


def measured(run: Callable[[], None], trials: int, **arguments: Any) -> Preview | None:
    """Run a function up to its call of `tune`, which does not return: a study in a temporary directory measures the
    first trials that `Random` would propose, and plans their jobs. None if there is no call of `tune`.
    """
    folder = TemporaryFolder()  # it stays until the next run of Shoal if something fails, since it has the logs
    with overridden(directory=folder.path / "study", measure=trials, page=False, **arguments):
        try:
            run()
        except _Measured as end:
            if not end.found.failed:
                folder.close()
            return end.found
    folder.close()
    return None
