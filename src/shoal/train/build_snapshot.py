"""Snapshot of a trial as it was built, compared after copies of it have trained."""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from shoal.fuse.frozen import is_shared, large_frozen
from shoal.fuse.rows import storage_address
from shoal.fuse.transaction import Transaction
from shoal.train.trial_runtime import TrialRuntime, optimizers_in

__all__ = ["BuildSnapshot"]


class BuildSnapshot:
    """Snapshot of what steps of copies of a trial may change in the trial itself.

    Copies share functions, such as hooks, and the variables that these close over; some copies share frozen parameters.
    """

    def __init__(self, runtime: TrialRuntime) -> None:
        self._runtime = runtime
        self._before = self._fingerprint()
        lent = [each for each in large_frozen(runtime.model) if not is_shared(each)]
        self._sums = [(each, _sum(each)) for each in lent if each.layout is torch.strided]
        owners = (*runtime.model.modules(), *optimizers_in(runtime.optimizer))
        held: list[Any] = [leaf for each in owners for leaf in pytree.tree_leaves(getattr(each, "__dict__", {}))]
        held = [leaf for leaf in held if not isinstance(leaf, (Tensor, nn.Module))]
        held += [vars(leaf) for leaf in held if isinstance(leaf, FunctionType)]
        self._shared = Transaction(functions=held, left_out=[runtime.model])

    def changed(self) -> bool:
        """Return whether anything has changed since the snapshot."""
        if self._shared.changed() is not None or self._fingerprint() != self._before:
            return True
        return any(_sum(each) != before for each, before in self._sums)

    def _fingerprint(self) -> object:
        model, carried = self._runtime.model, self._runtime.carried
        tensors = [each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each)]
        attributes = {} if carried is None else carried.attributes()
        return (
            [(0 if one.is_inference() else one._version, storage_address(one), one.requires_grad) for one in tensors],
            {place: value for place, value in attributes.items() if place[0].startswith(("model", "optimizer"))},
        )


def _sum(tensor: Tensor) -> float:
    """Sum of a frozen parameter, which also changes with writes by `.data`, such as a momentum encoder's."""
    return float(tensor.detach().sum(dtype=torch.float64))
