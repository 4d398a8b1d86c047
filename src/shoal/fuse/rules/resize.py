"""Changes of a tensor's own size, which the view that user code holds cannot follow."""

from typing import Any

from torch import Tensor

from shoal.fuse.stacked import NeedsMemberError

__all__ = ["RULES"]


def _refuse(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise NeedsMemberError(f"{func.__name__} changes the size of one member's tensor")


RULES: dict[Any, Any] = {Tensor.resize_: _refuse, Tensor.resize_as_: _refuse}
