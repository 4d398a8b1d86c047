"""Losses of `save_pretrained`: parts of a trained model that `from_pretrained` does not return."""

import pickletools
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.fuse.container_sync import MANAGED_ATTRIBUTES
from shoal.train.trial_parts import consists_of_atoms

__all__ = ["hooks", "lost_by_adapter", "lost_by_class"]

_LIBRARIES = ("peft", "transformers")
_NOTES = {"gradient_checkpointing", "hf_device_map", "model_tags", "name_or_path", "training", "warnings_issued"}
"""Attributes of `_LIBRARIES` that differ after `from_pretrained`, without an effect on outputs."""


def lost_by_class(model: Any, carried: bytes, folder: Path) -> str:
    """Return what the model that its class reads from a folder lacks of the one that was saved there; "" if nothing.

    Args:
        model: A model with `save_pretrained` and `from_pretrained`.
        carried: Carried state of its checkpoint.
    """
    if _is_of_model(carried):
        return "attributes that training changed"
    name = f"{type(model).__name__}.from_pretrained"
    try:
        with torch.random.fork_rng(devices=[]):
            again = type(model).from_pretrained(str(folder))
    except Exception as error:  # of any class, from user code
        return f"the model: {name} fails with {type(error).__name__}: {error}"
    before, now = model.state_dict(), again.state_dict()
    for key in [*before, *(now.keys() - before.keys())]:
        if key not in before or key not in now or not _is_equal(before[key], now[key]):
            return f"`{key}`, which {name} reads with another value, or not at all"
    modules = dict(again.named_modules())
    for path, module in model.named_modules():
        if path not in modules or _class(modules[path]) != _class(module):
            return f"the {type(module).__name__} at `{path}`"
        own, other = _attributes(module), _attributes(modules[path])
        if changed := [key for key in sorted(own.keys() | other.keys()) if own.get(key) != other.get(key)]:
            return f"`{path}.{changed[0]}`".replace("`.", "`")
    return f"the hook {lost[0]}" if (lost := _missing(hooks(model), hooks(again))) else ""


def lost_by_adapter(model: Any, carried: bytes) -> str:
    """Return what the files of an adapter lack of what was trained; "" if nothing.

    Args:
        model: A `PeftModel`.
        carried: Carried state of its checkpoint.
    """
    from peft import get_peft_model_state_dict

    if _is_of_model(carried):
        return "attributes that training changed"
    if found := hooks(model):
        return f"the hook {found[0]}"
    if not model.active_peft_config.is_prompt_learning:  # else the file holds what is computed from parameters
        held = {value.data_ptr() for value in get_peft_model_state_dict(model).values()}
        for name, value in model.named_parameters():
            if value.requires_grad and value.data_ptr() not in held:
                return f"the trained parameter `{name}`"
    return ""


def hooks(model: nn.Module) -> list[str]:
    """Return the names of hooks on the forward pass of modules, but for those of transformers and peft."""
    found = []
    for module in model.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            function = getattr(hook, "func", hook)  # of a functools.partial
            if function.__module__.partition(".")[0] not in _LIBRARIES:
                found.append(getattr(function, "__qualname__", type(function).__qualname__))
    return found


def _missing(names: list[str], others: list[str]) -> list[str]:
    return [name for name in names if names.count(name) > others.count(name)]


def _class(module: nn.Module) -> tuple[str, str]:
    """Return the name of a module's class, as parametrizations make a class anew for each module."""
    return type(module).__module__, type(module).__qualname__


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the public attributes of a module: their values, or the classes of those that are not plain."""
    own = {name: value for name, value in vars(module).items() if name not in MANAGED_ATTRIBUTES | _NOTES}
    return {
        name: repr(value) if consists_of_atoms(value) else type(value)
        for name, value in own.items()
        if not name.startswith("_")
    }


def _is_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _is_of_model(carried: bytes) -> bool:
    """Whether a carried state names a part of the model."""
    names = (value for _, value, _ in pickletools.genops(carried) if isinstance(value, str)) if carried else ()
    return any(re.match(r"model(\W|$)", name) for name in names)
