"""Pickling of users' objects for the journal and for other processes."""

import functools
import hashlib
import importlib
import inspect
import io
import os
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from shoal.core.errors import ShoalError
from shoal.host.sources import is_importable

__all__ = ["dumped", "loaded", "original_or_loaded", "register_original", "why_not_loaded"]

_originals: dict[bytes, object] = {}
"""Digest of the bytes -> the object that this process pickled to them. Objects stay alive as long as the process."""


def dumped(value: object, what: str, error_class: type[ShoalError], remedy: str) -> bytes:
    """Pickle a user's object; an error begins with `what`, names the part that cannot be pickled, ends by `remedy`."""
    try:
        content = _pickled(value)
    except Exception as error:  # any error of methods of its parts
        raise error_class(f"{what} ({_unpicklable_part(value)}{error}); {remedy}") from error
    if name := _name_in_script(content):
        raise error_class(
            f"{what} ({name!r} can be pickled by its name only, and is in the script, which no other process has as a "
            "module); define it in a module on sys.path"
        )
    return content


def _pickled(value: object) -> bytes:
    with io.BytesIO() as file:
        pickler = _Pickler(file)
        try:
            pickler.dump(value)
        finally:
            pickler.forget_modules()
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value, beside what cloudpickle does, what no other process can import.

    These are the definitions of modules that were loaded by their path or made by hand, and functions of such a module
    or of a script that are decorated with `functools.cache` or `lru_cache`. Modules of a class of their own, such as
    `torch.backends.cudnn`, are pickled by name, as cloudpickle does others.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._modules: dict[str, bool] = {}
        """Name of a module -> whether it is pickled by value because of this pickler."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            if type(value) is not ModuleType and sys.modules.get(value.__name__) is value:
                return importlib.import_module, (value.__name__,)
            self._judge(value.__name__)
        elif isinstance(value, (type, FunctionType)):
            self._judge(value.__module__)
        elif isinstance(value, _CachedFunction):
            self._judge(value.__module__)
            if not self._is_by_name(value):
                return _cached, (value.__wrapped__, *value.cache_parameters().values())
        return super().reducer_override(value)

    def forget_modules(self) -> None:
        """Let other picklers pickle modules as before."""
        for name, by_value in self._modules.items():
            if by_value:
                cloudpickle.unregister_pickle_by_value(sys.modules[name])

    def _judge(self, name: object) -> None:
        """Find out whether the definitions of a module are pickled by value; a class may have anything as its name."""
        if not isinstance(name, str) or name in self._modules:
            return
        module = sys.modules.get(name)
        by_value = isinstance(module, ModuleType) and module.__name__ == name and not is_importable(name)
        self._modules[name] = by_value and name not in cloudpickle.list_registry_pickle_by_value()
        if self._modules[name]:
            cloudpickle.register_pickle_by_value(module)

    def _is_by_name(self, value: Any) -> bool:
        """Return whether a cached function is found by its name in a module that another process can import."""
        if value.__module__ in cloudpickle.list_registry_pickle_by_value() or not is_importable(value.__module__):
            return False
        try:
            return attrgetter(value.__qualname__)(sys.modules[value.__module__]) is value
        except AttributeError:
            return False


_CachedFunction = type(functools.cache(dumped))


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Callable[..., Any]:
    return functools.lru_cache(maxsize, typed)(function)


def _name_in_script(content: bytes) -> str:
    """Return a name in a pickle that is to be looked up in `__main__`; "" if there is none."""
    if b"__main__" not in content:
        return ""
    texts: list[Any] = []  # those on the stack last, None for other values
    memo: list[Any] = []
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STACK_GLOBAL" and texts[-2] == "__main__":
            return str(texts[-1])
        if opcode.name == "MEMOIZE":
            memo.append(texts[-1])
            continue
        pushed: Any = argument
        if opcode.name in ("BINGET", "LONG_BINGET"):
            pushed = memo[pushed]
        texts = [texts[-1] if texts else None, pushed]
    return ""


os.register_at_fork(after_in_child=_originals.clear)  # a forked worker loads the bytes


def register_original(content: bytes, value: object) -> None:
    """Register the object that this process has pickled to these bytes, for `original_or_loaded`."""
    _originals[_digest(content)] = value


def original_or_loaded(content: bytes) -> Any:
    """Return the original object, if this process pickled it and it has not changed since; else the result of `loaded`.

    So the caller of `tune` keeps its own classes, globals and breakpoints in code that runs in its process. The object
    has changed if a new pickle differs from `content`: an attribute, a class or function of `__main__`, or a global
    that these read is then another.
    """
    value = _originals.get(_digest(content))
    return value if value is not None and _is_pickled_to(value, content) else loaded(content)


def loaded(content: bytes) -> Any:
    """Return a new object from these bytes. Its classes are new, too, if they were pickled by value.

    cloudpickle alone would reuse a class of `__main__` that this process defines or has loaded before, and overwrite
    the methods of that class.
    """
    return _Unpickler(io.BytesIO(content)).load()


def why_not_loaded(error: BaseException) -> str:
    """Return the error of `loaded` in a line, with the remedy."""
    if isinstance(error, (ImportError, AttributeError)):
        return f"{error}; define it in a module on sys.path or in the script itself"
    return f"{type(error).__name__}: {error}; correct its module"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _without_class_id(found) if (module, name) in _CLASS_MAKERS else found


_CLASS_MAKERS = {("cloudpickle.cloudpickle", f"_make_skeleton_{kind}") for kind in ("class", "enum")}


def _without_class_id(make: Callable[..., type]) -> Callable[..., type]:
    """Return a class maker of cloudpickle without the id by which it finds classes made before."""

    def made(*arguments: Any) -> type:
        *others, _, extra = arguments
        return make(*others, None, extra)

    return made


def _is_pickled_to(value: object, content: bytes) -> bool:
    try:
        return _pickled(value) == content
    except Exception:  # it now holds something that cannot be pickled; the study continues with what it was
        return False


def _unpicklable_part(value: object) -> str:
    """Return the part of a value that cannot be pickled, as the beginning of a sentence; "" if unknown."""
    for what, part in _parts(value):
        if not _can_be_pickled(part):
            lock = ", a functools.cached_property, which holds a lock before Python 3.12"
            return f"{what}{lock if isinstance(part, functools.cached_property) else ''}: "
    return ""


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield parts pickled with a value, by name: its attributes, those of its classes, and what their functions use."""
    for name, part in getattr(value, "__dict__", {}).items():
        yield f"its attribute {name!r}", part
    functions = [(each, each.__qualname__) for each in _functions(value)]
    for cls in type(value).__mro__:
        if _can_be_pickled(cls):  # by name or by value
            continue
        for name, part in vars(cls).items():
            if found := _functions(part):
                functions += [(each, f"the method {name!r} of its class {cls.__qualname__}") for each in found]
            elif not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl":  # it is not pickled
                yield f"the attribute {name!r} of its class {cls.__qualname__}", part
    visited: set[FunctionType] = set()
    while functions:
        function, who = functions.pop(0)
        if function in visited or _can_be_pickled(function):
            continue
        visited.add(function)
        used = inspect.getclosurevars(function)
        defaults = {
            name: each.default
            for name, each in inspect.signature(function, follow_wrapped=False).parameters.items()
            if each.default is not each.empty
        }
        for how, parts in (("uses", used.globals), ("closes over", used.nonlocals), ("has as a default", defaults)):
            for name, part in parts.items():
                if found := _functions(part):
                    functions += [(each, f"{each.__qualname__} (of {who})") for each in found]
                elif not isinstance(part, type):
                    yield f"{name!r}, which {who} {how}", part


def _functions(value: object) -> list[FunctionType]:
    """Return the functions of a value: itself, or those of a property, class method or static method."""
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset, value.fdel) if isinstance(part, FunctionType)]
    inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return [inner] if isinstance(inner, FunctionType) else []


def _can_be_pickled(value: object) -> bool:
    try:
        _pickled(value)
    except Exception:  # any error of its own methods; `dumped` reports the cause
        return False
    return True


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content).digest()
