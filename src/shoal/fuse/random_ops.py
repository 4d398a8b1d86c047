"""Which torch functions draw random numbers, and for which arguments."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.stacked import Stacked

__all__ = ["DRAWING", "draws"]

_ALWAYS = (
    "_sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy_ exponential_ fractional_max_pool2d "
    "fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices geometric_ "
    "gumbel_softmax log_normal_ multinomial normal normal_ poisson rand rand_like randint randint_like randn "
    "randn_like random_ randperm uniform_"
)


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does this call take numbers from torch's default generator? One with a generator of its own does not."""
    when = _DRAWS.get(func)
    return when is not None and kwargs.get("generator") is None and when(args, kwargs)


def _rate_and_training(
    rate: int, training: int, names: tuple[str, str] = ("p", "training"), defaults: tuple[float, bool] = (0.5, True)
) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Draws when training at a rate above 0; where the two stand among the arguments."""

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
    """(input, hx, weights, bias, layers, dropout, training, ...), or one place later for packed sequences."""
    first = next(i for i, arg in enumerate(args) if isinstance(arg, bool))
    p, training = args[first + 2], args[first + 3]
    return bool(training) and (isinstance(p, Stacked) or p > 0)


def _make() -> dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], bool]]:
    table: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {}

    def add(names: str, when: Callable[[tuple[Any, ...], dict[str, Any]], bool], *homes: Any) -> None:
        table.update({getattr(home, name): when for name in names.split() for home in homes if hasattr(home, name)})

    add(_ALWAYS, lambda args, kwargs: True, torch, Tensor, F)
    dropouts = "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout"
    add(f"{dropouts} feature_alpha_dropout_ native_dropout", _rate_and_training(1, 2, ("p", "train")), torch)
    add("dropout dropout1d dropout2d dropout3d", _rate_and_training(1, 2), F)
    add("alpha_dropout feature_alpha_dropout", _rate_and_training(1, 2, defaults=(0.5, False)), F)
    add("rrelu rrelu_", _training, torch, F)
    add("scaled_dot_product_attention", _attention, F)
    add("multi_head_attention_forward", _rate_and_training(10, 13, ("dropout_p", "training")), F)
    add("lstm gru rnn_tanh rnn_relu", _recurrent, torch)
    return table


_DRAWS = _make()

DRAWING = frozenset(_DRAWS)
"""Functions that may draw."""
