"""Partial fusion: `UnfusedModule` stands for a submodule in which the members differ, and runs it member by member."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shoal.core.errors import FusionError
from shoal.fuse.aliasing import share_memory
from shoal.fuse.autotune import fastest
from shoal.fuse.constants import constant
from shoal.fuse.frozen import is_shared, unshare
from shoal.fuse.guard import refuse_user_access
from shoal.fuse.intercept import member_run
from shoal.fuse.randomness import active_source
from shoal.fuse.rules.linear import batched_linear, shared_input_linear
from shoal.fuse.stacked import (
    NeedsMemberError,
    Ragged,
    SharedWriteError,
    Stacked,
    member_values,
    refuse_custom_autograd,
    stack,
)
from shoal.fuse.torch_functions import HIDDEN_WRITES, written_arguments

__all__ = [
    "PaddedLinear",
    "UnfusedModule",
    "insert_unfused_modules",
    "modules_of",
    "unfused_parameters",
    "unfused_tensor_places",
]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


_ALIGNED_BYTES = 16
"""Bytes of which `grouped_mm` needs all strides and groups to be multiples."""


class PaddedLinear:
    """Runs `nn.Linear` layers of different sizes as one batched product, padded with zeros that add nothing to it.

    `fastest` chooses by measurement between the padded product, a loop, and a grouped product, which pads to 16 bytes.
    """

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self._modules = modules
        self._outputs = [module.out_features for module in modules]
        self._inputs = [module.in_features for module in modules]
        self._narrow = len(set(self._inputs)) == 1  # the outputs differ in size
        self._sizes = self._outputs if self._narrow else self._inputs
        rows = torch.arange(len(modules) * max(self._sizes)).view(len(modules), -1)
        own = [each[:size] for each, size in zip(rows, self._sizes, strict=True)]
        self._rows = torch.cat(own).to(modules[0].weight.device)
        self._lowerings: dict[str, Callable[..., Tensor]] = {"padded": self._padded_product, "loop": self._loop}

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> "PaddedLinear | None":
        """A padded layer for plain `nn.Linear`s without bias that differ in one size; None for other modules."""
        linear: list[Any] = [module for module in modules if type(module) is nn.Linear and module.bias is None]
        sizes = [{module.in_features for module in linear}, {module.out_features for module in linear}]
        return cls(linear) if len(linear) == len(modules) and 1 in map(len, sizes) else None

    def __call__(self, x: Any) -> Any:
        """Results for x [..., F], stacked or `Ragged`; NotImplemented if the members' own layers must run."""
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
            out = fastest("padded linear", self._lowerings_for(flat), (flat, *weights), bool(batch_axes))
            out = out.view(len(weights), *data.shape[batch_axes:-1], max(self._outputs))
        return Stacked(out) if len(set(self._outputs)) == 1 else Ragged.of_padded(out, self._outputs)

    def _padded_product(self, x: Tensor, *weights: Tensor) -> Tensor:
        """The padded product: x, [B, N, F] or [N, F] -> [B, N, O]."""
        if self._rows.device != x.device:  # the array has been moved
            self._rows = self._rows.to(x.device)
        rows = torch.cat([weight if self._narrow else weight.t() for weight in weights])
        members, size = len(weights), max(self._sizes)
        padded = rows.new_zeros(members * size, rows.shape[1]).index_copy(0, self._rows, rows).view(members, size, -1)
        if not self._narrow:
            return torch.bmm(x, padded)
        return batched_linear(x, padded, None) if x.dim() == 3 else shared_input_linear(x, padded, None).contiguous()

    def _lowerings_for(self, x: Tensor) -> dict[str, Callable[..., Tensor]]:
        """The lowerings for an input: grouped products are not for autocast and traces.

        On a GPU only bfloat16 has a kernel for all groups, on Hopper and Blackwell; elsewhere the host waits and loops.
        """
        kind = x.device.type
        if kind == "cpu":
            known = x.dtype in (torch.float32, torch.bfloat16)
        else:
            known = x.dtype == torch.bfloat16 and kind == "cuda" and torch.version.cuda is not None
            known = known and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
        starts = x.storage_offset(), self._inputs[0] if self._narrow else self._outputs[0]
        if not known or len(set(self._sizes)) == 1 or any(at * x.element_size() % _ALIGNED_BYTES for at in starts):
            return self._lowerings
        plain = not torch.is_autocast_enabled(kind) and _get_current_dispatch_mode() is None
        return {**self._lowerings, "grouped": self._grouped_product} if plain else self._lowerings

    def _grouped_product(self, x: Tensor, *weights: Tensor) -> Tensor:
        """As `_padded_product`, by products of the members' own sizes, each rounded up to 16 bytes."""
        sizes, aligned = self._sizes, _ALIGNED_BYTES // x.element_size()
        rounded = [size + -size % aligned for size in sizes]
        ends = constant(list(accumulate(rounded)), torch.int32, x.device)
        rows = [weight if self._narrow else weight.t() for weight in weights]
        joined = torch.cat([F.pad(row, (0, 0, 0, more - len(row))) for row, more in zip(rows, rounded, strict=True)])
        if self._narrow:
            x = x.contiguous()
            out = F.linear(x, joined) if x.dim() == 2 else F.grouped_mm(x, joined.t(), offs=ends)
            parts = zip(torch.split(out, rounded, 1), sizes, strict=True)
            return torch.stack([F.pad(part[:, :size], (0, max(sizes) - size)) for part, size in parts])
        own = zip(x.unbind(0), sizes, rounded, strict=True)
        columns = torch.cat([F.pad(one[:, :size], (0, more - size)) for one, size, more in own], 1)
        out = F.grouped_mm(columns, joined, offs=ends)
        if out.requires_grad:  # it takes no gradient of one number, expanded, as that of a sum
            out.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        return out

    def _loop(self, x: Tensor, *weights: Tensor) -> Tensor:
        inputs = x.unbind(0) if x.dim() == 3 else [x] * len(weights)
        rows = [F.linear(own[:, : weight.shape[1]], weight) for own, weight in zip(inputs, weights, strict=True)]
        return torch.stack([F.pad(row, (0, max(self._outputs) - row.shape[1])) for row in rows])


