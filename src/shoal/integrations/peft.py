"""Adapters of `peft` in trained models."""

from typing import Any

from torch import nn

from shoal.core.errors import ShoalError
from shoal.integrations.optional import check_installed

__all__ = ["adapted_model", "merged_model"]


def merged_model(model: nn.Module) -> nn.Module:
    """Return a model with its adapter merged into the weights of the base, by `peft.PeftModel.merge_and_unload`.

    Args:
        model: A `PeftModel`, or a module that holds exactly one, in whose place the base is; it is changed.

    Raises:
        ShoalError: `peft` is not installed, the model holds no `PeftModel` or several, or its kind of adapter cannot be
            merged.
    """
    found = adapted_model(model)
    if not callable(merge := getattr(found, "merge_and_unload", None)):
        raise ShoalError(f"an adapter of {type(found.active_peft_config).__name__} cannot be merged; export it alone")
    places = [path for path, module in model.named_modules() if module is found]
    merged: nn.Module = merge()
    if found is model:
        return merged
    for path in places:
        model.set_submodule(path, merged)
    return model


def adapted_model(model: nn.Module) -> Any:
    """Return the `PeftModel` that a model is or holds.

    Raises:
        ShoalError: `peft` is not installed, or the model holds no `PeftModel` or several.
    """
    check_installed("peft", "the export of an adapter")
    from peft import PeftModel

    found: list[Any] = [module for module in model.modules() if isinstance(module, PeftModel)]
    if len(found) != 1:
        raise ShoalError(
            f"the model, a {type(model).__name__}, holds {len(found) or 'no'} PeftModel, but an adapter is exported of "
            "a model that holds one: return what `get_peft_model` returned from `model`"
        )
    return found[0]
