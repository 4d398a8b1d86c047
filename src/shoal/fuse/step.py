"""`TrainingStep`: one training step of an array, executed in the fastest step mode on this machine.

During its first calls the step times the step modes in turn. Modes that must be captured first are timed against the
fastest mode so far:

- eager      all members at once
- plain      forward and backward member after member, then each member's own optimizer, like a loop over the models;
             for models that saturate the device on their own and gain nothing from fusion
- captured   the whole step as one CUDA graph (on a GPU); if the caller knows how many steps are left, only if recording
             is expected to pay off
- compiled   the whole step compiled by Inductor (on a GPU a CUDA graph as well); takes seconds, so it is tried only
             if the caller expects compilation to pay off
"""

import logging
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.core.activity import Activity
from shoal.core.demand import Profile
from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.autotune import timed_by_replay
from shoal.fuse.backward import MemberSteps, backward, micro_batches
from shoal.fuse.capture import CapturedStep, CompiledAheadError, records_graphs
from shoal.fuse.capture_decision import CaptureDecision
from shoal.fuse.constants import constant
from shoal.fuse.grads import clip_grad_norm_, parse_thresholds
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.plain_step import PlainStep
from shoal.fuse.race import Race
from shoal.fuse.scaler import GradScaler
from shoal.fuse.shard import Shard
from shoal.fuse.stacked import Stacked
from shoal.host.activity_clock import during
from shoal.plan.cost.capturing import EXPECTED_COMPILE_SECONDS
from shoal.plan.cost.cost import Cost

__all__ = ["StepMode", "TrainingStep", "modes_to_try"]

_log = logging.getLogger("shoal.fuse")

StepMode = Literal["eager", "plain", "captured", "compiled"]

MIN_SPEEDUP = 1.05
"""Smallest speedup at which a captured mode is chosen; a smaller one may be noise, or vanish with cold caches."""

PATIENCE = 20
"""Number of consecutive batches of other shapes after which timing stops for the present shapes."""


