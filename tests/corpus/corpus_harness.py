"""A search of a program beside the same trials in plain PyTorch.

The search and the reference are a process each, so that what a program keeps in globals is as at its start; where it
keeps something there, so is each trial of the reference.
"""

import contextlib
import functools
import logging
import math
import multiprocessing
import os
import random
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import default_collate

import shoal
from shoal.core.errors import FusionError
from shoal.fuse.step import StepMode, TrainingStep
from shoal.plan.cost import cost
from shoal.train import fused_stepper, profile, run

for _late in ("numpy.random", "torch._dynamo", *(f"shoal.{name}" for name in ("api", "reproduce", "train.run"))):
    import_module(_late)  # else every child would

__all__ = ["MODES", "Finding", "examine"]

EPOCHS = 3
RATES = (0.03, 0.04, 0.05, 0.06, 0.065, 0.08)
RELATIVE, ABSOLUTE = 1e-9, 1e-12
LOGGERS = ("shoal.fuse", "shoal.train")
NO_REFUSAL = re.compile(
    r"leave the job after an error|has no signature|take turns|trials \[\d+\] cannot be one array|"
    r"validate one after another"
)
"""Warnings that tell of a failure, of epochs, of validation, or of a trial that is alone anyway; all others tell that
trials of an array are trained by themselves."""

_calls = logging.getLogger("corpus")

MODES: dict[str, tuple[StepMode, ...]] = {
    "default": (),
    "alternating": ("eager", "plain"),
    "compiled": ("eager", "compiled", "plain"),
    "eager": ("eager",),
}
"""Step modes that an array takes in turns; "default": those of a search."""


@dataclass
class Finding:
    """What became of a program.

    Args:
        differences: between the search and the trials in plain PyTorch, in words.
        reasons: why members are trained by themselves, as the log says, or the file of a job that ended of an error.
        at_once: training losses of several trials that were computed in one call, without those of a profile.
        jobs: that trained the trials that have not failed, each as often as it trained one.
        failures: number of each trial that failed -> the reason recorded.
    """

    differences: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    at_once: int = 0
    jobs: tuple[str, ...] = ()
    failures: dict[int, str] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """ "fused", "refused", or "silent": trained one by one, and no reason said."""
        if self.reasons:
            return "refused"
        return "fused" if self.at_once and len(set(self.jobs)) == 1 else "silent"


