"""What a loss has to return: one number for each member, from which one can go backward."""

from typing import Any

from torch import Tensor

from shoal.core.errors import FusionError

__all__ = ["one", "one_for_each"]


def one(returned: Any) -> Tensor:
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


def one_for_each(returned: Any, members: int) -> Tensor:
    """The members' losses, [B], out of a tensor of one element for each.

    Raises:
        FusionError: as `one`.
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
