"""What tracers do not notice, so that a captured step would do it once and for all."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.overrides import TorchFunctionMode

from shoal.core.errors import FusionError
from shoal.fuse.slots import own_memory
from shoal.fuse.stacked import Stacked

__all__ = ["TraceGuard", "hooked", "refuse_hooks"]

_VALUES = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_NODE = Tensor.grad_fn.__get__  # type: ignore[union-attr]


def hooked(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> bool:
    """Whether autograd calls user code in the backward pass.

    Args:
        modules: a model's.
        parameters: an array's; those that are stacked have a hook of the array's own.
    """
    if all_modules._global_backward_hooks or all_modules._global_backward_pre_hooks:
        return True
    return any(module._backward_hooks or module._backward_pre_hooks for module in modules) or any(
        any(hook is not own_memory for hook in (parameter._backward_hooks or {}).values())
        or parameter._post_accumulate_grad_hooks
        for parameter in parameters
    )


def refuse_hooks(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> None:
    """Refuse to trace what is `hooked`.

    Raises:
        FusionError: it is.
    """
    if hooked(modules, parameters):
        raise _frozen_hook()


class TraceGuard(TorchFunctionMode):
    """Refuses, in user code and in the rules, to make a constant of a tensor's values, or to hook on to autograd."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch function of the step comes through here."""
        if func in _VALUES:
            raise FusionError(f"it takes values out of a tensor by `{func.__name__}`")
        if func in _HOOKS:
            raise _frozen_hook()
        result = func(*args, **(kwargs or {}))
        if func == _NODE and result is not None and not isinstance(args[0], Stacked):
            raise _frozen_hook()  # of a node; the engine itself asks for that of what is stacked
        return result


def _frozen_hook() -> FusionError:
    return FusionError(
        "the step has a hook in the backward pass, which a trace would call once and for all; remove the hook"
    )
