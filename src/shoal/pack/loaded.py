"""Models loaded for training: the primitives `load` and `free` (Pack, section 3)."""

from collections.abc import Callable, Sequence
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.core.errors import PackError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep
from shoal.worker.memory import give_back

__all__ = ["Loaded", "Loss", "MakeOptimizers", "free", "load"]

Loss = Callable[[nn.Module, Any], Tensor]
"""Takes a model and a batch; returns a scalar."""

MakeOptimizer = Callable[[nn.Module], Optimizer]
"""Takes a model and returns an optimizer of its parameters."""

MakeOptimizers = MakeOptimizer | list[MakeOptimizer] | tuple[MakeOptimizer, ...]
"""One for all models of an array, or one for each."""


@final
class Loaded:
    """A model, or an array of several, on a device with its optimizer: what `load` returns, and a member of a `Pack`.

    Args:
        array: the models.
        optimizers: theirs.
        loss: as given to `load`.
        batch_size: rows that a step takes.
    """

    def __init__(self, array: ModelArray, optimizers: Sequence[Optimizer], loss: Loss, batch_size: int) -> None:
        self.batch_size = batch_size
        self._name = f"{type(array.members[0]).__name__} of batch size {batch_size}"
        self._optimizers = tuple(optimizers)
        self._array: ModelArray | None = array
        self._step: TrainingStep | None = TrainingStep(array, fuse_optimizers(optimizers, array), loss)

    @property
    def array(self) -> ModelArray:
        """The models as one; of one that was loaded alone, an array with B = 1.

        Raises:
            PackError: it was freed.
        """
        return self._check_there()

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models themselves, always up to date."""
        return self.array.members

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """One for each model; LR schedulers work on them as always."""
        self._check_there()
        return self._optimizers

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.array.parameters()).device

    @property
    def freed(self) -> bool:
        """Whether it is of no use any more."""
        return self._array is None

    @property
    def settled(self) -> bool:
        """Whether its steps are taken in the fastest of the ways that a `TrainingStep` has."""
        return self._step is None or self._step.way is not None

    def step(self, batch: Any) -> Tensor:
        """Train on one batch; returns the losses, [B], part of no graph."""
        self.array.check_present()
        assert self._step is not None
        return self._step(batch)

    def release(self) -> list[dict[str, Any]]:
        """What `free` does."""
        array, optimizers, device = self.array, self.optimizers, self.device
        checkpoints = [
            {"model": _copy(dict(model.state_dict())), "optimizer": _copy(optimizer.state_dict())}
            for model, optimizer in zip(array.members, optimizers, strict=True)
        ]
        self._array, self._step, self._optimizers = None, None, ()
        array.zero_grad()
        array.to("cpu")
        for optimizer, checkpoint in zip(optimizers, checkpoints, strict=True):
            optimizer.load_state_dict(checkpoint["optimizer"])  # in place of views of the array's state
        del array
        give_back(device)
        return checkpoints

    def _check_there(self) -> ModelArray:
        if self._array is None:
            raise PackError(f"{self!r} was freed; load its model again to go on with it")
        return self._array

    def __repr__(self) -> str:
        return self._name


def load(
    model: nn.Module,
    device: torch.device | str,
    *,
    optimizer: MakeOptimizers,
    loss: Loss,
    batch_size: int,
) -> Loaded:
    """Bring a model to a device, ready to be trained.

    A plain model is made an array of one. So its random numbers are its own, whatever it is packed with: dropout, and
    what it draws from torch's generators, follow its seed and the number of the step. The seed comes from torch's
    default generator; `load(shoal.fuse([model], seeds=[7]), ...)` gives it one. What a loss draws from Python's or
    NumPy's generators comes from those that the whole process shares.

    The model stays as it is for its owner: its own class, and its weights, which lie on the device from now on.

    Args:
        model: a plain one, or the array that `shoal.fuse` made of several, which then take every step together.
        device: where to train.
        optimizer: makes the model's optimizer; called when the model is on the device. For an array it is called with
            each of the models, or there is one for each.
        loss: takes a model and a batch, and returns a scalar, the mean over the batch.
        batch_size: rows that each step takes out of what is given to the pack.

    Raises:
        PackError: an argument is not what it is to be.
        FusionError: the model cannot be an array, or the optimizer is none of its own.
    """
    device = _device(device)
    if not isinstance(model, nn.Module):
        raise PackError(f"`model` must be a torch.nn.Module or what `shoal.fuse` made, got {model!r}")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise PackError(f"`batch_size` must be a positive integer, got {batch_size!r}")
    if not callable(loss):
        raise PackError(f"`loss` must be a function of a model and a batch that returns a scalar, got {loss!r}")
    count = len(model) if isinstance(model, ModelArray) else 1
    makers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer] * count
    for maker in makers:
        if not callable(maker):
            raise PackError(
                "`optimizer` must be a function that takes a model, which is then on the device, and returns its "
                f"optimizer (lambda model: torch.optim.Adam(model.parameters())), got {type(maker).__name__}"
            )
    if len(makers) != count:
        raise PackError(
            f"`optimizer` has {len(makers)} functions for {count} models; give one for each, or one for all"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PackError(
            f"{type(model).__name__} has no parameters that require gradients, so there is nothing to train"
        )
    models = model.members if isinstance(model, ModelArray) else (model,)
    _check_not_loaded(models)
    array = (model if isinstance(model, ModelArray) else fuse([model])).to(device)
    optimizers = [maker(one) for maker, one in zip(makers, array.members, strict=True)]
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise PackError(f"`optimizer` must return a torch.optim.Optimizer, got {one!r}")
    member = Loaded(array, optimizers, loss, batch_size)
    _loaded.add(member)
    return member


_loaded: WeakSet[Loaded] = WeakSet()
"""What is in use, and its models with it: one that was fused anew would leave its array."""


def _check_not_loaded(models: Sequence[nn.Module]) -> None:
    mine = set(map(id, models))
    for member in _loaded:
        if not member.freed and any(id(model) in mine for model in member.models):
            raise PackError(
                f"the model is loaded already, as {member!r}; free that, or load a model of its own (copy.deepcopy)"
            )


def _device(device: torch.device | str) -> torch.device:
    """Where models can be brought to."""
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise PackError(f"`device` must be one that torch can use here, got {device!r}: {reason}") from error
    if found.type == "meta":
        raise PackError("`device` must have memory to train in, got 'meta'")
    return found


def free(member: Loaded) -> list[dict[str, Any]]:
    """Take a model off its device. Its own tensors, and its optimizer's, lie in host memory after that.

    Args:
        member: what `load` returned. It is of no use any more.

    Returns:
        For each of its models, so one for a plain model, `{"model": ..., "optimizer": ...}`: state dicts of plain
        PyTorch on the CPU, which share no memory with anything.

    Raises:
        PackError: it was freed already.
    """
    if not isinstance(member, Loaded):
        raise PackError(f"`free` takes what `load` returned, got {type(member).__name__}")
    return member.release()


def _copy(state: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), state)
