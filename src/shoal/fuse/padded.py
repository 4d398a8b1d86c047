"""Padded linear layers: members' layers of different sizes as one batched product, for adapters of different ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.fuse.autotune import fastest
from shoal.fuse.rules.linear import batched_linear, shared_input_linear
from shoal.fuse.stacked import Ragged, Stacked

__all__ = ["PaddedLinear"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class PaddedLinear:
    """Runs the members' `nn.Linear` layers, which differ in `in_features` or `out_features`, as one batched product.

    Weights are padded with zeros to one shape. Zeros add nothing to a product, so a member's result equals the result
    of its own layer, up to rounding. `fastest` chooses by measurement between the padded product and a loop.

    Args:
        modules: Layers of the members, without bias.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self._modules = modules
        self._outputs = [module.out_features for module in modules]
        self._inputs = [module.in_features for module in modules]
        outputs, inputs = max(self._outputs), max(self._inputs)
        grid = torch.arange(len(modules) * outputs * inputs).view(len(modules), outputs, inputs)
        sizes = zip(grid, self._outputs, self._inputs, strict=True)
        indices = [own[:o, :i].reshape(-1) for own, o, i in sizes]
        self._shape = grid.shape
        self._lowerings: dict[str, Callable[..., Tensor]] = {"padded": self._padded_product, "loop": self._loop}
        self._weight_index = torch.cat(indices).to(modules[0].weight.device)

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "PaddedLinear | None":
        """A padded layer for these modules; None if one is not a plain `nn.Linear` without bias."""
        plain = all(type(module) is nn.Linear and module.bias is None for module in modules)
        return cls([module for module in modules if isinstance(module, nn.Linear)]) if plain else None

    def __call__(self, x: Any) -> Any:
        """The members' results, stacked, or `Ragged` if they differ in size.

        Args:
            x: Input [..., F]: shared, stacked, or a `Ragged` result of another `PaddedLinear`.

        Returns:
            The results, or NotImplemented if the members' own layers must run.
        """
        weights = [module.weight for module in self._modules]
        if any(getattr(module, name) for module in self._modules for name in _HOOKS) or x.dim() < 2:
            return NotImplemented
        if isinstance(x, Ragged):
            if x.padded is None or list(x.sizes) != self._inputs:
                return NotImplemented
            data = x.padded
        elif len({x.shape[-1], *self._inputs}) > 1:
            return NotImplemented
        else:
            data = x.whole if isinstance(x, Stacked) else x
        with torch._C.DisableTorchFunction():  # fusion rules run without overrides, too
            batch_axes = int(isinstance(x, Stacked))  # 1 if there is a leading axis B, else 0
            flat = data.flatten(batch_axes, -2)
            out = fastest("padded linear", self._lowerings, (flat, *weights), bool(batch_axes))
            out = out.view(len(weights), *data.shape[batch_axes:-1], self._shape[1])
        return Stacked(out) if len(set(self._outputs)) == 1 else Ragged.of_padded(out, self._outputs)

    def _padded_product(self, x: Tensor, *weights: Tensor) -> Tensor:
        """The padded product: x, [B, N, F] or [N, F] -> [B, N, O]."""
        if self._weight_index.device != x.device:  # the array has been moved
            self._weight_index = self._weight_index.to(x.device)
        flat = torch.cat([weight.reshape(-1) for weight in weights])
        padded = flat.new_zeros(self._shape.numel()).index_copy(0, self._weight_index, flat).view(self._shape)
        if x.dim() == 3:
            return batched_linear(x, padded, None)
        return shared_input_linear(x, padded, None).contiguous()

    def _loop(self, x: Tensor, *weights: Tensor) -> Tensor:
        inputs = x.unbind(0) if x.dim() == 3 else [x] * len(weights)
        rows = [F.linear(own[:, : weight.shape[1]], weight) for own, weight in zip(inputs, weights, strict=True)]
        return torch.stack([F.pad(row, (0, self._shape[1] - row.shape[1])) for row in rows])