class Watch(logging.Handler):
    """What the log says, and which models losses are computed of; a logger is what no rollback looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[nn.Module] = []
        self.trained: list[nn.Module] = []
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "corpus":
            {"made": self.made, "trained": self.trained}[record.msg].append(record.args[0])  # type: ignore
        elif record.levelno >= logging.WARNING and not NO_REFUSAL.search(text := record.getMessage()):
            self.reasons.append(text)

    @property
    def at_once(self) -> int:
        """Losses of models that no trial has built: of what stands for several of them."""
        own = {id(model) for model in self.made}
        return sum(id(model) not in own for model in self.trained)


def observed(kind: type[shoal.Task]) -> None:
    """Have the log told of each model that a task makes, and of each that a loss is computed of."""
    model, loss = kind.model, kind.loss

    @functools.wraps(model)
    def model_of(self: Any, config: Any) -> nn.Module:
        made = model(self, config)
        _calls.info("made", made, None)
        return made

    @functools.wraps(loss)
    def loss_of(self: Any, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            _calls.info("trained", model, None)
        return loss(self, model, batch)

    kind.model, kind.loss = model_of, loss_of  # type: ignore[method-assign]


@contextlib.contextmanager
def listening() -> Iterator[Watch]:
    watch = Watch()
    loggers = [logging.getLogger(name) for name in (*LOGGERS, "corpus")]
    for logger in loggers:
        logger.addHandler(watch)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield watch
    finally:
        for logger in loggers:
            logger.removeHandler(watch)


@dataclass
class Lone:
    """A trial as a loop of plain PyTorch trains it: metrics and weights, or what it raised."""

    metrics: dict[str, float] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def lone(task: shoal.Task, trial: Any, array: bool) -> Lone:
    """docs/reproduce.md, "Reproduce a trial in plain PyTorch".

    Args:
        task: a new one.
        trial: of the study.
        array: as of `shoal.randomness`; without it no code of fusion runs.
    """
    seeded(0)
    train, valid = task.data(dict(trial.config))
    seeded(trial.seed)
    model = task.model(dict(trial.config)).train()
    optimizer = task.optimizer(model, dict(trial.config))
    scheduler = task.scheduler(optimizer, dict(trial.config))
    config = (dict(trial.config),) if task.step.__code__.co_argcount == 5 else ()
    size, step = task.batch_size(dict(trial.config)), 0
    result = Lone()
    try:
        for epoch in range(EPOCHS):
            model.train()
            for rows in shoal.sample_order(trial, epoch, len(train)).split(size):
                batch = default_collate([train[i] for i in rows.tolist()])
                with shoal.randomness(trial, step, array):
                    loss = task.step(model, batch, optimizer, *config)
                if not loss.isfinite():
                    result.failure = "loss is not finite"
                    return result
                step += 1
                if scheduler is not None and task.scheduler_interval == "step":
                    scheduler.step()
            model.eval()
            totals: dict[str, float] = {}
            for number, rows in enumerate(torch.arange(len(valid)).split(size), start=1):
                batch = default_collate([valid[i] for i in rows.tolist()])
                with torch.no_grad(), shoal.randomness(trial, -number, array):
                    values = {"valid_loss": task.loss(model, batch), **task.metrics(model, batch)}
                for name, value in values.items():
                    totals[name] = totals.get(name, 0.0) + float(value) * len(rows)
            result.metrics = {name: total / len(valid) for name, total in totals.items()}
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(result.metrics["valid_loss"])
            elif scheduler is not None and task.scheduler_interval == "epoch":
                scheduler.step()
    except FusionError:
        raise
    except Exception as error:
        result.failure = str(error)
    result.weights = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    return result


def apart(values: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What differs by more than rounding."""
    if values.keys() != wanted.keys():
        return [f"{sorted(values)} instead of {sorted(wanted)}"]
    found = []
    for name, value in values.items():
        got, right = (torch.as_tensor(x, dtype=torch.complex128) for x in (value, wanted[name]))
        if got.shape != right.shape:
            found.append(f"{name}: shape {tuple(got.shape)} instead of {tuple(right.shape)}")
        elif not torch.allclose(got, right, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True):
            found.append(f"{name}: off by {float((got - right).abs().max() / right.abs().max()):.1e}")
    return found


def weights(study: shoal.Study, number: int) -> dict[str, Any]:
    """Of a trial's newest checkpoint."""
    newest = max((study.directory / "checkpoints" / f"{number:06d}").glob("*.pt"))
    state: dict[str, Any] = torch.load(newest, weights_only=True)["model"]
    return state


def search(task: shoal.Task, directory: Path) -> shoal.Study:
    try:
        return shoal.tune(
            task,
            {"lr": shoal.grid(list(RATES))},
            metric="valid_loss",
            mode="min",
            algorithm=shoal.Grid(epochs=EPOCHS),
            backend="inline",
            devices="cpu:1",
            directory=directory,
            retries=0,
            show_progress=False,
        )
    except shoal.StudyFailedError:
        return shoal.Study(directory)


def compared(make: Callable[[], shoal.Task], study: shoal.Study, by_itself: bool) -> list[str]:
    """What differs between trials of a study and the same in plain PyTorch, or when the last is trained again by Shoal.

    Random numbers are drawn as generators draw them, and as those of an array if anything differs then.

    Args:
        make: of a new task for each trial.
        study: with the trials.
        by_itself: whether each trial needs a process of its own, for what the program keeps in globals.
    """
    call = forked if by_itself else lambda each: each()
    differences = run_all(make, study, call, array=False)
    if differences:
        differences = run_all(make, study, call, array=True)
    done = [row.number for row in study.trials if row.state.name != "FAILED"]
    if done:
        again = call(lambda: dict(study.rerun(done[-1]).found))
        found = apart(dict(again[EPOCHS]), dict(study.trials[done[-1]].metrics))
        differences += [f"trial {done[-1]} trained again: {text}" for text in found]
    return differences