class TrainingStep:
    """One training step of all members: zero the gradients, compute the losses, run the backward pass, update.

    Called with a batch, shared or stacked, the step returns the detached losses, [B]; with `MemberSteps` the weighted
    ones of that batch, and 'plain' must then not be among `modes`. `mode` is the fastest mode (a captured one must win
    by a margin), or None until it is known. `seconds` are the seconds of a step in each timed mode, for batches with
    the shapes of the first batch; of `MemberSteps` their mean over batches after which the steps of all members end. A
    batch of other shapes is neither timed nor captured. If the first shapes do not occur again, later ones are timed
    instead; if these do not occur again either, the step chooses a mode without further timing.

    A captured step treats numbers that the loss reads from elsewhere than the models and the batch as constants. Models
    that change their own plain attributes as they run are not captured, and neither are steps with a loss scale,
    since the host decides whether a member's step is skipped.

    Args:
        array: Array of the models.
        optimizer: Optimizer of the array.
        loss: Function as for `ModelArray.map`, which returns a scalar that depends on parameters.
        modes: Allowed step modes.
        compiling: Function of the seconds of the fastest step so far that returns whether compilation may pay off; it
            is called once, and once more after each `reconsider_compiling`. A `CaptureDecision` counts all steps,
            and also decides whether the step is recorded; any other function lets it be recorded.
        clock: Clock in seconds.
        max_norm: Largest norm of a member's gradients, one for all members or one for each (inf for no limit); None if
            no member has a limit.
        scaler: Loss scales of the array's members, or None; gradients are clipped after they are unscaled.
        profile: Profile of the structure, or None; `new_profile` is the profile with what the first steps measured.

    Raises:
        FusionError: `modes` names neither 'eager' nor 'plain', or an unknown mode; `array` is not made by `fuse`;
            `optimizer` is not made by `fuse_optimizers` for it, or `scaler` for another array; or `loss` is not a
            function.
    """

    def __init__(
        self,
        array: ModelArray,
        optimizer: FusedOptimizer,
        loss: Callable[..., Any],
        modes: tuple[StepMode, ...] = ("eager", "plain", "captured", "compiled"),
        compiling: Callable[[float], bool] = lambda seconds: False,
        clock: Callable[[], float] = time.perf_counter,
        max_norm: float | Sequence[float] | None = None,
        scaler: GradScaler | None = None,
        profile: Profile | None = None,
    ) -> None:
        if not isinstance(array, ModelArray):
            raise FusionError(f"`array` must be what `fuse` made, got {type(array).__name__}")
        if not isinstance(optimizer, FusedOptimizer) or optimizer.array is not array:
            raise FusionError(
                "`optimizer` must be what `fuse_optimizers` made for this array, got "
                f"{'that of another one' if isinstance(optimizer, FusedOptimizer) else type(optimizer).__name__}"
            )
        if not callable(loss):
            raise FusionError(f"`loss` must be a function of a model and a batch, got {loss!r}")
        if scaler is not None and scaler.array is not array:
            raise FusionError("`scaler` must be a `shoal.GradScaler` of this array, got that of another one")
        if not isinstance(modes, (tuple, list)):
            raise FusionError(f"`modes` must be a tuple of step modes, got {modes!r}")
        wrong = [mode for mode in modes if mode not in get_args(StepMode)]
        if wrong or not {"eager", "plain"} & set(modes):
            raise FusionError(
                f"`modes` must name 'eager' or 'plain' and may name 'captured' and 'compiled', got {modes}"
            )
        self.mode: StepMode | None = None
        self.last_mode: StepMode = "eager"
        """Step mode of the last step."""
        self.compile_seconds = 0.0
        self.record_seconds = 0.0
        self.new_profile: Profile | None = None
        """`profile` with the measurements of the first steps; None if it has not changed."""
        self._profile = profile
        self.array = array
        self._optimizer = optimizer
        self.loss = loss
        self._device = next((p.device for p in array.parameters()), torch.device("cpu"))
        self._max_norms = None if max_norm is None else parse_thresholds(array, max_norm, "max_norm")
        self._scaler = GradScaler(array, enabled=False) if scaler is None else scaler
        self._plain = PlainStep(array, optimizer, loss, self._max_norms, self._scaler.scales)
        if len(array) == 1:
            modes = tuple(mode for mode in modes if mode != "eager") if "plain" in modes else modes
        self._runs: dict[StepMode, Callable[[Any], Tensor]] = {"eager": self._eager, "plain": self._plain}
        self._uncaptured: list[StepMode] = [mode for mode in self._runs if mode in modes]
        self._race: Race[StepMode] = Race(self._uncaptured)
        self._allowed: list[StepMode] = [x for x in ("captured", "compiled") if x in modes and not self._scaler.scales]
        self._later = list(self._allowed)
        self._compiling = compiling
        self._decision = compiling if isinstance(compiling, CaptureDecision) else None
        self._clock = clock
        self._will_be_recorded: bool | None = None  # until the first step shows its number of batches
        self._shapes: list[Any] | None = None
        self._batches = 1  # of a step
        self._seconds, self._timed_batches = 0.0, 0  # since the race has noted a time
        self._accumulates = False  # whether gradients are of steps that continue
        self._cleared: dict[str, tuple[int, AbstractSet[int]]] = {}
        """Path of a parameter -> version of its gradient when rows were last set to zero, and their members."""
        self._missed = 0
        self._turned = False

    @property
    def seconds(self) -> dict[StepMode, float]:
        """Seconds of the shortest step in each timed mode."""
        return self._race.seconds

    @property
    def next_mode(self) -> StepMode:
        """Mode of the next step, if its batch has the shapes that are timed."""
        return self._race.next if self.mode is None else self.mode

    def mode_of(self, batch: Any) -> StepMode:
        """Return the mode of the next step, if it gets this batch: batches of other shapes are not timed."""
        is_timed = self.mode is not None or self._shapes in (None, _shapes(batch))
        return self.next_mode if is_timed else self._race.leader

    @property
    def gain(self) -> float | None:
        """Speed-up of fused steps over plain ones; None unless both were timed."""
        seconds = self.seconds
        return seconds["plain"] / seconds["eager"] if {"eager", "plain"} <= seconds.keys() else None

    @property
    def stays_plain(self) -> bool:
        """Whether the fastest mode is the plain one, and no compiled one is waited for."""
        return self.mode == "plain" and not (self._decision is not None and self._decision.waits)

    @property
    def scales(self) -> tuple[float, ...]:
        """Loss scales of the members; empty if there are none."""
        return tuple(scale.scale for scale in self._scaler.scales)

    @property
    def compiled(self) -> bool:
        """Whether the step was compiled, and the compiled mode is timed or used now."""
        return "compiled" in self._runs

    def __call__(self, batch: Any) -> Tensor:
        """Take one step with all members.

        Raises:
            FusionError: The loss is not a scalar, or depends on no parameter; the gradients are then dropped.
        """
        if self._will_be_recorded is None:
            batches = len(micro_batches(batch))
            expected = 1.0 if self._profile is None else Cost(self._profile).step_seconds(len(self.array), batches)
            self._will_be_recorded = "captured" in self._allowed and self._pays("captured", expected)
        with timed_by_replay() if self._will_be_recorded else nullcontext():
            return self._step(batch)

    def _step(self, batch: Any) -> Tensor:
        decision = self._decision
        if decision is not None:
            decision.steps -= 1
            if decision.may_retry():
                self.reconsider_compiling()
        if self.mode is not None:
            return self._run(self.mode, batch)
        try:
            losses = self._timed(batch)
        finally:
            if decision is not None:
                decision.end(compiled=self.compiled)
        if self.mode is not None and self._profile is not None:
            self._record_measurements(self.new_profile or self._profile)
        return losses

    def _timed(self, batch: Any) -> Tensor:
        """Take a step in the mode that is timed next."""
        shapes, self._batches = _shapes(batch), len(micro_batches(batch))
        self._accumulates = isinstance(batch, MemberSteps)
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes and not self._turn_to(shapes):
            return self._run(self._race.leader, batch)
        self._missed = 0
        mode = self._race.next
        self._wait()
        began = self._clock()
        losses = self._run(mode, batch)
        self._wait()
        self._seconds, self._timed_batches = self._seconds + self._clock() - began, self._timed_batches + 1
        if isinstance(batch, MemberSteps) and not batch.ends.all():  # others have updates, too
            return losses
        self._race.note(self._seconds, work=self._timed_batches)
        self._seconds, self._timed_batches = 0.0, 0
        while self._race.winner is not None and self._later:
            if self._prepare(later := self._later.pop(0), batch):
                self._race.add(later, margin=MIN_SPEEDUP)
        if self._race.winner is not None:
            self._decide()
        return losses

    def reconsider_compiling(self) -> None:
        """Ask `compiling` once more in the next step, if another mode than the compiled one is used now."""
        if self.mode not in (None, "compiled") and "compiled" in self._allowed:
            self.mode = None
            self._later = ["compiled"]

    def _record_measurements(self, profile: Profile) -> None:
        """Set `new_profile` to the profile with the times measured here.

        The step time is added only if this size is the largest so far. The gain of compiling is 1 if that fails or is
        slower, and that of recording if it fails, so that no other array tries again. A reload that took as long as
        compiling did not find the code, and says nothing of reloads.
        """
        found, members = profile, len(self.array)
        uncompiled = [seconds for mode, seconds in self.seconds.items() if mode != "compiled"]
        if members > max(found.step_seconds) and uncompiled:
            found = replace(found, step_seconds={**found.step_seconds, members: min(uncompiled) / self._batches})
        if self.gain is not None:
            found = replace(found, fused_gain={**found.fused_gain, members: self.gain})
        eager = [seconds for mode, seconds in self.seconds.items() if mode in self._uncaptured]
        if self.record_seconds and eager:
            gain = min(eager) / self.seconds["captured"] if "captured" in self.seconds else 1.0
            gains = {**found.recorded_gain, members: gain}
            found = replace(found, recorded_gain=gains, record_seconds=self.record_seconds)
        if self.compile_seconds and self._decision is not None and uncompiled:
            gain = min(uncompiled) / self.seconds["compiled"] if self.mode == "compiled" else 1.0
            gains = {**found.compiled_gain, members: gain}
            found = replace(found, compiled_gain=gains)
            if not self._decision.reloads:
                found = replace(found, compile_seconds=self.compile_seconds)
            elif self.compile_seconds < (found.compile_seconds or EXPECTED_COMPILE_SECONDS):
                found = replace(found, reload_seconds=self.compile_seconds)
        if found is not profile:
            self.new_profile = found

    def _turn_to(self, shapes: list[Any]) -> bool:
        """Count a batch of other shapes; returns whether these shapes are timed from now on."""
        self._missed += 1
        if self._missed < PATIENCE:
            return False
        if self._turned or "captured" in self._runs or "compiled" in self._runs:
            self._decide()
            return False
        self._turned = True
        self._shapes = shapes
        self._race = Race(self._uncaptured)
        self._seconds, self._timed_batches = 0.0, 0
        return True

    def _decide(self) -> None:
        self._race.stop()
        self.mode = self._race.leader
        self._later.clear()
        kept = {*self._uncaptured, self.mode}
        self._runs = {
            mode: run for mode, run in self._runs.items() if mode in kept
        }  # a slower mode may hold much memory
        captured = self.mode in ("captured", "compiled")
        self._will_be_recorded = captured and records_graphs(self._device)
        if captured and not self._accumulates:
            self._optimizer.zero_grad()  # a captured step does not use these gradients
        _log.info("%d members: %s", len(self.array), self)

    def _prepare(self, mode: StepMode, batch: Any) -> bool:
        if not self._pays(mode, min(self.seconds.values())):
            return False
        began = self._clock()
        trained, step = self._plain.trained or None, None
        ahead = None if self._decision is None else self._decision.compile_ahead
        try:
            with during(Activity.COMPILE):
                step = CapturedStep(
                    self.array,
                    self._optimizer,
                    self.loss,
                    self._placed(batch),
                    mode == "compiled",
                    trained,
                    self._max_norms,
                    ahead,
                )
        except torch.OutOfMemoryError as reason:  # it is not noted: a later array may find the memory
            _log.info("the step cannot be captured: %s", reason)
            return False
        except CompiledAheadError as reason:  # nor is the time, since nothing was captured
            _log.info("%s", reason)
            return False
        except FusionError as reason:
            _log.info("%s", reason)
        seconds = self._clock() - began
        if mode == "captured":
            self.record_seconds = seconds
        else:
            self.compile_seconds += seconds
        if step is not None:
            self._runs[mode] = partial(self._captured, step)
        return step is not None

    def _pays(self, mode: StepMode, seconds: float) -> bool:
        """Whether capturing may pay off, for steps that take so many seconds now."""
        if mode == "compiled":
            return self._compiling(seconds)
        return records_graphs(self._device) and (self._decision is None or self._decision.should_record(seconds))

    def synchronize(self) -> None:
        """Copy all changes that the last steps have made in attributes to the members, or from them."""
        if self.last_mode == "plain":
            self.array.state.sync_from_members(search=True)
        else:
            self.array.state.sync_to_members()

    def _run(self, mode: StepMode, batch: Any) -> Tensor:
        if (mode == "plain") != (self.last_mode == "plain"):
            self.synchronize()
        self.last_mode = mode
        if mode != "plain":
            self._plain.drop()
        return self._runs[mode](batch)

    def gradients(self, batch: Any, shards: Sequence[Shard] = ()) -> Tensor:
        """Compute the gradients of all members at once, without an update; returns the detached losses, [B].

        Args:
            batch: Batch, shared or stacked.
            shards: See `backward`.
        """
        self.last_mode = "eager"
        self._plain.drop()
        self._optimizer.zero_grad()
        return backward(self.array, self.loss, self._scaler, batch, shards)

    def update(self) -> None:
        """Unscale and clip the gradients, and step the optimizers, after `gradients`."""
        self._scaler.unscale_(self._optimizer)
        if self._max_norms is not None:
            clip_grad_norm_(self.array, self._max_norms)
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _eager_member_steps(self, given: MemberSteps) -> Tensor:
        """Add the gradients of a batch, and update the members whose step it ends; no member has a loss scale."""
        begins, ends = (set(each.nonzero().flatten().tolist()) for each in (given.begins, given.ends))
        if len(begins) == len(self.array):
            self._optimizer.zero_grad()
            self._cleared.clear()
        elif begins:
            self._clear_gradients(begins)
        losses = backward(self.array, self.loss, self._scaler, given)
        self._check_reached(ends)
        if ends:
            if self._max_norms is not None:
                limits = [most if b in ends else inf for b, most in enumerate(self._max_norms.tolist())]
                clip_grad_norm_(self.array, limits)
            self._optimizer.step(skip=set(range(len(self.array))) - ends)
        return losses

    def _clear_gradients(self, members: AbstractSet[int]) -> None:
        """Remove the gradients of some members; rows of stacked ones become zero."""
        for _, b, own in self.array.unfused_parameters():
            if b in members:
                own.grad = None
        for path, data, _ in self.array.stacked_tensors():
            if data.grad is not None:
                version, others = self._cleared.get(path, (-1, frozenset()))
                unreached = members | (others if version == data.grad._version else frozenset())
                data.grad.index_fill_(0, constant(sorted(members), torch.int64, data.device), 0)
                self._cleared[path] = data.grad._version, unreached

    def _check_reached(self, ends: AbstractSet[int]) -> None:
        """Refuse the steps of members that have zero in place of no gradient, which an optimizer tells apart."""
        gradients = {path: data.grad for path, data, _ in self.array.stacked_tensors()} if self._cleared else {}
        for path, (version, members) in list(self._cleared.items()):
            grad = gradients.get(path)
            if grad is None or grad._version != version:
                del self._cleared[path]
            elif members & ends:
                raise FusionError(
                    f"{path!r} gets no gradient from some batches, and the members' steps have different batches"
                )

    def _eager(self, batch: Any) -> Tensor:
        if isinstance(batch, MemberSteps):
            return self._eager_member_steps(batch)
        losses = self.gradients(batch)
        self.update()
        return losses

    def _captured(self, step: CapturedStep, batch: Any) -> Tensor:
        placed = self._placed(batch)
        if step.fits(placed):
            self._cleared.clear()  # it gives all of its parameters gradients
            return step(placed)
        timed = [mode for mode in self._uncaptured if mode in self.seconds] or self._uncaptured
        mode = min(timed, key=lambda mode: self.seconds.get(mode, inf))
        if self.mode == "captured" and step.is_outdated:  # later steps record it again, if that still pays
            self.mode, self._later, self._race = None, ["captured"], Race([mode])
            del self._runs["captured"]
        return self._run(mode, batch)

    def _placed(self, batch: Any) -> Any:
        """The batch of a captured step, whose tensors are all on the device."""
        return batch.to(self._device) if isinstance(batch, MemberSteps) else batch

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __str__(self) -> str:
        times = ", ".join(f"{mode} {seconds * 1e3:.3g} ms" for mode, seconds in self.seconds.items())
        return f"{self.mode} ({times})"


def modes_to_try(profile: Profile | None, members: int) -> tuple[StepMode, ...]:
    """Return the step modes that can pay off; of eager and plain only the faster one, if the profile tells which."""
    gain = Cost(profile).fused_gain(members) if profile is not None and members > 1 else None
    uncaptured: tuple[StepMode, ...] = ("eager", "plain")
    if gain is not None:
        uncaptured = ("eager",) if gain >= 1 else ("plain",)
    return (*uncaptured, "captured", "compiled")


def _shapes(batch: Any) -> list[Any]:
    return [
        (type(leaf), (leaf.whole if isinstance(leaf, Stacked) else leaf).shape, leaf.dtype)
        for leaf in pytree.tree_leaves(batch)
        if isinstance(leaf, Tensor)
    ]
