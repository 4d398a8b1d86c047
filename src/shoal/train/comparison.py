"""Comparison of a member of an array with its plain copy: tensors by norm, attributes value by value."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf, isclose, isnan
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.fuse.array import ModelArray
from shoal.fuse.container_sync import MODULE_ATTRIBUTES
from shoal.fuse.generators import GENERATOR_STATES, same_state
from shoal.fuse.quantised import rounding_of_layers, state_names
from shoal.fuse.rows import is_packed
from shoal.train.trial_runtime import TrialRuntime, optimizers_in

__all__ = [
    "EPSILON",
    "TOLERANCE",
    "Comparison",
    "TensorKey",
    "compute_dtype",
    "counts_samples",
    "first_difference",
    "is_same_memory",
    "tensors_of",
]

Kind = Literal["loss", "gradient", "parameter", "buffer", "optimizer state", "metric"]
TensorKey = tuple[Kind, str]
"""Kind and name of a tensor, such as ("gradient", "block.0.weight")."""

EPSILON = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Rounding units."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Relative difference of a tensor, or a loss, that needs no measurement of how rounding changes it."""

_TF32 = torch.float16
"""Dtype that rounds as TF32 does."""

_FLOOR = 64
"""Rounding units of the norm of all tensors of a kind that a tensor may always be off by."""

_LARGE = 1000
"""Largest size of a container in an attribute whose entries are compared."""

_PLAIN = (bool, int, str, bytes, type(None), Enum)


@dataclass(frozen=True)
class Comparison:
    """Norms of tensors of a plain copy, of a member's, and of their differences."""

    norms: Mapping[TensorKey, tuple[float, float, float]]
    """Key -> norms of the member's tensor, of the copy's, and of the difference."""

    @classmethod
    def of(cls, got: Mapping[TensorKey, Tensor | None], want: Mapping[TensorKey, Tensor | None]) -> "Comparison":
        """Compare tensors by key. A tensor that is None or absent counts as zero; memory in common is left out."""
        keys = [key for key in {**want, **got} if not is_same_memory(got.get(key), want.get(key))]
        pairs = [_alike(got.get(key), want.get(key)) for key in keys]
        norms = {key: (inf, inf, inf) for key, pair in zip(keys, pairs, strict=True) if pair is None}
        keys = [key for key in keys if key not in norms]
        if keys:
            theirs, ours = zip(*(pair for pair in pairs if pair is not None), strict=True)
            columns = (theirs, ours, torch._foreach_sub(theirs, ours))
            table = torch.stack([torch.stack([x.double() for x in torch._foreach_norm(c)]) for c in columns]).T
            norms |= {key: tuple(row) for key, row in zip(keys, table.tolist(), strict=True)}
        return cls({key: norms[key] for key in {**want, **got} if key in norms})

    def change(self) -> float:
        """Return by how much the loss, or if that is less all gradients together, differ, relative to their norms.

        A loss may be a sum of terms that cancel, so its own size says little.
        """
        totals = self._totals()
        found = [totals[kind] for kind in ("loss", "gradient") if kind in totals and any(totals[kind])]
        return min((off / norm if norm else inf for norm, off in found), default=0.0)

    def largest(self, noise: Collection[TensorKey]) -> float:
        """Return the largest relative difference of all tensors of a kind together, without those in `noise`."""
        return max((off / norm if norm else off for norm, off in self._totals(noise).values()), default=0.0)

    def _totals(self, left_out: Collection[TensorKey] = ()) -> dict[str, tuple[float, float]]:
        """Norms of all tensors of a kind, and of their differences; each entry of optimizers is a kind of its own."""
        squares: dict[str, list[float]] = {}
        for key, (_, want, off) in ((key, norms) for key, norms in self.norms.items() if key not in left_out):
            total = squares.setdefault(_total_of(key), [0.0, 0.0])
            total[0] += want**2
            total[1] += off**2
        return {kind: (norm**0.5, off**0.5) for kind, (norm, off) in squares.items()}

    def beyond(self, dtype: torch.dtype, noise: Mapping[TensorKey, float]) -> TensorKey | None:
        """Return the first tensor that is off by more than rounding in `dtype` explains, or None.

        Args:
            noise: Norms of differences that rounding explains, where they were measured.
        """
        totals = self._totals()
        for key, (_, want, off) in self.norms.items():
            # An update is small beside its parameter; statistics of a batch are not beside theirs.
            tolerance = TOLERANCE[dtype] / 10 if key[0] == "parameter" else TOLERANCE[dtype]
            if key[0] in ("loss", "metric"):  # which may be zero but for rounding of terms that cancel
                floor = min(EPSILON[dtype], EPSILON[torch.float32])
            elif key[0] == "buffer":  # of any sizes
                floor = EPSILON[dtype] ** 2
            else:
                floor = _FLOOR * EPSILON[dtype] * totals[_total_of(key)][0] + EPSILON[dtype] ** 2
            if not off <= max(tolerance * want, noise.get(key, 0.0)) + floor:
                return key
        return None

    def describe(self, key: TensorKey) -> str:
        """Return what differs, with both values."""
        kind, name = key
        got, want, off = self.norms[key]
        if kind in ("loss", "metric"):
            what = f"{kind}{name and f' {name!r}'}"
            return f"{what} has size {got:.6g} in the array, and {want:.6g} alone; they differ by {off:.2g}"
        what = f"{kind} of `{name}`"
        if isnan(off) or off == inf:
            return f"{what} in the array and alone differ in shape, or one is not finite"
        if f"{got:.2g}" != f"{want:.2g}":
            return f"{what} has norm {got:.3g} in the array, and {want:.3g} alone"
        return f"{what} in the array differs from that alone by {off:.2g}, of norm {want:.3g}"


