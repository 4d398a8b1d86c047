"""Torch's own functions by name, also where another library has put its own in their place; and their side effects.

Side effects are writes to arguments, and draws of random numbers.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import handle_torch_function

from shoal.fuse.stacked import NeedsMemberError, Stacked

__all__ = [
    "HIDDEN_WRITES",
    "RANDOM_FUNCTIONS",
    "STATISTICS_FUNCTIONS",
    "draws_random",
    "has_overrides",
    "is_replacement",
    "torch_function",
    "updates_statistics",
    "written_arguments",
]

HIDDEN_WRITES = {
    F.embedding,  # with `max_norm`
    F.embedding_bag,
    F.batch_norm,  # running statistics
    F.instance_norm,
    torch.batch_norm,
    torch.instance_norm,
}
"""Functions that write to an argument which they do not return (an embedding table, running statistics)."""

STATISTICS_FUNCTIONS = frozenset({F.batch_norm, F.instance_norm})
_OPERATORS = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
_DUNDERS = {f"__i{name}__" for name in _OPERATORS.split()} | {"__setitem__", "__set__", "__delitem__"}

_NO_POSITION = 1_000
"""Position of `inplace` for functions without such an argument: beyond all arguments."""

_NAMESPACES = (torch, Tensor, F)

_ORIGINALS = {torch: torch._C._VariableFunctions, Tensor: torch._C.TensorBase}
"""Namespace -> where torch keeps the functions that it copies to the namespace."""


def torch_function(namespace: Any, name: str) -> Any:
    """Torch's function of this name in `torch`, `Tensor`, or a module of torch; None if there is none."""
    found = getattr(namespace, name, None)
    return found if has_overrides(found) else getattr(_ORIGINALS.get(namespace), name, None)


def has_overrides(function: Any) -> bool:
    """Whether `__torch_function__` is asked when a function is called, unless it is a Python function without that."""
    if not isinstance(function, FunctionType) or function.__module__.startswith("torch."):
        return True
    return handle_torch_function.__name__ in function.__code__.co_names


def is_replacement(function: Any) -> bool:
    """Whether a function stands in one of torch's namespaces."""
    return any(function is held for namespace in _NAMESPACES for held in vars(namespace).values())


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The arguments that an in-place function changes and returns; custom operators are refused."""
    in_place, switch = _write_traits(func)
    if not in_place and not kwargs and len(args) <= switch:  # the common case
        return ()
    changed = []
    if args and (in_place or (len(args) > switch and args[switch])):
        changed.append(args[0])
    if kwargs:
        if in_place and not args and "tensor" in kwargs:  # the name of the first argument in `torch.nn.init`
            changed.append(kwargs["tensor"])
        if args and not changed and kwargs.get("inplace"):
            changed.append(args[0])
        out = kwargs.get("out")
        if out is not None:
            changed += out if isinstance(out, (tuple, list)) else [out]
    return changed


def updates_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a norm, (input, running mean, running var, weight, bias, training, ...), updates statistics."""
    if func not in STATISTICS_FUNCTIONS:
        return False
    mean = args[1] if len(args) > 1 else kwargs.get("running_mean")
    named = kwargs.get("training", False) or kwargs.get("use_input_stats", False)
    return mean is not None and bool(args[5] if len(args) > 5 else named)


@cache
def _write_traits(func: Any) -> tuple[bool, int]:
    """Whether a function is in-place by its name, and the position of its argument `inplace`."""
    overloads = [func] if isinstance(func, OpOverload) else []
    if isinstance(func, OpOverloadPacket):
        overloads = [getattr(func, name) for name in func.overloads()]  # type: ignore[no-untyped-call]
    if any(one.namespace != "aten" and one._schema.is_mutable for one in overloads):
        raise NeedsMemberError(f"{func} changes its arguments")
    name = getattr(func, "__name__", "")
    code = func.__code__ if isinstance(func, FunctionType) else None
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    switch = names.index("inplace") if "inplace" in names else _NO_POSITION
    return name in _DUNDERS or (name.endswith("_") and not name.endswith("__")), switch


_ALWAYS_RANDOM = (
    "_sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy_ exponential_ fractional_max_pool2d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices geometric_ "
    "gumbel_softmax log_normal_ multinomial normal normal_ poisson rand rand_like randint randint_like randn "
    "randn_like random_ randperm uniform_"
)


def draws_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from torch's default generator; a call with an explicit `generator` does not."""
    when = _CONDITIONS.get(func)
    return when is not None and kwargs.get("generator") is None and when(args, kwargs)


def _rate_and_training(
    rate: int, training: int, names: tuple[str, str] = ("p", "training"), defaults: tuple[float, bool] = (0.5, True)
) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Make the condition "in training, with a rate above 0", from the positions of the rate and of `training`."""

    def when(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        p = args[rate] if len(args) > rate else kwargs.get(names[0], defaults[0])
        active = args[training] if len(args) > training else kwargs.get(names[1], defaults[1])
        return bool(active) and (isinstance(p, Stacked) or p > 0)

    return when


def _training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[3] if len(args) > 3 else kwargs.get("training", False))


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return isinstance(p, Stacked) or p > 0


def _recurrent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """As `_rate_and_training`, for (input, hx, weights, bias, layers, dropout, training, ...) or a packed sequence."""
    first = next(i for i, arg in enumerate(args) if isinstance(arg, bool))
    p, training = args[first + 2], args[first + 3]
    return bool(training) and (isinstance(p, Stacked) or p > 0)


def _make_conditions() -> dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], bool]]:
    table: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {}

    def add(names: str, when: Callable[[tuple[Any, ...], dict[str, Any]], bool], *namespaces: Any) -> None:
        table.update(
            {
                function: when
                for name in names.split()
                for namespace in namespaces
                if (function := torch_function(namespace, name)) is not None
            }
        )

    add(_ALWAYS_RANDOM, lambda args, kwargs: True, torch, Tensor, F)
    dropouts = "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout"
    add(f"{dropouts} feature_alpha_dropout_ native_dropout", _rate_and_training(1, 2, ("p", "train")), torch)
    add("dropout dropout1d dropout2d dropout3d", _rate_and_training(1, 2), F)
    add("alpha_dropout feature_alpha_dropout", _rate_and_training(1, 2, defaults=(0.5, False)), F)
    add("rrelu rrelu_", _training, torch, F)
    add("scaled_dot_product_attention", _attention, F)
    add("multi_head_attention_forward", _rate_and_training(10, 13, ("dropout_p", "training")), F)
    add("lstm gru rnn_tanh rnn_relu", _recurrent, torch)
    return table


_CONDITIONS = _make_conditions()
RANDOM_FUNCTIONS = frozenset(_CONDITIONS)
