"""Models on a device, ready for training in a pack: the primitives `load` and `free` (Pack, section 3)."""

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
"""Function of a model and a batch that returns a scalar."""

MakeOptimizer = Callable[[nn.Module], Optimizer]
"""Function of a model that returns an optimizer of its parameters."""

MakeOptimizers = MakeOptimizer | list[MakeOptimizer] | tuple[MakeOptimizer, ...]
"""One function for all models of an array, or one for each."""


@final
class Loaded:
    """A model, or an array of several, on a device with its optimizer. `load` returns it, and a `Pack` trains it.

    Args:
        array: Models.
        optimizers: Optimizer of each model.
        loss: Loss function as for `load`.
        batch_size: Rows of a step.
    """

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
        return self._check_there()

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models, always up to date."""
        return self.array.members

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizer of each model, for LR schedulers."""
        self._check_there()
        return self._optimizers

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return next(self.array.parameters()).device

    @property
    def freed(self) -> bool:
        """Whether the member was freed."""
        return self._array is None

    @property
    def settled(self) -> bool:
        """Whether the search for the fastest kind of step is over."""
        return self._step is None or self._step.way is not None

    def step(self, batch: Any) -> Tensor:
        """Train on one batch; returns the losses, [B], detached."""
        self.array.check_present()
        assert self._step is not None
        return self._step(batch)

    def release(self) -> list[dict[str, Any]]:
        """See `free`."""
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
    """Bring a model to a device, ready for training.

    A plain model becomes an array of one, so that its random numbers do not depend on other members of the pack.
    Dropout and draws from torch's generators follow its seed and the number of the step. The seed comes from torch's
    default generator, or from `load(shoal.fuse([model], seeds=[7]), ...)`. Draws of a loss from Python's or NumPy's
    generators come from those of the process.

    The model keeps its class and its weights, which are on the device from now on.

    Args:
        model: A plain model, or an array of several by `shoal.fuse`, which take every step together.
        device: Device to train on.
        optimizer: Function that makes the model's optimizer, called once the model is on the device. For an array it
            is called with each model, or there is one function for each.
        loss: Function of a model and a batch that returns the mean loss over the batch, a scalar.
        batch_size: Rows of each step.

    Raises:
        PackError: An argument is invalid.
        FusionError: The model cannot be an array, or the optimizer does not train its parameters.
    """
    device = _device(device)
    if not isinstance(model, nn.Module):
        raise PackError(f"`model` must be a torch.nn.Module or what `shoal.fuse` made, got {model!r}")
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
"""All loaded members. Their models cannot be loaded again: a model that is fused anew would leave its array."""


def _makers(optimizer: MakeOptimizers, count: int) -> list[MakeOptimizer]:
    """The function that makes the optimizer of each of `count` models."""
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
    """Check and convert a device."""
    try:
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise PackError(f"`device` must be one that torch can use here, got {device!r}: {reason}") from error
    if found.type == "meta":
        raise PackError("`device` must have memory to train in, got 'meta'")
    return found


def free(member: Loaded) -> list[dict[str, Any]]:
    """Take a model off its device. Its tensors, and those of its optimizer, move to host memory.

    Args:
        member: Result of `load`, which cannot be used any more.

    Returns:
        For each model (one for a plain model), `{"model": ..., "optimizer": ...}`: state dicts of plain PyTorch on the
        CPU, which share no memory with others.

    Raises:
        PackError: The member was freed already.
    """
    if not isinstance(member, Loaded):
        raise PackError(f"`free` takes what `load` returned, got {type(member).__name__}")
    return member.release()


def _copy(state: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().clone(), state)
