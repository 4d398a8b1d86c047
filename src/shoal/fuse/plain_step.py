"""Steps of an array's members one after another, in plain PyTorch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.backward import backward_alone, micro_batches, one_loss
from shoal.fuse.generators import seed_member
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.per_member import MemberRunner, member_batch
from shoal.fuse.scaler import LossScale

__all__ = ["PlainStep"]


class PlainStep:
    """Runs loss and backward pass of one member after another, then the members' own optimizers."""

    def __init__(
        self,
        array: ModelArray,
        optimizer: FusedOptimizer,
        loss: Callable[..., Any],
        max_norms: Tensor | None,
        scales: Sequence[LossScale],
    ) -> None:
        self._array = array
        self._scales = scales
        self._max_norms = None if max_norms is None else max_norms.tolist()
        self._optimizer = optimizer
        self._loss = loss
        self._device = next((p.device for p in array.parameters()), torch.device("cpu"))
        self._runs = [MemberRunner(seed, self._device) for seed in array.seeds]
        self._columns: list[tuple[Tensor, Sequence[Tensor]]] = []
        """Stacked parameters, each with the members' own parameters, which may have gradients from the last step."""
        self._begun = False
        self.trained: list[Tensor] = []
        """Parameters of the array for which a member had a gradient in the last step."""

    def __call__(self, batch: Any) -> Tensor:
        """Take one step; returns the detached losses, [B]."""
        array = self._array
        array.check_can_run()
        array.check_batch(batch)
        array.state.sync_before_member_runs()
        self._optimizer.zero_grad()
        self._columns = [
            (stacked, own) for _, stacked, own in array.stacked_tensors() if isinstance(stacked, nn.Parameter)
        ]
        for each in self._optimizer.members:  # gradients of other parameters accumulate
            each.zero_grad()
        ticks = array.ticks
        array.tick += len(micro_batches(batch))
        losses = []
        try:
            for b, (member, run) in enumerate(zip(array.members, self._runs, strict=True)):
                if b:
                    seed_member(b)
                losses.append(self._backward(b, run, ticks[b], member, member_batch(batch, b, len(array))))
        except BaseException as error:
            self.drop()
            if isinstance(error, FusionError):
                self._runs = [MemberRunner(seed, self._device, intercepted=True) for seed in array.seeds]
            raise
        counts = [sum(each.grad is not None for each in own) for _, own in self._columns]
        self.trained = [stacked for (stacked, _), count in zip(self._columns, counts, strict=True) if count]
        self.trained += [own for _, _, own in array.unfused_parameters() if own.grad is not None]
        overflowed = [b for b, scale in enumerate(self._scales) if scale.overflowed]
        self._optimizer.step_each(uneven=any(0 < count < len(array) for count in counts), skip=overflowed)
        for scale in self._scales:
            scale.update()
        if not self._begun:
            array.state.check_all_members()
            self._begun = True
        return torch.stack(losses)

    def _backward(self, b: int, run: MemberRunner, tick: int, member: Any, batch: Any) -> Tensor:
        """Run loss and backward pass; replaced buffers, which autograd may have saved, are committed afterwards."""
        scale = self._scales[b] if self._scales else None
        max_norm = None if self._max_norms is None else self._max_norms[b]
        try:
            return backward_alone(
                member,
                self._optimizer.members[b],
                lambda later, part: one_loss(run(self._loss, tick + later, member, part)),
                batch,
                scale,
                max_norm,
                after_each=partial(self._array.state.commit_member, b),
            )
        except BaseException:
            self._array.state.restore_member(b)
            raise

    def drop(self) -> None:
        """Drop the gradients of the members' own parameters; call it before a step in another mode."""
        for _, own in self._columns:
            for parameter in own:
                parameter.grad = None
