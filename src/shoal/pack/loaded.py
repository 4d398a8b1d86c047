"""Models on a device for training in a pack: the primitives `load` and `free` (Pack, section 3)."""

from collections.abc import Callable, Sequence
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from shoal.core.errors import PackError
from shoal.core.plain import plain
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep
from shoal.train.memory import release_cached_memory

__all__ = ["Loaded", "Loss", "MakeOptimizers", "free", "load"]

Loss = Callable[[nn.Module, Any], Tensor]

MakeOptimizer = Callable[[nn.Module], Optimizer]

MakeOptimizers = MakeOptimizer | list[MakeOptimizer] | tuple[MakeOptimizer, ...]


@final
class Loaded:
    """Model or array of models on a device, with its optimizers. `load` returns it, and a `Pack` trains it."""

    def __init__(self, array: ModelArray, optimizers: Sequence[Optimizer], loss: Loss, batch_size: int) -> None:
        self.batch_size = batch_size
        self._name = f"{type(array.members[0]).__name__} of batch size {batch_size}"
        self._optimizers = tuple(optimizers)
        self._array: ModelArray | None = array
        self._step: TrainingStep | None = TrainingStep(array, fuse_optimizers(optimizers, array), loss)

    @property
    def array(self) -> ModelArray:
        """The models as one array, with B = 1 for a plain model.

        Raises:
            PackError: The member was freed.
        """
        return self._live_array()

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models with their current weights."""
        return self.array.members

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizer of each model, for LR schedulers."""
        self._live_array()
        return self._optimizers

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        return next(self.array.parameters()).device

    @property
    def freed(self) -> bool:
        """Whether the member was freed."""
        return self._array is None

    @property
    def settled(self) -> bool:
        """Whether the fastest step mode was found."""
        return self._step is None or self._step.mode is not None

    def step(self, batch: Any) -> Tensor:
        """Train on one batch; return the losses, [B], detached."""
        self.array.check_present()
        assert self._step is not None
        return self._step(batch)

    def release(self) -> list[dict[str, Any]]:
        """Free the member; see `free`."""
        array, optimizers, device = self.array, self.optimizers, self.device
        checkpoints = [
            {"model": _copy(dict(model.state_dict())), "optimizer": _copy(optimizer.state_dict())}
            for model, optimizer in zip(array.members, optimizers, strict=True)
        ]
        self._array, self._step, self._optimizers = None, None, ()
        for model in (array, *array.members):  # steps of one member leave gradients in its own parameters
            model.zero_grad()
        array.to("cpu")
        for optimizer, checkpoint in zip(optimizers, checkpoints, strict=True):
            optimizer.load_state_dict(checkpoint["optimizer"])  # replaces views of the array's state
        del array
        release_cached_memory(device)
        return checkpoints

    def _live_array(self) -> ModelArray:
        if self._array is None:
            raise PackError(f"{self!r} was freed; load its model again to continue with it")
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
    """Move a model to a device, and prepare it for training.

    A plain model becomes an array of one, so that its random numbers do not depend on other members of the pack.
    Dropout and other draws from torch's generators depend on its seed and on the number of the step. The seed is drawn
    from torch's default generator, or set by `load(shoal.fuse([model], seeds=[7]), ...)`. Draws from the generators of
    Python and NumPy use the state of the process.

    The model keeps its class and its weights, which move to the device.

    Args:
        model: Plain model, or array of several by `shoal.fuse`, which take every step together.
        device: Device to train on.
        optimizer: Function that returns the optimizer of a model, called after the model has moved to the device. For
            an array, one function for all models, or one per model.
        loss: Function of a model and a batch that returns the mean loss over the batch, a scalar.
        batch_size: Number of rows of each step.

    Raises:
        PackError: An argument is invalid.
        FusionError: The model cannot be an array, or the optimizer does not train its parameters.
    """
    device = _device(device)
    if not isinstance(model, nn.Module):
        raise PackError(f"`model` must be a torch.nn.Module or what `shoal.fuse` made, got {model!r}")
    batch_size = plain(batch_size)
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise PackError(f"`batch_size` must be a positive integer, got {batch_size!r}")
    if not callable(loss):
        raise PackError(f"`loss` must be a function of a model and a batch that returns a scalar, got {loss!r}")
    models = model.members if isinstance(model, ModelArray) else (model,)
    makers = _makers(optimizer, len(models))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PackError(
            f"{type(model).__name__} has no parameters that require gradients, so there is nothing to train"
        )
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
"""All loaded members. Their models cannot be loaded again, since fusing a model again would take it out of its array.
"""


def _makers(optimizer: MakeOptimizers, count: int) -> list[MakeOptimizer]:
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
    return makers


def _check_not_loaded(models: Sequence[nn.Module]) -> None:
    mine = set(map(id, models))
    for member in _loaded:
        if not member.freed and any(id(model) in mine for model in member.models):
            raise PackError(
                f"the model is loaded already, as {member!r}; free that, or load a model of its own (copy.deepcopy)"
            )


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise PackError(f"`device` must be one that torch can use here, got {device!r}: {reason}") from error
    if found.type == "meta":
        raise PackError("`device` must have memory to train in, got 'meta'")
    return found


def free(member: Loaded) -> list[dict[str, Any]]:
    """Move a model and the state of its optimizer from the device to host memory.

    Args:
        member: Result of `load`. It cannot be used afterwards.

    Returns:
        For each model (one for a plain model), `{"model": ..., "optimizer": ...}`: plain PyTorch state dicts on the
        CPU, which share no memory with other tensors.

    Raises:
        PackError: The member was freed already.
    """
    if not isinstance(member, Loaded):
        raise PackError(f"`free` takes what `load` returned, got {type(member).__name__}")
    return member.release()


def _copy(state: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), state)
