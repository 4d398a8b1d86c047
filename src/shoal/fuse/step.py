"""A training step of an array, in whichever way is fastest where it runs.

The ways, of which the step itself finds the fastest by doing its first steps in turns; one that has to be made first
takes turns with the fastest so far:

- eager      all members at once
- plain      forward and backward member after member, then each member's own optimizer: what a loop over the models
             does, for models that fill the device by themselves and gain nothing by fusing
- captured   the whole step as one CUDA graph (on a GPU)
- compiled   the whole step compiled by Inductor (on a GPU a CUDA graph as well); takes seconds, so it is tried only
             where the caller says that it may repay itself
"""

import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.cost.race import Race
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.generators import seed_member
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.per_member import MemberRunner, own_part
from shoal.fuse.stacked import Stacked

__all__ = ["TrainingStep", "Way"]

_log = logging.getLogger("shoal.fuse")

Way = Literal["eager", "plain", "captured", "compiled"]

CERTAIN = 1.05
"""How many times as fast a way that had to be made must be: less is noise, or lost where caches are cold."""

PATIENCE = 20
"""After so many batches in a row of other shapes than those that are timed, these are given up."""


class TrainingStep:
    """Zero the gradients, compute the losses, go backward, update: for all members of an array.

    Called with a batch, shared or stacked, it returns the losses, [B], part of no graph. `way` is the way that was
    found the fastest (one that has to be made must win by a margin), or None as long as that is open; `seconds` are
    those of a step in each way that was timed, for batches of the shapes of the first one. A batch of other shapes is
    not timed, and not captured; where the first shapes do not come again, others are timed in their place, and if these
    do not either, it is decided without them.

    Capturing freezes numbers that the loss takes from anywhere but the models and the batch. Models that change their
    own plain attributes as they run are not captured.

    Args:
        array: the models.
        optimizer: theirs.
        loss: takes a model and a batch and returns a scalar, which depends on parameters; as given to `ModelArray.map`.
        ways: that may be taken.
        compiling: asked once, with the seconds of the fastest step so far, whether compiling may repay itself.
        clock: in seconds.

    Raises:
        FusionError: `ways` names neither 'eager' nor 'plain', or what is no way; or `array` is not
            what `fuse` made, `optimizer` not what `fuse_optimizers` made for it, or `loss` no function.
    """

    def __init__(
        self,
        array: ModelArray,
        optimizer: FusedOptimizer,
        loss: Callable[..., Any],
        ways: tuple[Way, ...] = ("eager", "plain", "captured", "compiled"),
        compiling: Callable[[float], bool] = lambda seconds: False,
        clock: Callable[[], float] = time.perf_counter,
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
        if not isinstance(ways, (tuple, list)):
            raise FusionError(f"`ways` must be a tuple of ways, got {ways!r}")
        wrong = [way for way in ways if way not in get_args(Way)]
        if wrong or not {"eager", "plain"} & set(ways):
            raise FusionError(f"`ways` must name 'eager' or 'plain' and may name 'captured' and 'compiled', got {ways}")
        self.way: Way | None = None
        self.compile_seconds = 0.0
        """What capturing and compiling took."""
        self._array = array
        self._optimizer = optimizer
        self._loss = loss
        self._device = next((p.device for p in array.parameters()), torch.device("cpu"))
        self._plain = _PlainStep(array, optimizer, loss)
        if len(array) == 1:
            ways = tuple(way for way in ways if way != "eager") if "plain" in ways else ways
        self._runs: dict[Way, Callable[[Any], Tensor]] = {"eager": self._eager, "plain": self._plain}
        self._uncaptured: list[Way] = [way for way in self._runs if way in ways]
        self._race: Race[Way] = Race(self._uncaptured)
        self._later: list[Way] = [way for way in ("captured", "compiled") if way in ways]
        self._compiling = compiling
        self._clock = clock
        self._shapes: list[Any] | None = None
        self._missed = 0
        self._turned = False

    @property
    def seconds(self) -> dict[Way, float]:
        """Of the shortest step in each way that was timed."""
        return self._race.seconds

    def __call__(self, batch: Any) -> Tensor:
        """One step of all members.

        Raises:
            FusionError: the loss is no scalar, or no parameter has part in it; the gradients are dropped then.
        """
        if self.way is not None:
            return self._run(self.way, batch)
        shapes = _shapes(batch)
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes and not self._turn_to(shapes):
            return self._run(self._race.leader, batch)
        self._missed = 0
        way = self._race.next
        self._wait()
        began = self._clock()
        losses = self._run(way, batch)
        self._wait()
        self._race.note(self._clock() - began)
        while self._race.winner is not None and self._later:
            if self._prepare(later := self._later.pop(0), batch):
                self._race.add(later, margin=CERTAIN)
        if self._race.winner is not None:
            self._decide()
        return losses

    def _turn_to(self, shapes: list[Any]) -> bool:
        """Count a batch of other shapes; returns whether these are the ones to be timed from now on."""
        self._missed += 1
        if self._missed < PATIENCE:
            return False
        if self._turned or "captured" in self._runs or "compiled" in self._runs:
            self._decide()
            return False
        self._turned = True
        self._shapes = shapes
        self._race = Race(self._uncaptured)
        return True

    def _decide(self) -> None:
        self._race.stop()
        self.way = self._race.leader
        self._later.clear()
        kept = {*self._uncaptured, self.way}
        self._runs = {way: run for way, run in self._runs.items() if way in kept}  # what lost may hold much memory
        if self.way in ("captured", "compiled"):
            self._optimizer.zero_grad()  # its gradients are no tensors that outlive a step
        _log.info("%d members: %s", len(self._array), self)

    def _prepare(self, way: Way, batch: Any) -> bool:
        if way == "captured" and self._device.type != "cuda":
            return False
        if way == "compiled" and not self._compiling(min(self.seconds.values())):
            return False
        began = self._clock()
        trained = self._plain.trained or None
        try:
            step = CapturedStep(self._array, self._optimizer, self._loss, batch, way == "compiled", trained)
        except FusionError as reason:
            _log.info("%s", reason)
            return False
        finally:
            self.compile_seconds += self._clock() - began
        self._runs[way] = lambda batch: self._captured(step, batch)
        return True

    def _run(self, way: Way, batch: Any) -> Tensor:
        if way != "plain":
            self._plain.drop()
        return self._runs[way](batch)

    def _eager(self, batch: Any) -> Tensor:
        self._optimizer.zero_grad()
        losses = _one_for_each(self._array.map(self._loss, batch), len(self._array))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return losses.detach()

    def _captured(self, step: CapturedStep, batch: Any) -> Tensor:
        if step.fits(batch):
            return step(batch)
        timed = [way for way in self._uncaptured if way in self.seconds] or self._uncaptured
        return self._run(min(timed, key=lambda way: self.seconds.get(way, inf)), batch)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def __str__(self) -> str:
        times = ", ".join(f"{way} {seconds * 1e3:.3g} ms" for way, seconds in self.seconds.items())
        return f"{self.way} ({times})"


def _shapes(batch: Any) -> list[Any]:
    return [
        (type(leaf), (leaf.whole if isinstance(leaf, Stacked) else leaf).shape, leaf.dtype)
        for leaf in pytree.tree_leaves(batch)
        if isinstance(leaf, Tensor)
    ]


class _PlainStep:
    """Loss and backward of each member, which gets gradients of its own, then the members' own optimizers.

    Weights and state are views of the array's and of its optimizer's, so steps of both kinds may follow each other.

    Args:
        array: the models.
        optimizer: theirs.
        loss: takes a model and a batch and returns a scalar.
    """

    def __init__(self, array: ModelArray, optimizer: FusedOptimizer, loss: Callable[..., Any]) -> None:
        self._array = array
        self._optimizer = optimizer
        self._loss = loss
        self._device = next((p.device for p in array.parameters()), torch.device("cpu"))
        self._runs = [MemberRunner(seed, self._device) for seed in array.seeds]
        self._columns: list[tuple[Tensor, Sequence[Tensor]]] = []
        """Stacked parameters with the members' own, which may have gradients of the last step."""
        self._begun = False
        self.trained: list[Tensor] = []
        """The array's parameters that a member had a gradient of in the last step."""

    def __call__(self, batch: Any) -> Tensor:
        """One step; returns the losses, [B], part of no graph.

        Raises:
            FusionError: as `TrainingStep`; nothing is updated, and there are no gradients then.
        """
        array = self._array
        array.check_free()
        array.check_batch(batch)
        array.state.follow_own()
        self._optimizer.zero_grad()
        self._columns = [(stacked, own) for _, stacked, own in array.columns() if isinstance(stacked, nn.Parameter)]
        self.drop()
        ticks = array.ticks
        array.tick += 1
        losses = []
        try:
            for b, (member, run) in enumerate(zip(array.members, self._runs, strict=True)):
                if b:
                    seed_member(b)
                losses.append(self._backward(b, run, ticks[b], member, own_part(batch, b, len(array))))
        except BaseException as error:
            self.drop()
            if isinstance(error, FusionError):
                self._runs = [MemberRunner(seed, self._device, watched=True) for seed in array.seeds]
            raise
        counts = [sum(each.grad is not None for each in own) for _, own in self._columns]
        self.trained = [stacked for (stacked, _), count in zip(self._columns, counts, strict=True) if count]
        self.trained += [own for _, _, own in array.apart() if own.grad is not None]
        self._optimizer.step_each(uneven=any(0 < count < len(array) for count in counts))
        if not self._begun:
            array.state.check_places()
            self._begun = True
        return torch.stack(losses)

    def _backward(self, b: int, run: MemberRunner, tick: int, member: Any, batch: Any) -> Tensor:
        """A member's loss. What it has put in the place of a buffer is taken over last: autograd may have saved the
        buffer as it was.
        """
        try:
            loss = _one(run(self._loss, tick, member, batch))
            loss.backward()  # type: ignore[no-untyped-call]
            self._array.state.take_over(b)
        except BaseException:
            self._array.state.put_back(b)
            raise
        return loss.detach()

    def drop(self) -> None:
        """Forget the gradients of the members' own parameters; to be called before a step of another kind."""
        for _, own in self._columns:
            for parameter in own:
                parameter.grad = None


def _one(returned: Any) -> Tensor:
    """One member's loss, [].

    Raises:
        FusionError: it is no scalar, or no parameter has part in it.
    """
    if not isinstance(returned, Tensor):
        raise FusionError(_not_scalar(type(returned).__name__))
    if returned.numel() != 1:
        raise FusionError(_not_scalar(f"a tensor of shape {tuple(returned.shape)}"))
    _check_graph(returned)
    return returned if returned.dim() == 0 else returned.reshape(())


def _one_for_each(returned: Any, members: int) -> Tensor:
    """The members' losses, [B], out of a tensor of one element for each.

    Raises:
        FusionError: as `_one`.
    """
    if not isinstance(returned, Tensor):
        raise FusionError(_not_scalar(type(returned).__name__))
    if returned.numel() != members:
        raise FusionError(_not_scalar(f"a tensor of shape {tuple(returned.shape[1:])}"))
    _check_graph(returned)
    return returned.reshape(members)


def _check_graph(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise FusionError(
            "`loss` returned a number in which no parameter has part (by `.item()`, `.detach()`, `torch.no_grad()`, or "
            "because all are frozen), so there is nothing to go backward from; return the loss itself"
        )


def _not_scalar(found: str) -> str:
    return f"`loss` must return a scalar tensor for a model and a batch, its mean or sum, got {found}"
