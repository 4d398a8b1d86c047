"""Keeps containers and objects in attributes of models (a dict of masks, a meter, a hidden state) equal in all ways.

A run of all members at once changes those of the template; a run of a member changes its own. `push` gives each member
its own copy of what the template's have become, with its rows of stacked tensors; `pull` joins what members have made.
"""

import copy
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.aliasing import lazy_clone
from shoal.fuse.guard import is_guarded
from shoal.fuse.stacked import Stacked

__all__ = ["MANAGED_ATTRIBUTES", "MODULE_ATTRIBUTES", "ContainerSync", "contents_of", "same_contents"]

_CONTAINERS = (list, tuple, dict, set, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_FOREIGN = (nn.Module, nn.Parameter, Optimizer)
_DEPTH = 8
_LARGE = 1000
"""Largest number of entries of a container that are compared one by one; of a larger one, their identities."""
_MOST_CHANGING = 256
"""Largest number of leaves and their versions in a container that changes: to copy more takes longer than a step."""
_SEARCHES = 3
"""Runs after which only containers are compared that a run has changed before, until `push` is to search again."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every `nn.Module`, which torch manages itself."""

MANAGED_ATTRIBUTES = MODULE_ATTRIBUTES | {"_flat_weights", "_flat_weight_refs"}
"""The same, and lists that recurrent layers keep of their parameters."""

_VERSION = object()
"""Key of a tensor's version."""

_Place = tuple[int, Any]
"""The index of a module, and the name of its attribute."""

_Contents = list[tuple[Any, Any]]
"""Keys of leaves at any depth, and the leaves; a version follows a tensor."""


class ContainerSync:
    """Synchronises containers and objects in attributes between the template and the members.

    Args:
        left_out: `id` of a container and key of each value that is left out, such as those with a slot.
    """

    def __init__(
        self,
        template: Sequence[nn.Module],
        members: Sequence[Sequence[nn.Module]],
        left_out: Collection[tuple[int, Any]],
    ) -> None:
        self._template, self._members = template, members
        self._left_out = left_out
        self._runs = 0
        self._found = {place: contents_of(value) for place, value in self._values(template)}
        """Place -> contents of the template's value when it was equal to those of members."""
        self._first = {place: contents_of(value) for place, value in self._values(members[0])}
        """Place -> contents of the first member's value then."""
        self._shared = [_shared(modules) for modules in (template, members[0])]
        self._carried: dict[_Place, list[_Contents | None]] = {}
        """Place that a run has changed -> contents of the members' values then."""
        self._same: dict[_Place, list[_Entries]] = {}
        """Place that a run has changed -> entries of the members' values when they were last compared."""

    def _values(self, modules: Sequence[nn.Module]) -> Iterator[tuple[_Place, Any]]:
        seen: set[int] = set()
        for i, module in enumerate(modules):
            for name, value in vars(module).items():
                held = _is_held(value) or isinstance(value, np.ndarray)
                if name in MANAGED_ATTRIBUTES or not held or id(value) in seen:
                    continue
                if (id(vars(module)), name) not in self._left_out:
                    seen.add(id(value))
                    yield (i, name), value

    def push(self, search: bool) -> None:
        """Give the members what a run has changed in the template's containers, or, with `search`, any earlier run.

        Raises:
            FusionError: What an earlier run has changed cannot be given to them any more.
        """
        self._runs += not search
        if search or self._runs <= _SEARCHES:
            self._check_shared()
        for place, value in self._candidates(search):
            contents = contents_of(value)
            before = self._found.get(place)
            if contents is None and place in self._carried:
                raise FusionError(
                    f"{place[1]!r} of a model has come to hold what an array cannot give to its members (a module, an "
                    f"optimizer, containers {_DEPTH} deep); keep less in it, or keep it in buffers"
                )
            if contents is None or (before is not None and same_contents(contents, before)):
                continue
            if len(contents_of(value, whole=True) or ()) > _MOST_CHANGING:
                raise FusionError(
                    f"{place[1]!r} of a model changes and holds more than {_MOST_CHANGING // 2} entries, which each "
                    "member would have to be given; keep less in it, or keep it in buffers"
                )
            self._check_shared()
            for b, modules in enumerate(self._members):
                _update(vars(modules[place[0]]), place[1], value, before, b)
            self._found[place] = contents
            self._carried[place] = self._contents_of_members(place)
            self._first[place] = self._carried[place][0]

    def pull(self, search: bool) -> bool:
        """Join what the last runs of members, or, with `search`, any, have changed; return whether there was anything.

        Raises:
            FusionError: The members' values cannot be joined.
        """
        if search:
            self._check_shared()
        for place, value in self._values(self._members[0]) if search else ():
            own, known = contents_of(value), self._first.get(place)
            if place not in self._carried and own and not (known and same_contents(own, known)):
                self._carried[place] = [None] * len(self._members)
        changed = False
        for place, before in self._carried.items():
            if place in self._same and all(entries.are_same() for entries in self._same[place]):
                continue
            now = self._contents_of_members(place)
            if all(a is not None and b is not None and same_contents(a, b) for a, b in zip(now, before, strict=True)):
                self._same[place] = [_Entries(vars(modules[place[0]]), place[1]) for modules in self._members]
                continue
            self._same.pop(place, None)
            self._check_shared()
            i, name = place
            try:
                joined = _joined([vars(modules[i]).get(name) for modules in self._members])
            except _DifferError:
                raise FusionError(f"the members now differ in {name!r}; fuse them again") from None
            _replace(vars(self._template[i]), name, joined)
            self._found[place], self._carried[place] = contents_of(vars(self._template[i])[name]) or [], now
            self._first[place] = now[0]
            changed = True
        return changed

    def _check_shared(self) -> None:
        """Refuse attributes that have become one container or have ceased to be one: each would be changed in place."""
        now = [_shared(modules) for modules in (self._template, self._members[0])]
        if now != self._shared:
            odd = {place for a, b in zip(now, self._shared, strict=True) for places in a ^ b for place in places}
            names = ", ".join(f"`{name}`" for name in sorted({str(name) for _, name in odd}))
            raise FusionError(
                f"attributes {names} of a model have become one container, or are no longer one; keep a container of "
                "its own in each, as by `copy`"
            )

    def _candidates(self, search: bool) -> list[tuple[_Place, Any]]:
        """The template's values that a run may have changed: after the first runs only those that one has changed."""
        if search or self._runs <= _SEARCHES:
            return list(self._values(self._template))
        held = [vars(module) for module in self._template]
        return [((i, name), held[i][name]) for i, name in self._carried if name in held[i]]

    def _contents_of_members(self, place: _Place) -> list[_Contents | None]:
        return [contents_of(vars(modules[place[0]]).get(place[1])) for modules in self._members]


def _shared(modules: Sequence[nn.Module]) -> set[tuple[_Place, ...]]:
    """Sets of attributes that are one container, array or object."""
    found: dict[int, list[_Place]] = {}
    for i, module in enumerate(modules):
        for name, value in vars(module).items():
            held = _is_held(value) or isinstance(value, np.ndarray)
            if held and not isinstance(value, tuple) and name not in MANAGED_ATTRIBUTES:
                found.setdefault(id(value), []).append((i, name))
    return {tuple(places) for places in found.values() if len(places) > 1}


def _is_held(value: Any) -> bool:
    """Whether a value is a container, or an object that is no more than its attributes."""
    if isinstance(value, _CONTAINERS):
        return True
    opaque = isinstance(value, (*_PLAIN, Tensor, nn.Module, Optimizer, type, *_FUNCTIONS))
    return not opaque and isinstance(getattr(value, "__dict__", None), dict)


class _Entries:
    """The objects within an attribute's value, at any depth: compared by identity, as in every step, that is fast."""

    def __init__(self, attributes: dict[str, Any], name: str) -> None:
        self._attributes, self._name, self._value = attributes, name, attributes.get(name)
        self._held: list[tuple[Any, dict[Any, Any] | list[Any], tuple[Any, ...], tuple[Any, ...]]] = []
        """An object, or None, its dict, or a dict or list, the keys, and the values."""
        self._versions: list[tuple[Tensor, int]] = []
        self._known = True
        to_do = [self._value]
        while to_do:
            value = to_do.pop()
            if isinstance(value, tuple):
                to_do += value
            elif isinstance(value, list):
                self._held.append((None, value, (), tuple(value)))
                to_do += value
            elif isinstance(value, Tensor) and not value.is_inference():
                self._versions.append((value, value._version))
            elif _is_held(value) and not isinstance(value, (set, deque)):
                own = value if isinstance(value, dict) else _dict_of(value)
                self._held.append((None if own is value else value, own, tuple(own), tuple(own.values())))
                to_do += own.values()
            elif isinstance(value, (Tensor, np.ndarray, set, deque)):
                self._known = False  # only its contents show a change

    def are_same(self) -> bool:
        """Whether all are the same objects now; False if that cannot be told."""
        return (
            self._known
            and self._attributes.get(self._name) is self._value
            and all(_holds_same(*held) for held in self._held)
            and all(tensor._version == version for tensor, version in self._versions)
        )


def _dict_of(value: Any) -> dict[Any, Any]:
    """The dict of an object, whose class may make reading it slow."""
    own: dict[Any, Any] = object.__getattribute__(value, "__dict__")
    return own


def _holds_same(of: Any, held: dict[Any, Any] | list[Any], keys: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    if isinstance(held, list):
        return len(held) == len(values) and all(map(is_, held, values))
    if of is not None and _dict_of(of) is not held:
        return False
    return tuple(held) == keys and all(map(is_, held.values(), values))


def contents_of(value: Any, whole: bool = False) -> _Contents | None:
    """Return the leaves of a value, or None if it is not to be synchronised.

    That are values too deep, guarded ones, and those with modules, parameters, optimizers or floats that have slots.

    Args:
        whole: Whether the entries of large containers are among the leaves.
    """
    found: _Contents = []
    to_do: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while to_do:
        key, inner = to_do.pop()
        if isinstance(inner, _FOREIGN) or is_guarded(inner):
            return None
        if isinstance(inner, Stacked) and inner.floats is not None:  # it has a slot
            return None
        if _is_held(inner):
            if len(key) == _DEPTH:
                return None
            entries = _entries(inner)
            found.append(((*key, type(inner)), len(entries)))
            if whole or len(entries) <= _LARGE:
                to_do += [((*key, name), entry) for name, entry in entries.items()]
            else:
                found.append(((*key, _VERSION), hash(tuple(map(id, entries.values())))))
        elif isinstance(inner, Tensor):
            data = inner.whole if isinstance(inner, Stacked) else inner
            found += [(key, inner), ((*key, _VERSION), 0 if data.is_inference() else data._version)]
        elif isinstance(inner, np.ndarray):
            found += [(key, inner), ((*key, _VERSION), zlib.crc32(inner.tobytes()))]
        else:
            found.append((key, inner))
    return found


def _entries(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    return dict.fromkeys(value) if isinstance(value, set) else vars(value)


def same_contents(contents: _Contents, others: _Contents) -> bool:
    """Whether two contents have the same keys, and the same objects or equal plain values."""
    return len(contents) == len(others) and all(
        key == other_key and (a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b))
        for (key, a), (other_key, b) in zip(contents, others, strict=True)
    )


def _update(attributes: dict[str, Any], name: str, value: Any, before: _Contents | None, b: int) -> None:
    """Set an attribute of member b to its copy of a value; of a dict or an object only the entries that changed."""
    mine = attributes.get(name)
    if before is None or type(mine) is not type(value) or isinstance(value, (list, tuple, set, deque, np.ndarray)):
        _replace(attributes, name, _copied(value, b))
        return
    entries, own = _entries(value), mine if isinstance(mine, dict) else vars(mine)
    old = dict(before)
    for key in own.keys() - entries.keys():
        del own[key]
    for key, entry in entries.items():
        if _is_held(entry) or not same_contents([(None, entry)], [(None, old.get((key,), _copied))]):
            own[key] = _copied(entry, b)


def _replace(attributes: dict[str, Any], name: str, new: Any) -> None:
    """Set an attribute, in place of what it holds if that can be, since other modules and hooks may refer to that."""
    mine = attributes.get(name)
    if mine is None or type(mine) is not type(new) or not _is_held(new) or isinstance(new, tuple):
        attributes[name] = new
    elif isinstance(mine, (list, set, deque)):
        mine.clear()
        (mine.update if isinstance(mine, set) else mine.extend)(new)
    else:
        own, entries = _entries(mine), _entries(new)
        own.clear()
        dict.update(own, entries)  # a Counter's own adds


def _copied(value: Any, b: int) -> Any:
    """Copy a value for member b, with its rows of stacked tensors; no tensor keeps its graph."""
    memo: dict[int, Any] = {}
    with torch._C.DisableTorchFunction():
        for _, leaf in contents_of(value, whole=True) or ():
            if isinstance(leaf, Stacked):
                memo[id(leaf)] = leaf.whole[b].detach().clone()
            elif isinstance(leaf, Tensor):
                memo[id(leaf)] = lazy_clone(leaf.detach())
        return copy.deepcopy(value, memo)


class _DifferError(Exception):
    pass


def _joined(values: Sequence[Any]) -> Any:
    """Join values of members: equal ones are one, tensors and floats that differ are stacked."""
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _DifferError
    if isinstance(first, Tensor):
        if any(value.shape != first.shape for value in values):
            raise _DifferError
        return Stacked(torch.stack([value.detach() for value in values]))
    if not _is_held(first):
        if not all(value is first or np.array_equal(value, first) for value in values):
            raise _DifferError
        return first
    tables = [_entries(value) for value in values]
    if any(table.keys() != tables[0].keys() for table in tables):
        raise _DifferError
    entries = {key: _joined([table[key] for table in tables]) for key in tables[0]}
    if isinstance(first, tuple):
        return tuple.__new__(type(first), entries.values())
    if isinstance(first, set):
        return first.copy()
    joined = copy.copy(first)
    if isinstance(joined, dict):
        dict.update(joined, entries)  # a Counter's own adds
    elif isinstance(joined, (list, deque)):
        for key, entry in entries.items():
            joined[key] = entry
    else:
        vars(joined).update(entries)
    return joined
