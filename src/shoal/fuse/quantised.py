"""Quantised layers of bitsandbytes: one state for each weight, and one call for all members that share the weight.

Nothing here imports bitsandbytes: models have such layers only if it is imported.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.stacked import Stacked, refuse_custom_autograd

__all__ = [
    "call_once",
    "load_scales",
    "prepare_quantised",
    "rounding_of_layers",
    "settings_of",
    "state_names",
    "state_tensors",
    "weight_states",
]


def prepare_quantised(model: nn.Module) -> None:
    """Bring the quantised layers of a model into the state in which they train, whatever ran before.

    The scales of a weight are held by the weight, and its layer refers to the same ones. An evaluation on a CPU no
    longer repacks 4-bit weights for inference, after which training would get no gradients.

    Raises:
        FusionError: A weight is not quantised yet, is repacked for inference, or would be computed in float64.
    """
    for path, layer in _layers(model):
        if isinstance(layer, _class("Linear4bit")):
            _prepare_4bit(f"{path}.weight".lstrip("."), layer, model)
        elif not layer.state.has_fp16_weights:
            _prepare_8bit(f"{path}.weight".lstrip("."), layer)


def weight_states(model: nn.Module) -> list[Any]:
    """The objects of the quantised layers of a model that hold the scales of their weights."""
    return [state for _, layer in _layers(model) for state in _states(layer)]


def state_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors that the quantised layers of a model hold beside their parameters: scales, and codes once more."""
    states = weight_states(model)
    tensors = []
    while states:
        held = list(vars(states.pop()).values())
        tensors += [each for each in held if isinstance(each, Tensor)]
        states += [each for each in held if isinstance(each, _class("QuantState", "functional"))]
    return tensors


def state_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the attributes of a quantised layer that hold what belongs to its weight; none of other modules."""
    return ("quant_state", "state") if isinstance(module, _kinds()) else ()


def rounding_of_layers(model: nn.Module) -> set[torch.dtype]:
    """The dtypes in which quantised layers compute, which may be coarser than those of the model's parameters."""
    found = {getattr(layer, "compute_dtype", torch.float16) for _, layer in _layers(model)}
    return {dtype for dtype in found if dtype is not None}


def settings_of(module: nn.Module) -> str:
    """The numbers of a quantised layer that decide what it computes, and in which members must not differ; else ""."""
    return f" threshold {module.state.threshold!r}" if isinstance(module, _class("Linear8bitLt")) else ""


def load_scales(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the scales of 4-bit weights from a state dict, which `load_state_dict` leaves out."""
    for path, layer in _layers(model):
        if not isinstance(layer, _class("Linear4bit")):
            continue
        begin = f"{path}.weight.".lstrip(".")
        own = {name.removeprefix(begin): value for name, value in saved.items() if name.startswith(begin)}
        now = layer.weight.quant_state.as_dict(packed=True)
        if own and not _same(own, now):
            loaded = _class("QuantState", "functional").from_dict(own, layer.weight.device)
            layer.weight.quant_state = layer.quant_state = loaded


def _same(own: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> bool:
    return own.keys() == now.keys() and all(torch.equal(own[name].to(value), value) for name, value in now.items())


def call_once(template: nn.Module) -> None:
    """Let each quantised layer of an array's template run once with the rows of all members.

    It then has a plain tensor in place of its weight, as tracers know no classes of other libraries.
    """
    for _, layer in _layers(template):
        before = vars(layer).get("forward")
        if before is None or getattr(before, "func", None) is _forward:  # else another library has replaced it
            weight = layer.weight.detach()
            vars(weight).update(vars(layer.weight))
            vars(layer)["forward"] = partial(_forward, layer, weight)


def _forward(layer: Any, weight: Tensor, x: Tensor) -> Tensor:
    held, own = dict(layer._parameters), layer._parameters
    bias = held["bias"]
    own["weight"] = weight
    if isinstance(bias, Stacked):
        own["bias"] = None
    try:
        out = _run(type(layer).forward, layer, x)
    finally:
        own.update(held)
    return out + bias.to(out.dtype) if isinstance(bias, Stacked) else out


def _run(forward: Callable[[Any, Tensor], Tensor], layer: Any, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        if not isinstance(x, Stacked):
            return forward(layer, x)
        refuse_custom_autograd([x])
        whole = x.whole
        if _mixes_rows(layer):
            return Stacked(torch.stack([forward(layer, own) for own in whole.unbind(0)]))
        return Stacked(forward(layer, whole.flatten(0, -2)).view(*whole.shape[:-1], -1))


def _mixes_rows(layer: Any) -> bool:
    """Whether one row of the input changes the results of others: its outliers choose columns for all rows."""
    return isinstance(layer, _class("Linear8bitLt")) and layer.state.threshold > 0


def _prepare_4bit(path: str, layer: Any, model: nn.Module) -> None:
    weight = layer.weight
    state = getattr(weight, "quant_state", None) or layer.quant_state
    if state is None:
        raise _not_quantised(path)
    if getattr(state, "packing_format_for_cpu", False):
        raise FusionError(
            f"{path!r} was repacked for inference by an evaluation, and a training of it would get no gradients; make "
            "the model anew, or set support_avx512bf16_for_cpu = False on its layers before the first evaluation"
        )
    if layer.compute_dtype == torch.float64 or (layer.compute_dtype is None and _has_float64(model)):
        raise FusionError(
            f"{path!r} would be computed in float64, which bitsandbytes does not support and does not refuse; set "
            "bnb_4bit_compute_dtype=torch.float32"
        )
    _restore_class(weight, "Params4bit")
    layer.support_avx512bf16_for_cpu = False
    weight.quant_state = layer.quant_state = state
    if layer.bias is not None and layer.compute_dtype not in (None, layer.bias.dtype):
        layer.bias.data = layer.bias.data.to(layer.compute_dtype)  # as its first call would


def _has_float64(model: nn.Module) -> bool:
    return any(each.dtype == torch.float64 for each in (*model.parameters(), *model.buffers()))


def _prepare_8bit(path: str, layer: Any) -> None:
    weight, state = layer.weight, layer.state
    if weight.dtype != torch.int8:
        raise _not_quantised(path)
    _restore_class(weight, "Int8Params")
    scales = state.SCB if getattr(weight, "SCB", None) is None else weight.SCB
    weight.CB, weight.SCB = None, scales.to(weight.device)
    state.CB, state.SCB = weight.data, weight.SCB


def _restore_class(weight: nn.Parameter, name: str) -> None:
    """Give a weight that was pickled its class again, of which pickle keeps the attributes alone."""
    if type(weight) is nn.Parameter:
        weight.__class__ = _class(name)


def _not_quantised(path: str) -> FusionError:
    return FusionError(
        f"{path!r} is a weight of a quantised layer, and is not quantised yet; move the model to its device first, "
        "which quantises it: model.to(device), also for the CPU"
    )


def _states(layer: Any) -> list[Any]:
    states = (getattr(layer.weight, "quant_state", None), getattr(layer, "quant_state", None), vars(layer).get("state"))
    return [state for state in states if state is not None]


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    kinds = _kinds()
    return ((path, module) for path, module in model.named_modules() if isinstance(module, kinds))


def _kinds() -> tuple[type, ...]:
    return _class("Linear4bit"), _class("Linear8bitLt")


class _Missing:
    """Stands for the classes of bitsandbytes while it is not imported."""


def _class(name: str, module: str = "nn.modules") -> Any:
    return getattr(sys.modules.get(f"bitsandbytes.{module}"), name, _Missing)
