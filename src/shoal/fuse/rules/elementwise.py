"""Rules for elementwise functions: they run once on the stacked data of all members, with axes aligned to broadcast."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.base import Layout, Rule, functions_named, stacked_data
from shoal.fuse.stacked import Stacked, member_count

__all__ = ["RULES", "align", "elementwise", "like", "raise_rank"]

_UNARY = """
    abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos
    tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv lgamma digamma floor ceil round
    trunc frac isnan isinf isfinite isposinf isneginf logical_not bitwise_not nan_to_num relu relu6 leaky_relu elu selu
    celu gelu silu mish hardtanh hardsigmoid hardswish softplus softsign softshrink hardshrink tanhshrink logsigmoid
    threshold clone float double half bfloat16 int long bool byte short
    cpu cuda zero fill __neg__ __pos__ __abs__ __invert__
"""

_LIKE = "type_as zeros_like ones_like full_like empty_like"

_NARY = """
    add sub subtract mul multiply div divide true_divide floor_divide pow float_power fmod remainder maximum minimum
    fmax fmin atan2 arctan2 hypot copysign eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor masked_fill lerp addcmul addcdiv rsub
    xlogy heaviside nextafter ldexp logaddexp copy_ clamp_min clamp_max
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__
    __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__
    __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __iand__ __ior__ __ixor__ __imod__
"""


def align(values: tuple[Any, ...]) -> list[Any] | None:
    """Insert axes after B in the data of all members, so that the members' shapes broadcast from the right as in torch.

    None if torch would promote dtypes differently for one member, because a 0-dimensional tensor has a lower priority.
    """
    rank = 0
    dtypes = set()
    scalar = number = False
    for value in values:
        if isinstance(value, Tensor):
            rank = max(rank, value.dim())
            if isinstance(value, Stacked) and value.floats is not None:
                number = True
                continue
            dtypes.add(value.dtype)
            scalar = scalar or (isinstance(value, Stacked) and value.dim() == 0)
    if scalar and len(dtypes) > 1:
        return None
    like = _with_float(values) if number else None
    return [_raised(value, rank, like) if isinstance(value, Stacked) else value for value in values]


def _with_float(values: tuple[Any, ...]) -> Tensor:
    """An empty tensor with the dtype and device of a Python float that is combined with the other arguments."""
    tensors = [v for v in values if isinstance(v, Tensor) and not (isinstance(v, Stacked) and v.floats is not None)]
    dtype = torch.get_default_dtype()
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            dtype = torch.result_type(torch.empty(0, dtype=tensor.dtype), 1.0)
    return torch.empty(0, dtype=dtype, device=tensors[0].device if tensors else None)


def _raised(value: Stacked, rank: int, like: Tensor | None) -> Tensor:
    data = raise_rank(value, rank)
    if value.floats is None or like is None:
        return data
    return value.floats_like(like).view(data.shape)


def raise_rank(value: Stacked, rank: int) -> Tensor:
    """Data of all members, with axes of size one inserted after B so that a member has `rank` axes."""
    data = value.whole
    missing = rank - data.dim() + 1
    return data.view(len(data), *[1] * missing, *data.shape[1:]) if missing else data


def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an elementwise function, with its tensors as positional arguments, to the data of all members."""
    for value in kwargs.values() if kwargs else ():
        if isinstance(value, Tensor):
            return NotImplemented
    data = _data_of_equal_rank(args)
    if data is None:
        data = align(args)
        if data is None:
            return NotImplemented
    result = func(*data, **kwargs)
    if result is NotImplemented:  # from an operator's method, which takes at most two arguments
        return NotImplemented
    return args[0] if result is data[0] else Stacked(result)


def _data_of_equal_rank(args: tuple[Any, ...]) -> list[Any] | None:
    """The data if no alignment is needed: stacked tensors have one rank, and shared ones no higher rank; else None."""
    data = []
    rank = shared = 0
    for value in args:
        if isinstance(value, Stacked):
            tensor = value.whole
            if rank not in (0, tensor.dim()):
                return None
            rank = tensor.dim()
            data.append(tensor)
        else:
            if isinstance(value, Tensor) and value.dim() > shared:
                shared = value.dim()
            data.append(value)
    return data if rank > 1 and shared < rank else None


def _unary(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Stacked):
            return NotImplemented
    if not isinstance(x, Stacked):
        return NotImplemented
    kwargs.pop("memory_format", None)
    result = func(x.whole, *args, **kwargs)
    return x if result is x.whole else Stacked(result)


def _clamp(func: Any, x: Any, min: Any = None, max: Any = None) -> Any:
    """Run `clamp`, whose limits are numbers or tensors; autograd requires two tensor limits to have equal shapes."""
    aligned = align((x, min, max))
    if aligned is None:
        return NotImplemented
    data, low, high = aligned
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        low, high = torch.broadcast_tensors(low, high)  # type: ignore[no-untyped-call]
    result = func(data, low, high)
    return x if result is data else Stacked(result)


def _prelu(func: Any, input: Any, weight: Any) -> Any:
    """Run `prelu`: x if positive, else w·x, with w [1] or [C] along axis 1; vmap's rule is wrong for a shared x."""
    members = member_count((input, weight)) or 1
    data = stacked_data(input, members)
    slopes = weight.whole if isinstance(weight, Stacked) else weight.unsqueeze(0)
    if weight.numel() not in (1, input.shape[1] if input.dim() > 1 else 1):
        return NotImplemented
    lead, trail = min(input.dim(), 1), max(input.dim() - 2, 0)
    shape = (len(slopes), *[1] * lead, *([weight.numel()] if input.dim() > 1 else []), *[1] * trail)
    return Stacked(torch._prelu_kernel(data, slopes.reshape(shape)))


def like(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Apply a function that reads only the dtype and device of its second tensor."""
    kwargs.pop("memory_format", None)
    plain = [value.whole if isinstance(value, Stacked) else value for value in args]
    if not isinstance(x, Stacked):
        return func(x, *plain, **kwargs)
    result = func(x.whole, *plain, **kwargs)
    return x if result is x.whole else Stacked(result)


def _with_in_place(names: str) -> str:
    return " ".join(f"{name} {name}_" for name in names.split())


_NAMESPACES = (torch, Tensor, F)
RULES = (
    Rule.direct(
        _clamp, *functions_named(_with_in_place("clamp clip"), *_NAMESPACES), output_layout=Layout.CHANNEL_MAJOR
    ),
    Rule.direct(elementwise, *functions_named(_with_in_place(_NARY), *_NAMESPACES), output_layout=Layout.CHANNEL_MAJOR),
    Rule.direct(
        _unary, *functions_named(_with_in_place(_UNARY) + " detach", *_NAMESPACES), output_layout=Layout.CHANNEL_MAJOR
    ),
    Rule.direct(_prelu, *functions_named("prelu", *_NAMESPACES), output_layout=Layout.CHANNEL_MAJOR),
    Rule.direct(like, *functions_named(_LIKE, *_NAMESPACES), output_layout=Layout.CHANNEL_MAJOR),
)
