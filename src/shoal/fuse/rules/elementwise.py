"""Functions of one element at a time: they run on all members' data as they are."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = ["RULES", "align", "raise_rank"]

_UNARY = """
    abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos
    tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit erf erfc erfinv lgamma digamma floor ceil round
    trunc frac isnan isinf isfinite isposinf isneginf logical_not bitwise_not nan_to_num relu relu6 leaky_relu elu selu
    celu gelu silu mish hardtanh hardsigmoid hardswish softplus softsign softshrink hardshrink tanhshrink logsigmoid
    threshold clone detach contiguous clamp clamp_min clamp_max clip float double half bfloat16 int long bool byte short
    to cpu cuda type_as zero fill zeros_like ones_like full_like empty_like
""".split()

_NARY = """
    add sub subtract mul multiply div divide true_divide floor_divide pow float_power fmod remainder maximum minimum
    fmax fmin atan2 arctan2 hypot copysign eq ne lt le gt ge not_equal less less_equal greater greater_equal isclose
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where masked_fill lerp addcmul addcdiv rsub
    xlogy heaviside nextafter ldexp logaddexp
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__
    __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__
    __neg__ __pos__ __abs__ __invert__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __ipow__ __iand__ __ior__
    __ixor__ __imod__ copy_ masked_fill_
""".split()


def align(values: tuple[Any, ...]) -> list[Any] | None:
    """Data of all members, with axes put in after B so that members' shapes broadcast from the right, as torch's do.

    Returns:
        The arguments with every stacked tensor replaced by a plain one, or None where members' own type promotion
        (a 0-dimensional tensor gives way) would differ from that of the data.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    rank = max(value.dim() for value in tensors)
    if len({value.dtype for value in tensors}) > 1 and any(v.dim() == 0 and isinstance(v, Stacked) for v in tensors):
        return None
    return [raise_rank(value, rank) if isinstance(value, Stacked) else value for value in values]


def raise_rank(value: Stacked, rank: int) -> Tensor:
    """Data of all members as if each had `rank` axes, ones put in front of its own."""
    data, missing = value.all, rank - value.dim()
    return data.view(len(data), *[1] * missing, *data.shape[1:]) if missing else data


def _changes_shared(func: Any, first: Any) -> bool:
    name = func.__name__
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith("__i"))
    return in_place and not isinstance(first, Stacked)


def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function of one element, its tensors positional, to the data of all members."""
    if any(isinstance(value, (Tensor, list, tuple)) for value in kwargs.values()):
        return NotImplemented
    if any(isinstance(value, (list, tuple)) for value in args):
        return NotImplemented
    if _changes_shared(func, args[0]):
        raise NeedsMemberError(f"{func.__name__} changes a tensor that all members share")
    data = align(args)
    if data is None:
        return NotImplemented
    result = func(*data, **kwargs)
    return args[0] if result is data[0] and isinstance(args[0], Stacked) else Stacked(result)


def _same_element(func: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(value, Stacked) for value in (*args[1:], *kwargs.values())):
        return NotImplemented
    result = func(args[0].all, *args[1:], **kwargs)
    return args[0] if result is args[0].all else Stacked(result)


def _make() -> dict[Any, Any]:
    rules: dict[Any, Any] = {}
    for names, rule in ((_NARY, elementwise), (_UNARY, _same_element)):
        for name in names:
            for variant in (name, name + "_"):
                for home in (torch, Tensor, F):
                    func = getattr(home, variant, None)
                    if func is not None:
                        rules[func] = rule
    return rules


RULES = _make()