def _total_of(key: TensorKey) -> str:
    """Name of the total to which a tensor belongs."""
    kind, name = key
    return f"{kind}: {name.rpartition(': ')[2]}" if kind == "optimizer state" else kind


def counts_samples(difference: float, size: int) -> bool:
    """Whether a difference is that of one sample or two, of so many, also in percent."""
    return any(isclose(difference * size, samples, rel_tol=1e-3) for samples in (1, 2, 100, 200))


def is_same_memory(got: Tensor | None, want: Tensor | None) -> bool:
    """Whether two tensors are one, as a large frozen parameter that a copy uses as well."""
    if got is want:
        return True
    strided = got is not None and want is not None and got.layout is want.layout is torch.strided
    return strided and 0 != got.data_ptr() == want.data_ptr()  # type: ignore[union-attr]


def _alike(got: Tensor | None, want: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return two tensors, one of which may be None, as dense real ones of one dtype; None if their shapes differ."""
    present = [_real(each) for each in (got, want) if each is not None]
    if len(present) == 1:
        there, zero = present[0], torch.zeros_like(present[0])
        return (zero, there) if got is None else (there, zero)
    mine, theirs = present
    if mine.shape != theirs.shape:
        return None
    mine = mine.to(theirs.device, torch.promote_types(mine.dtype, theirs.dtype))
    theirs = theirs.to(mine.dtype)
    # equal infinities and NaNs are no difference
    finite = mine.isfinite() & theirs.isfinite()
    if not finite.all():
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        mine = torch.where(finite, mine, torch.where(same, 0.0, torch.nan))
        theirs = torch.where(finite, theirs, 0.0)
    return mine, theirs


def _real(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    if dense.is_quantized:
        dense = dense.dequantize()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    exact = not dense.is_floating_point()
    return dense.double() if exact else (dense.float() if dense.element_size() < 4 else dense)


def compute_dtype(runtime: TrialRuntime, loss: Tensor | None = None) -> torch.dtype:
    """Return the dtype whose rounding bounds that of a training step with this loss, if it is known."""
    precision = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(runtime.settings.precision)
    held = [each for each in runtime.model.parameters() if not is_packed(each)]
    found = {each.dtype for each in (*held, loss) if each is not None} | rounding_of_layers(runtime.model)
    found &= EPSILON.keys()
    if precision is not None:
        found.add(precision)
    coarse = runtime.device.type == "cuda" and (
        torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    )
    if coarse and torch.float32 in found:
        found.add(_TF32)
    return max(found or {torch.get_default_dtype()}, key=EPSILON.__getitem__)


def tensors_of(runtime: TrialRuntime, b: int = 0, array: ModelArray | None = None) -> dict[TensorKey, Tensor | None]:
    """Return gradients, parameters, buffers and optimizer state of a trial.

    Args:
        b: Index of the trial in the array.
        array: Array that holds the gradients; None if the trial's parameters hold their own.
    """
    model = runtime.model
    named = dict(model.named_parameters())
    stacked = {} if array is None else {id(own[b]): data for _, data, own in array.stacked_tensors()}
    found: dict[TensorKey, Tensor | None] = {}
    for name, each in named.items():
        found["gradient", name] = _gradient(each, b, stacked.get(id(each)))
    found |= {("parameter", name): each for name, each in named.items()}
    found |= {("buffer", name): each for name, each in model.named_buffers()}
    names = {id(each): name for name, each in named.items()}
    for i, optimizer in enumerate(optimizers_in(runtime.optimizer)):
        for parameter, state in getattr(optimizer, "state", {}).items():
            name = names.get(id(parameter), "a tensor that is not the model's")
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    found["optimizer state", f"{name}: {key}{f' of optimizer {i}' if i else ''}"] = value
    return found


def _gradient(parameter: Tensor, b: int, stacked: Tensor | None) -> Tensor | None:
    if stacked is None:
        return parameter.grad
    return None if stacked.grad is None else stacked.grad[b]


def first_difference(got: Any, want: Any, tolerance: float, path: str = "") -> str | None:
    """Compare values that are nested in any way, and the attributes of modules; describe the first difference, or None.

    Parameters, buffers and functions are left out, and so are containers of more than `_LARGE` entries.
    """
    return next(_differences(got, want, tolerance, path, set()), None)


def _differences(got: Any, want: Any, tolerance: float, path: str, seen: set[int]) -> Iterator[str]:
    if got is want or id(want) in seen:
        return
    if isinstance(want, (*_PLAIN, float, complex, np.generic)):
        if type(got) is not type(want) or not _close(got, want, tolerance):
            yield f"`{path}` is {_shown(got)} in the array, and {_shown(want)} alone"
        return
    seen.add(id(want))
    if isinstance(want, nn.Module):
        if isinstance(got, nn.Module):
            yield from _entries(_user_attributes(got), _user_attributes(want), tolerance, path, seen, ".")
            for name, child in want.named_children():
                yield from _differences(getattr(got, name, None), child, tolerance, _joined(path, name), seen)
        return
    if isinstance(got, Tensor) and isinstance(want, Tensor):  # one of them may be a row in place of a parameter
        if not _tensors_close(got, want, tolerance):
            yield f"the tensor `{path}` has other values in the array than alone"
    elif type(got) is not type(want):
        if not callable(want):
            yield f"`{path}` is {_shown(got)} in the array, and {_shown(want)} alone"
    elif isinstance(want, np.ndarray):
        if not (got.shape == want.shape and got.dtype == want.dtype and _arrays_close(got, want, tolerance)):
            yield f"the array `{path}` has other values in the array of models than alone"
    elif isinstance(want, dict):
        yield from _entries(got, want, tolerance, path, seen, "[")
    elif isinstance(want, (list, tuple, deque)):
        yield from _entries(dict(enumerate(got)), dict(enumerate(want)), tolerance, path, seen, "[")
    elif isinstance(want, (set, frozenset)):
        if all(isinstance(each, _PLAIN) for each in want) and got != want:
            yield f"`{path}` is {_shown(got)} in the array, and {_shown(want)} alone"
    elif type(want) in GENERATOR_STATES:
        read, _ = GENERATOR_STATES[type(want)]
        if not same_state(read(got), read(want)):
            yield f"the random generator `{path}` has drawn other numbers in the array than alone"
    elif isinstance(getattr(want, "__dict__", None), dict) and not isinstance(want, (type, ModuleType)):
        yield from _entries(_own_attributes(got), _own_attributes(want), tolerance, path, seen, ".")


def _entries(
    got: Mapping[Any, Any], want: Mapping[Any, Any], tolerance: float, path: str, seen: set[int], sign: str
) -> Iterator[str]:
    if max(len(got), len(want)) > _LARGE:
        return
    hashable = [key for key in want if isinstance(key, (*_PLAIN, float, tuple))]
    if len(got) != len(want) or any(key not in got for key in hashable):
        odd = [*(key for key in want if key not in got), *(key for key in got if key not in want)]
        yield f"`{path}` has {len(got)} entries in the array and {len(want)} alone ({', '.join(map(_shown, odd[:3]))})"
        return
    for key in hashable:
        below = _joined(path, key) if sign == "." else f"{path}[{key!r}]"
        yield from _differences(got[key], want[key], tolerance, below, seen)


def _joined(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _user_attributes(module: nn.Module) -> dict[str, Any]:
    left_out = MODULE_ATTRIBUTES.union(state_names(module))
    return {name: value for name, value in vars(module).items() if name not in left_out}


def _own_attributes(of: object) -> dict[str, Any]:
    """Attributes of an object; of an optimizer without what torch keeps there for itself and for its schedulers."""
    if not isinstance(of, Optimizer):
        return vars(of)
    return {name: value for name, value in vars(of).items() if name != "step" and not name.startswith("_")}


def _close(got: Any, want: Any, tolerance: float) -> bool:
    if isinstance(want, (float, np.floating)):
        return isclose(got, want, rel_tol=tolerance, abs_tol=tolerance**1.5) or (isnan(got) and isnan(want))
    return bool(got == want)


def _tensors_close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    pair = _alike(got, want) if got.dtype == want.dtype else None
    return pair is not None and bool((pair[0] - pair[1]).norm() <= tolerance * pair[1].norm() + tolerance**1.5)


def _arrays_close(got: Any, want: Any, tolerance: float) -> bool:
    if want.dtype.kind not in "fc":
        return bool(np.array_equal(got, want))
    return bool(np.allclose(got, want, rtol=tolerance, atol=tolerance**1.5, equal_nan=True))


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (*_PLAIN, float, complex)) else f"a {type(value).__name__}"
    return text if len(text) < 60 else f"{text[:57]}..."