class UnfusedModule(nn.Module):
    """Module in the template of an array that stands for a submodule in which the members differ.

    A call runs each member's module with that member's part of the arguments, and stacks the results, or makes them
    `Ragged` if they differ in shape. Reading an attribute reads it from all members' modules, and stacks tensors."""

    member_modules: tuple[nn.Module, ...]
    _linear: PaddedLinear | None

    def __init__(self, path: str, own: Sequence[nn.Module]) -> None:
        super().__init__()
        self.__dict__["path"] = path
        self.__dict__["member_modules"] = tuple(own)  # not submodules: they belong to the members
        self.__dict__["_linear"] = PaddedLinear.of(own)
        self.training = own[0].training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call each member's module, or all at once if they are linear layers of different sizes."""
        if self._linear is not None and len(args) == 1 and not kwargs and active_source() is not None:
            result = self._linear(args[0])
            if result is not NotImplemented:
                return result
        return _call_each_member(self.path, [module.__call__ for module in self.member_modules], args, kwargs)

    def train(self, mode: bool = True) -> "UnfusedModule":
        """Set the members' modules to training or evaluation mode."""
        self.training = mode
        for module in self.member_modules:
            module.train(mode)
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` checks besides the type; refused to user code while the array runs."""
        refuse_user_access(f"it reads the class of {self.path!r}", sys._getframe(1))
        return UnfusedModule

    def _refuse(self, what: str) -> None:
        """Refuse an operation that would see this module instead of the members' modules."""
        source = active_source()
        if source is not None and not source.single_member:
            raise NeedsMemberError(f"{what} of {self.path!r}, in which the members differ")

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Find submodules, and so parameters and buffers; refused while the array runs."""
        self._refuse("it looks through modules or parameters")
        found: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Find direct submodules; refused while the array runs."""
        self._refuse("it looks through modules")
        return super().named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> "UnfusedModule":
        """Call a function with each submodule; refused while the array runs."""
        self._refuse("it applies a function to modules")
        return super().apply(fn)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Collect parameters and buffers; refused while the array runs."""
        self._refuse("it reads the state")
        return super().state_dict(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training":
            self._refuse(f"it sets the attribute {name!r}")
        super().__setattr__(name, value)

    def __iter__(self) -> Iterator[Any]:
        self._refuse("it iterates over the parts")
        raise TypeError("submodules in which members differ cannot be iterated")

    def __getitem__(self, index: Any) -> Any:
        self._refuse(f"it reads part {index!r}")
        raise TypeError("submodules in which members differ cannot be indexed")

    def __len__(self) -> int:
        self._refuse("it reads the length")
        raise TypeError("submodules in which members differ have no length")

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        missing = [b for b, module in enumerate(self.member_modules) if not hasattr(module, name)]
        if len(missing) == len(self.member_modules):
            raise AttributeError(
                f"{type(self.member_modules[0]).__name__!r} at {self.path!r} has no attribute {name!r}"
            )
        if missing:
            raise NeedsMemberError(f"it reads {self.path}.{name}, which members {missing} do not have")
        values = [getattr(module, name) for module in self.member_modules]
        if all(isinstance(value, nn.Module) for value in values):
            return UnfusedModule(f"{self.path}.{name}", values)
        if all(callable(value) for value in values):
            return lambda *args, **kwargs: _call_each_member(self.path, values, args, kwargs)
        return stack(values, uneven=Ragged)


def _dispatch_ragged(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function member by member on `Ragged` tensors; in-place functions and views of them are refused."""
    name = str(getattr(func, "__name__", func))
    if func in _OF_AUTOGRAD:
        raise NeedsMemberError(f"{name} needs the gradient of tensors whose shapes differ between members")
    if written_arguments(func, args, kwargs) or func in HIDDEN_WRITES:
        raise NeedsMemberError(f"{name} changes tensors whose shapes differ between members")
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
    first = next(leaf for leaf in given if isinstance(leaf, Ragged))
    views: list[bool] = []

    def run(*own_args: Any, **own_kwargs: Any) -> Any:
        value = func(*own_args, **own_kwargs)
        views.append(_shares_memory(value, (own_args, own_kwargs)))
        return value

    result = _call_each_member(name, [run] * len(first.rows), args, kwargs)
    mixed = not all(isinstance(leaf, Ragged) for leaf in given)
    if any(views) and (mixed or any(type(leaf) is Stacked for leaf in pytree.tree_leaves(result))):
        raise NeedsMemberError(f"{name} returns a view of tensors whose shapes differ between members")
    return result


_OF_AUTOGRAD = {torch.autograd.grad, torch.autograd.backward, Tensor.retain_grad, Tensor.grad.__get__}  # type: ignore[union-attr]
"""Functions that depend on the identity of a tensor, and cannot run on the members' copies of ragged tensors."""

Ragged.dispatch = staticmethod(_dispatch_ragged)


def _call_each_member(
    path: str, calls: Sequence[Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call each member's function with that member's part of the arguments and that member's random numbers."""
    source = active_source()
    if source is None:
        raise FusionError(
            f"{path!r}, in which the members differ, is called outside of a run of its array, as by a hook in the "
            "backward pass; call it within the function that the array runs, or train such models alone"
        )
    with torch._C.DisableTorchFunction():
        refuse_custom_autograd([*args, *kwargs.values()])
    results, drawn = [], []
    given = {
        id(leaf): _MemberArgument(leaf, len(calls)) for leaf in pytree.tree_leaves((args, kwargs)) if _is_tensor(leaf)
    }
    for b, call in enumerate(calls):
        mine = {key: one.copy(b) for key, one in given.items()}
        own_args, own_kwargs = pytree.tree_map_only(Tensor, partial(_copy_for_member, mine), (args, kwargs))
        with member_run(source.of_member(b)) as own:
            results.append(call(*own_args, **own_kwargs))
        drawn.append(own.calls)
        for key, one in given.items():
            one.record_write(b, mine[key], path)
    for one in given.values():
        one.write_back()
    source.resume_after(drawn)
    return stack(results, uneven=Ragged)


class _MemberArgument:
    """A tensor argument of which each member gets a copy to write to; autograd treats writes to slices as one."""

    def __init__(self, value: Tensor, members: int) -> None:
        self._value = value
        self._parts = list(member_values(value, members))
        self._written: dict[int, Tensor] = {}

    def copy(self, b: int) -> Any:
        part = self._parts[b]
        return part.clone() if isinstance(part, Tensor) else part

    def record_write(self, b: int, copy: Any, path: str) -> None:
        if not isinstance(copy, Tensor) or not _changed(copy, self._parts[b]):
            return
        if not isinstance(self._value, Stacked):
            raise SharedWriteError(path, self._value)
        self._written[b] = copy

    def write_back(self) -> None:
        if self._written and isinstance(self._value, Stacked):
            self._value.whole.copy_(torch.stack([self._written.get(b, part) for b, part in enumerate(self._parts)]))


def _copy_for_member(copies: dict[int, Any], value: Tensor) -> Any:
    return copies[id(value)]


def _changed(copy: Tensor, original: Tensor) -> bool:
    """Whether a copy was written to; in inference mode torch has no version counters, so values are compared."""
    return not torch.equal(copy, original) if copy.is_inference() else copy._version > 0


def insert_unfused_modules(
    template: nn.Module, members: Sequence[nn.Module], paths: Iterable[str]
) -> list[UnfusedModule]:
    """Replace submodules of a template by `UnfusedModule`s, one for all paths of the same modules; return each once."""
    parts: dict[tuple[int, ...], UnfusedModule] = {}
    for path in paths:
        own = [member.get_submodule(path) for member in members]
        part = parts.setdefault(tuple(map(id, own)), UnfusedModule(path, own))
        template.set_submodule(path, part)
    for _, _, parameter in unfused_parameters(parts.values()):
        if is_shared(parameter):
            unshare(parameter)
    return list(parts.values())


def unfused_parameters(parts: Iterable[UnfusedModule]) -> Iterator[tuple[str, int, nn.Parameter]]:
    """Yield every parameter of the members' modules once, with its path and its member."""
    seen: set[int] = set()
    for part in parts:
        for b, module in enumerate(part.member_modules):
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{part.path}.{name}", b, parameter


def _shares_memory(value: Any, given: Any) -> bool:
    theirs = [leaf for leaf in pytree.tree_leaves(given) if _is_tensor(leaf)]
    return any(share_memory(leaf, its) for leaf in pytree.tree_leaves(value) if _is_tensor(leaf) for its in theirs)


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules of a model once each, also while its array runs; an `UnfusedModule` is one module."""
    met: dict[int, nn.Module] = {}
    to_do = [model]
    while to_do:
        module = to_do.pop()
        if id(module) not in met:
            met[id(module)] = module
            to_do += [child for child in module._modules.values() if child is not None]
    return iter(met.values())


def unfused_tensor_places(parts: Iterable[UnfusedModule]) -> dict[Tensor, list[tuple[dict[str, Any], str]]]:
    """Find every parameter and buffer of the members' modules, with the dicts and names that refer to it."""
    places: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
    modules = {id(module): module for part in parts for own in part.member_modules for module in own.modules()}
    for module in modules.values():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(tensor, []).append((held, name))
    return places


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)
