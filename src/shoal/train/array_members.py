"""Trials of an array in a worker: their membership and checkpoints, their losses, and calls of `Task.end_epoch`."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from itertools import compress
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.activity import Activity
from shoal.core.array import Member
from shoal.core.errors import FusionError
from shoal.core.event import EpochProgress, Event, Reported, TurnStats
from shoal.core.trial import Report, TrialState, derive_seed
from shoal.fuse.frozen import is_lent, is_shared, large_frozen, share_frozen
from shoal.fuse.generators import seed_all
from shoal.fuse.rows import storage_address
from shoal.host.activity_clock import during
from shoal.task import Task, call
from shoal.train.bases import base_changed, lent_parameters, read_only
from shoal.train.best_epoch import BestEpoch
from shoal.train.checkpoint_paths import remove_later_checkpoints
from shoal.train.kept_gradients import enter_array
from shoal.train.outside import OutsideState
from shoal.train.step_settings import StepPlan, mixes_steps
from shoal.train.stepper import StepRefusedError
from shoal.train.trial_runtime import TrialRuntime, sort_by_optimizer
from shoal.train.worker_state import WorkerState

__all__ = ["ArrayMembers", "LossTracker", "call_end_epoch"]

READ_STEPS, READ_SECONDS = 64, 1.0
"""Steps or seconds after which losses are read from the device, unless they were read before. The engine gets a summary
each READ_SECONDS at the latest, however long an epoch is."""

RATE_MEMORY = 0.6
"""Weight of the steps before the last READ_SECONDS in the rate of steps, for each of these seconds."""

MIN_SCALE_EXPONENT = -14
"""Exponent of the smallest loss scale, the smallest normal float16. A trial fails if its scale, at first 2**16, is
lower."""


class LossTracker:
    """Collects losses on the device, and reads several at once, since each read waits for the device.

    A read sets the failure of trials with a loss that is not finite, unless their loss scale skipped the step, and of
    those with a scale below 2**`MIN_SCALE_EXPONENT`. The next report contains a summary of the losses, and within an
    epoch how far it is.
    """

    def __init__(self, job: str, events: list[Event]) -> None:
        self._job = job
        self._events = events
        self._runtimes: Sequence[TrialRuntime] = ()
        self._losses: list[Tensor] = []  # losses not read yet, [B] each
        self._skipped: list[list[bool]] = []  # whether an overflow skipped the step, [B] each
        self._began = self._reported = time.perf_counter()
        self._summary: TurnStats | None = None  # of the best member at each step, since the last report
        self._taken, self._taken_since = 0, 0.0  # steps since the last report, and when the first of them began
        self._steps, self._seconds = 0.0, 0.0  # of all reports so far, the older ones counting less

    def begin_step(self) -> None:
        """Start the clocks, of the losses if all so far have been read, of the steps if all so far are reported."""
        now = time.perf_counter()
        if not self._losses:
            self._began = now
        if not self._taken:
            self._taken_since = now

    def add(self, runtimes: Sequence[TrialRuntime], losses: Tensor) -> None:
        """Add the losses of a step, [B]. The runtimes must stay the same until the next `flush`."""
        scales = [runtime.loss_scale for runtime in runtimes]
        small = [scale is not None and scale.scale < 2.0**MIN_SCALE_EXPONENT for scale in scales]
        if any(small):
            self.flush()  # so that an earlier loss that is not finite is the reported reason
            self._mark_overflows(compress(runtimes, small))
        self._runtimes = runtimes
        self._losses.append(losses)
        self._skipped.append([scale is not None and scale.overflowed for scale in scales])

    def end_step(
        self, cohort: Sequence[TrialRuntime], step: int, steps: int, *, settled: bool, profiled: float | None
    ) -> None:
        """Read the losses, and report their summary, if due. Call it after the runtimes have counted the step.

        Args:
            step: Steps, or batches, that the trials of the cohort have taken of their epoch, of `steps` in all.
            settled: Whether the fastest step mode was found, and steps are as long as the later ones.
            profiled: Steps, or batches, per second by the profile.
        """
        now = time.perf_counter()
        self._taken = self._taken + 1 if settled else 0
        if len(self._losses) == READ_STEPS or now - self._began >= READ_SECONDS:
            self.flush()
        if now - self._reported >= READ_SECONDS and (losses := self._summary) is not None:
            self._steps = RATE_MEMORY * self._steps + self._taken
            self._seconds = RATE_MEMORY * self._seconds + (now - self._taken_since if self._taken else 0.0)
            rate = self._steps / self._seconds if self._steps else profiled
            numbers = tuple(runtime.trial.number for runtime in cohort)
            epoch = 1 + min(runtime.epoch for runtime in cohort)
            last = losses.last if isfinite(losses.last) else None
            self.report((), EpochProgress(numbers, epoch, step, steps, last, rate))

    def flush(self) -> None:
        """Read all losses from the device."""
        if not self._losses:
            return
        losses, self._losses = torch.stack(self._losses), []
        skipped, self._skipped = self._skipped, []
        finite = losses.isfinite()
        if not finite.all():
            self._mark_losses(finite, skipped)
        best = losses.where(finite, torch.inf).amin(1)
        highest, lowest, last = torch.stack([best.max(), best.min(), best[-1]]).tolist()
        read = TurnStats(highest, lowest, last, len(best), time.perf_counter() - self._began)
        self._summary = read if self._summary is None else self._summary.followed_by(read)

    def _mark_losses(self, finite: Tensor, skipped: list[list[bool]]) -> None:
        """Set `TrialRuntime.failure` of runtimes with a loss that is not finite."""
        for runtime, *members in zip(self._runtimes, finite.T.tolist(), zip(*skipped, strict=True), strict=True):
            fine = [ends or without for ends, without in zip(*members, strict=True)]
            if not runtime.failure and not all(fine):
                step = runtime.step - len(fine) + fine.index(False) + 1
                runtime.failure = f"loss is not finite at step {step} of epoch {runtime.epoch + 1}"

    @staticmethod
    def _mark_overflows(runtimes: Iterable[TrialRuntime]) -> None:
        """Set `TrialRuntime.failure` of runtimes whose loss scale is too small after the step being added."""
        for runtime in runtimes:
            if not runtime.failure:
                runtime.failure = (
                    f"float16 overflow in step after step: the loss scale fell below 2**{MIN_SCALE_EXPONENT} at step "
                    f'{runtime.step + 1} of epoch {runtime.epoch + 1}; return "bf16-mixed" or "32" from the task\'s '
                    "`precision`, or scale inputs and loss down"
                )

    def report(self, reports: Iterable[Report], progress: EpochProgress | None = None) -> None:
        """Append an event with these reports, or progress, and the summary of the losses since the last event."""
        self._events.append(Reported(self._job, tuple(reports), self._summary, progress=progress))
        self._summary, self._reported, self._taken = None, time.perf_counter(), 0

    def report_summary(self) -> None:
        """Append an event with the summary alone, if there is one."""
        if self._summary is not None:
            self.report(())


class ArrayMembers:
    """Manages the trials of an array: those in training, and those that wait to join.

    Args:
        frozen_sources: Function that returns models whose large frozen parameters new models may share.
        heartbeat: Function to call before each operation that may take long.
        note: Function to call with a text for the user.
    """

    def __init__(
        self,
        members: Iterable[Member],
        worker_state: WorkerState,
        losses: LossTracker,
        frozen_sources: Callable[[], Iterable[nn.Module]],
        heartbeat: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self.runtimes: list[TrialRuntime] = []
        """Trials in training."""
        self.joining: list[Member] = list(members)
        """Trials that wait to join."""
        self.failures: list[tuple[frozenset[int], Exception | SystemExit]] = []
        """Trials that could not be built while others train: their numbers, and the exception."""
        self._state = worker_state
        self._losses = losses
        self._frozen_sources = frozen_sources
        self._heartbeat = heartbeat
        self._note = note
        self._epoch_due: set[int] = set()  # trials that must train one epoch before others join

    @property
    def trials(self) -> frozenset[int]:
        """Numbers of the trials in training and of those that wait to join."""
        return frozenset(x.trial.number for x in self.runtimes) | {x.trial.number for x in self.joining}

    def admit(self, mixed_epochs: bool) -> None:
        """Build the trials that wait to join, and report their epochs that the journal lacks.

        Without `mixed_epochs`, trials join only after each trial in training has finished an epoch since the last join.
        """
        if not mixed_epochs and self._epoch_due:
            return
        if self.joining:
            self._epoch_due = {runtime.trial.number for runtime in self.runtimes}
        while self.joining:
            member = self.joining[0]
            self._heartbeat()
            try:
                with during(Activity.BUILD):
                    runtime = self._runtime(member)
            except (Exception, SystemExit) as error:
                if not self.runtimes:
                    raise
                self.save()  # so the other trials lose nothing
                self.failures.append((frozenset({member.trial.number}), error))
                del self.joining[0]
                continue
            del self.joining[0]
            self._report_unrecorded(runtime)
            if runtime.epoch < member.target:
                self.runtimes.append(runtime)
                self._share_frozen(runtime.model)

    def _runtime(self, member: Member) -> TrialRuntime:
        """Return a trial from the cache of this process, else built and restored from its newest checkpoint."""
        runtime = self._state.trial_cache.take(member, self._state.directory)
        if runtime is None:
            task, config = self._state.task, member.trial.config
            plan = StepPlan.of(task, config, *self._state.sets.of(config))  # first: snapshots leave out the sets
            runtime = self._state.build(member)
            runtime.best = BestEpoch(self._state.of_best)
            self._state.outside.begin(member.trial.number, runtime.model)
            runtime.restore(self._state.directory, plan.steps)
        return runtime

    def _report_unrecorded(self, runtime: TrialRuntime) -> None:
        """Report the epochs of a checkpoint that the journal lacks, or the last one again at the target."""
        member = runtime.member
        missing = [r for r in runtime.reports if member.start < r.epoch <= member.target]
        if missing:
            self._losses.report(_with_state(runtime, report) for report in missing)
        elif runtime.epoch >= member.target and runtime.reports:
            self._losses.report([_with_state(runtime, runtime.reports[-1])])

    def _share_frozen(self, model: nn.Module) -> None:
        """Share large frozen parameters of other models of this process with a new model."""
        if large_frozen(model):
            for source in (self.runtimes[0].model, *self._frozen_sources()):
                if source is not model:
                    share_frozen(source, model)

    def next_cohort(self, mixed_epochs: bool) -> list[TrialRuntime]:
        """Return the next cohort, trained as one array: trials at the same batch of their epochs.

        Trials in the middle of an epoch come first; without `mixed_epochs`, then those at the lowest epoch.
        """

        def sort_key(runtime: TrialRuntime) -> tuple[int, int]:
            return (0 if mixed_epochs else runtime.epoch, -runtime.step * runtime.settings.accumulate)

        first = min(map(sort_key, self.runtimes))
        found = [runtime for runtime in self.runtimes if sort_key(runtime) == first]
        if mixes_steps(runtime.settings for runtime in found):  # which share each batch
            least = min(runtime.epoch for runtime in found)
            found = [runtime for runtime in found if runtime.epoch == least]
        return sort_by_optimizer(found)

    def end_epoch(
        self, cohort: Sequence[TrialRuntime], metrics: Sequence[dict[str, float]], seconds: float
    ) -> list[Report]:
        """End an epoch of these trials, and return their reports; trials at their targets or failed leave the array."""
        reports = []
        for runtime, values in zip(cohort, metrics, strict=True):
            failure = runtime.failure
            report = runtime.end_epoch(values, seconds)
            self._epoch_due.discard(runtime.trial.number)
            if failure:
                report = dataclasses.replace(report, state=TrialState.FAILED, reason=failure)
            else:
                is_best = runtime.best.note(report, runtime.trial.start)
                report = _with_state(runtime, report)
                if is_best and report.state is TrialState.RUNNING:  # else they are saved now
                    runtime.keep_best()
            if report.state is TrialState.PAUSED:
                self._save(runtime)
                with during(Activity.CHECKPOINTS):
                    self._state.trial_cache.put(runtime)
            if report.state is not TrialState.RUNNING:
                self._remove(runtime)
            reports.append(dataclasses.replace(report, checkpoint=runtime.checkpoint))
        return reports

    def leave(self, numbers: AbstractSet[int]) -> set[int]:
        """Save and remove the trials with these numbers; return the numbers that were in the array."""
        gone = {member.trial.number for member in self.joining} & numbers
        self.joining = [member for member in self.joining if member.trial.number not in gone]
        leaving = [runtime for runtime in self.runtimes if runtime.trial.number in numbers]
        if leaving:
            self._losses.flush()
        for runtime in leaving:
            self._save(runtime)
            self._remove(runtime)
            gone.add(runtime.trial.number)
        return gone

    def rebuild(self, cohort: Sequence[TrialRuntime]) -> None:
        """Restart trials from the newest checkpoints that are known to be right: they join again before all others.

        What they have changed in memory that other trials use is as before at once.
        """
        self.runtimes = [runtime for runtime in self.runtimes if runtime not in cohort]
        self._state.writer.wait()  # else a checkpoint of a later step may come after those are removed
        members, restored = [dataclasses.replace(one.member, checkpoint="") for one in cohort], set[int]()
        for runtime, member in zip(cohort, members, strict=True):
            remove_later_checkpoints(self._state.directory, runtime.trial.number, *runtime.proven)
            shared = _shared_frozen(runtime.model)
            if not restored.issuperset(map(storage_address, shared.values())):  # members of an array have one memory
                right = self._runtime(member).model
                for name, each in shared.items():
                    each.detach().copy_(right.get_parameter(name))
                restored.update(map(storage_address, shared.values()))
        self.joining = [*members, *self.joining]
        self._epoch_due.clear()

    def save(self) -> None:
        """Save all trials in training."""
        self._losses.flush()
        for runtime in self.runtimes:
            self._save(runtime)

    def suspend(self) -> None:
        """Save all trials, and put them in the cache for the next job of this process."""
        self.save()
        with during(Activity.CHECKPOINTS):
            for runtime in self.runtimes:
                if not runtime.failure:
                    self._state.trial_cache.put(runtime)

    def _save(self, runtime: TrialRuntime) -> None:
        """Save a trial, unless it has failed: restored from its last checkpoint, it fails again at the same step."""
        if not runtime.failure:
            with during(Activity.CHECKPOINTS):
                note = runtime.save(self._state.writer, self._state.outside.changed)
            if note:
                self._note(note)

    def _remove(self, runtime: TrialRuntime) -> None:
        self.runtimes.remove(runtime)
        self._epoch_due.discard(runtime.trial.number)


def call_end_epoch(task: Task, runtimes: Sequence[TrialRuntime], fused: bool, outside: OutsideState) -> bool:
    """Call `Task.end_epoch` for the trials that have not failed; return whether an array of them must be made anew.

    Tensors that a call has put in the place of buffers, or given to parameters as `.data`, are copied into the memory
    of these where that is the memory of an array. An array sees no other change of a model's attributes.

    Args:
        fused: Whether the trials are an array.
        outside: What trials keep outside of models; in plain PyTorch each has its own.

    Raises:
        StepRefusedError: a call has changed a frozen parameter that trials share, which is as before; or it has changed
            which tensors of a model of an array share memory, or the gradients of some members alone.
    """
    if type(task).end_epoch is Task.end_epoch:
        return False
    changed, array = False, runtimes[0].gradients.array
    for runtime in runtimes:
        runtime.gradients.leave()
        if runtime.failure:
            continue
        before = _attributes(runtime) if fused else None
        own = _in_place(runtime.model) if fused else outside.of(runtime.trial.number, runtime.model, "end_epoch")
        with during(Activity.END_EPOCH), _shared_unchanged(runtime.model), own:
            seed_all(derive_seed(runtime.trial.seed, "end_epoch", runtime.epoch), runtime.device)
            call(task, "end_epoch", runtime.model, config=runtime.trial.config)
        changed = changed or (fused and _attributes(runtime) != before)
    if array is not None:
        try:
            enter_array(array[0], [runtime.gradients for runtime in runtimes])
        except FusionError as error:
            raise StepRefusedError(str(error)) from error
    return changed


def _with_state(runtime: TrialRuntime, report: Report) -> Report:
    reached = report.epoch >= runtime.member.target
    state = TrialState.PAUSED if reached else TrialState.RUNNING
    return dataclasses.replace(report, state=state, checkpoint=runtime.checkpoint)


def _attributes(runtime: TrialRuntime) -> object:
    return runtime.carried and runtime.carried.attributes()


@contextmanager
def _in_place(model: nn.Module) -> Iterator[None]:
    """Copy values that are assigned to buffers, and to the `.data` of parameters, into the memory of before."""
    held: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (container, name, tensor, tensor.detach())
        for module in model.modules()
        for container in (module._parameters, module._buffers)
        for name, tensor in container.items()
        if tensor is not None and tensor.layout is torch.strided
    ]
    yield
    memories = [memory for *_, memory in held]
    values = [container.get(name) for container, name, _, _ in held]
    before, after = _first_in_memory(memories), _first_in_memory(values)
    if before != after:
        one = next(number for number, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        names = {held[number][1] for number in (one, before[one], after[one])}
        raise StepRefusedError(
            f"`end_epoch` changes which of the model's tensors share memory ({', '.join(sorted(names))}), and of an "
            "array each is on its own; assign a copy (`.clone()`) if they are not to change together"
        )
    own = set(map(_address, memories))
    replaced = [
        # copied now, as what the first copies write may be the values of others
        (entry, value.detach().clone() if _address(value) in own else value.detach())
        for entry, value in zip(held, values, strict=True)
        if value is not None and _is_replaced(*entry[2:], value)
    ]
    for (container, name, tensor, memory), value in replaced:
        memory.copy_(value)
        tensor.data = memory
        container[name] = tensor


def _is_replaced(tensor: Tensor, memory: Tensor, value: Tensor) -> bool:
    if isinstance(value, nn.Parameter) and value is not tensor:
        return False
    fits = (value.shape, value.dtype, value.device) == (memory.shape, memory.dtype, memory.device)
    return fits and value.data_ptr() != memory.data_ptr()


def _first_in_memory(values: Iterable[Tensor | None]) -> list[int]:
    """The number of the first value in the same memory, for each value."""
    found: dict[int, int] = {}
    return [found.setdefault(_address(value) or -1 - number, number) for number, value in enumerate(values)]


def _address(value: Tensor | None) -> int:
    return 0 if value is None else storage_address(value)


def _shared_frozen(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters in memory that other trials use, but that of a base, by name."""
    return {name: each for name, each in model.named_parameters() if is_shared(each) and not is_lent(each)}


@contextmanager
def _shared_unchanged(model: nn.Module) -> Iterator[None]:
    """Undo a change of frozen parameters in memory that other trials use, and refuse it; one of a base is not begun."""
    lent = lent_parameters(model)
    shared = {each.data_ptr(): (path, each.detach()) for path, each in _shared_frozen(model).items()}
    copies = [(path, each, each.to("cpu", copy=True)) for path, each in shared.values()]
    with read_only(lent, partial(base_changed, "`end_epoch`")):
        yield
    for path, memory, copied in copies:
        if not torch.equal(memory.cpu(), copied):
            memory.copy_(copied)
            raise StepRefusedError(f"`end_epoch` changes {path!r}, which is frozen and in memory that trials share")