def run_all(make: Callable[[], shoal.Task], study: shoal.Study, call: Callable[[Any], Lone], array: bool) -> list[str]:
    """What differs between trials of a study and the same in plain PyTorch."""
    found = []
    for row in study.trials:
        try:
            wanted = call(functools.partial(lone, make(), row, array))
        except FusionError as error:
            return [f"no plain loop: {error}"]
        name = f"trial {row.number}"
        failed = row.state.name == "FAILED"
        if wanted.failure or failed:
            if not wanted.failure or not failed or wanted.failure not in row.reason:
                found.append(f"{name} is {row.state.name} ({row.reason!r}), and alone it fails with {wanted.failure!r}")
            continue
        found += [f"{name}: {text}" for text in apart(dict(row.metrics), wanted.metrics)]
        found += [f"{name}: {text}" for text in apart(weights(study, row.number), wanted.weights)]
    return found


def forked(run: Callable[[], Any]) -> Any:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        try:
            try:
                result = True, run()
            except BaseException as error:
                error.add_note(traceback.format_exc())
                result = False, error
            writer.send(result)
        finally:
            os._exit(0)
    writer.close()
    try:
        good, result = reader.recv()
    finally:
        os.waitpid(child, 0)
    if not good:
        raise result
    return result


def timed(stepper: Any, batches: Any, tick: int) -> float:
    """As `_step_seconds` of a profile on a machine where all steps, of however many members, take the same time."""
    stepper.train_step(batches, [tick] * len(batches))
    return 1.0


class InTurns(TrainingStep):
    """Takes the step modes in turns, and never chooses one."""

    modes: ClassVar[tuple[StepMode, ...]]
    seconds: ClassVar[dict[StepMode, float]] = {"eager": 1.0}
    taken = 0

    @property
    def next_mode(self) -> StepMode:
        return self.modes[self.taken % len(self.modes)] if len(self.array) > 1 else "plain"

    def _timed(self, batch: Any) -> Tensor:
        mode = self.next_mode
        self.taken += 1
        if mode == "compiled" and not self.compiled:
            if self._decision is None or self._decision.steps <= 0:  # a profile's, which never compiles
                mode = "eager"
            else:
                self._compiling = lambda seconds: True
                assert self._prepare(mode, batch), "the step cannot be compiled"
        return self._run(mode, batch)


def searched(kind: type[shoal.Task], directory: Path, modes: tuple[StepMode, ...]) -> tuple[int, list[str]]:
    """How many losses a search computes of several trials at once, and why it trains trials by themselves."""
    os.environ["SHOAL_CACHE"] = str(directory.parent / "cache")  # else jobs follow what other searches have measured
    if modes:
        InTurns.modes = modes
        fused_stepper.TrainingStep = InTurns  # type: ignore[misc]
    profile._step_seconds, run.FREE_SECONDS = timed, math.inf
    cost.STEPS_TO_TRY = 1e-6  # as in all tests: arrays are tried in searches of a few steps, too
    profile.SIZES, profile.INTERLEAVED_RULES = (1, len(RATES)), profile.SINGLE_RULES
    measure = run.measure
    with listening() as watch:

        def measured(*arguments: Any) -> Any:
            found = measure(*arguments)
            watch.trained.clear()  # of a profile
            return found

        run.measure = measured
        observed(kind)
        search(kind(), directory)
        return watch.at_once, watch.reasons


def examine(module: str, name: str, directory: Path, modes: str) -> Finding:
    """What becomes of a program in a search, and in plain PyTorch.

    Args:
        module: where it is written.
        name: of its class.
        directory: an empty one.
        modes: Name of step modes in `MODES`.
    """
    kind = getattr(import_module(module), name)
    at_once, reasons = forked(lambda: searched(kind, directory, MODES[modes]))
    study = shoal.Study(directory)
    keeps_globals = module == "corpus_globals"
    differences = forked(lambda: compared(kind, study, keeps_globals))
    jobs = tuple(row.job for row in study.trials if row.state.name != "FAILED")
    if len(set(jobs)) > 1:  # a profile that ends of an error parts the trials
        reasons += [path.read_text().rstrip().rpartition("\n")[2] for path in (directory / "logs").glob("*.log")]
    failures = {row.number: row.reason for row in study.trials if row.state.name == "FAILED"}
    return Finding(differences, reasons, at_once, jobs, failures)
