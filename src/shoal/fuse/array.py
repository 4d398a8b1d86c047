"""`ModelArray`: B models of equal structure as one `nn.Module`, whose tensors have a leading axis B."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.errors import FusionError
from shoal.fuse.array_state import ArrayState
from shoal.fuse.checks import parse_indices
from shoal.fuse.per_member import error_location, function_identity, refuse_outer_grad, tensors_in
from shoal.fuse.quantised import state_tensors
from shoal.fuse.randomness import active_source
from shoal.fuse.shard import IndivisibleStepError, active_shard
from shoal.fuse.stacked import NeedsMemberError, SharedWriteError, Stacked, events, refuse_custom_autograd
from shoal.fuse.transaction import FROZEN, Transaction
from shoal.fuse.unfused_module import unfused_parameters, unfused_tensor_places

__all__ = ["MapRunner", "ModelArray"]


class MapRunner:
    """Runs functions for `ModelArray.map`, which states the contract."""

    def __init__(self, state: ArrayState) -> None:
        self._state = state
        self._ran: set[Any] = set()
        """Functions that have run without an error, each with the mode of the array."""

    def __call__(self, fn: Callable[..., Any], training: bool, batch: tuple[Any, ...]) -> Any:
        """Run a function on all members; this counts as one call of the array."""
        keys = self._state.next_keys()
        key = (function_identity(fn), training)
        run = self._run if key in self._ran else self._run_first_time
        try:
            result = run(fn, keys, batch)
        except NeedsMemberError as error:
            reason = f"{error_location(error, fn)}: {error}"
            if active_shard() is not None:
                raise IndivisibleStepError(reason) from error
            if key in self._ran:
                reason += ", in a later call than the first, whose effects are not rolled back"
            raise FusionError(
                f"{reason}; compute with tensors, not with numbers (no `.item()`), or run it on the members, which are "
                "ordinary models: [fn(model, *batch) for model in array.unfuse()]"
            ) from error
        self._ran.add(key)
        return result

    def _run_first_time(self, fn: Callable[..., Any], keys: Callable[[], list[int]], batch: tuple[Any, ...]) -> Any:
        """Run a function, and once more if it may have to write to what the members share; failed runs leave no trace.

        Shared are frozen parameters that are stored once, and buffers that it sees as one plain tensor.
        """
        uniform = [slot for slot in self._state.slots if slot.uniform]
        while True:
            transaction = self._transaction(fn)
            try:
                result = self._run(fn, keys, batch)
                if (left := transaction.find_stacked()) is not None:
                    raise NeedsMemberError(f"it puts a tensor into `{left}`, where each member has its own")
                return result
            except (NeedsMemberError, Exception) as error:
                transaction.restore()
                if transaction.changed_for_good() == FROZEN:
                    raise FusionError(
                        "a function that fails has written to a frozen parameter that is kept once for all members, "
                        "and that is too large to be restored; make the models anew, with a buffer for what changes"
                    ) from error
                if isinstance(error, (FusionError, torch.OutOfMemoryError)) or not self._unshare(error):
                    for slot in uniform:  # it fails for another reason
                        slot.uniform = True
                    raise

    def _run(self, fn: Callable[..., Any], keys: Callable[[], list[int]], batch: tuple[Any, ...]) -> Any:
        bypassed = events.bypasses
        try:
            with self._state.open(keys, partial(refuse_outer_grad, self._state.slots)) as model:
                result = fn(model, *batch)
                with torch._C.DisableTorchFunction():
                    return pytree.tree_map(lambda value: _expand_leaf(value, len(self._state.members)), result)
        except RuntimeError as error:
            if events.bypasses == bypassed:
                raise
            raise NeedsMemberError(str(error)) from error

    def _transaction(self, fn: Callable[..., Any]) -> Transaction:
        """Take a snapshot of everything that a run may change."""
        state = self._state
        state.sync_from_members()
        own = [slot.data for slot in state.slots if slot.member_tensors and not slot.shared]
        shared = [*(slot.data for slot in state.slots if slot.shared), *state_tensors(state.template)]
        return Transaction(
            [state.template], [fn], tensors=[*own, *unfused_tensor_places(state.unfused)], constants=shared
        )

    def _unshare(self, error: BaseException) -> bool:
        """Give each member its own copy of what a failed run may have to write to; return whether there is anything."""
        target = error.target if isinstance(error, SharedWriteError) else None
        for slot in self._state.slots:
            if slot.shared and slot.data is target:
                self._state.unshare(slot)
                return True
        uniform = [slot for slot in self._state.slots if slot.uniform]
        for slot in uniform:
            slot.uniform = False
        return bool(uniform)


_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def _expand_leaf(value: Any, members: int) -> Any:
    """Give one leaf of a function's result for all members at once a leading axis B."""
    if isinstance(value, Stacked):
        refuse_custom_autograd([value])
        return value.whole
    if isinstance(value, Tensor):
        return value.expand(members, *value.shape)
    if isinstance(value, _NUMBERS):
        return torch.tensor([value] * members)
    if value is not None:
        raise NeedsMemberError(f"it returns a {type(value).__name__}, which may differ between members")
    return None


class ModelArray(nn.Module):
    """B models of equal structure, run as one.

    The array's parameters and buffers are the members' tensors, stacked: a member's [F, E] weight is a row of a
    [B, F, E] parameter. A frozen parameter with equal values in all members is stored once, [F, E], and results that
    depend on such parameters and shared inputs alone are computed once. Submodules in which the members differ run
    member by member and keep their own tensors.

    The members remain ordinary modules. Their tensors are views of the array's rows, so they are always up to date, and
    `unfuse` returns the members without copying. A model is a member of one array at a time: fusing it again removes
    it from its previous array.

    Args:
        members: Models that `check_members` accepts.
        seeds: Seeds of the members' random numbers (dropout), one each.
        strict: Whether to refuse members that differ in a submodule.
    """

    members: tuple[nn.Module, ...]
    state: ArrayState

    def __init__(self, members: Sequence[nn.Module], seeds: Sequence[int], strict: bool = True) -> None:
        super().__init__()
        self.stacked, self.frozen = nn.Module(), nn.Module()
        self.strict = strict
        self.state = ArrayState(members, seeds, strict, self.stacked, self.frozen)
        self._run = MapRunner(self.state)
        self.__dict__["members"] = self.state.members  # not submodules: their tensors are views of this module's own
        own = zip(
            *(part.member_modules for part in self.state.unfused), strict=True
        )  # for each member, its unfused modules
        self.separate = nn.ModuleList(map(nn.ModuleList, own))
        self.training = members[0].training
        self._left = False
        for left in _take_ownership(self, members):
            left._left = True

    def __len__(self) -> int:
        return len(self.members)

    def __reduce__(self) -> Any:
        if active_source() is not None:
            raise FusionError("an array is pickled or copied within a function that an array runs; do so after the run")
        return _rebuild, (self.members, self.seeds, self.strict, self.ticks)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the members' random numbers."""
        return self.state.seeds

    @seeds.setter
    def seeds(self, seeds: Sequence[int]) -> None:
        self.state.seeds = tuple(seeds)

    @property
    def tick(self) -> int:
        """Number of the next call; members' random numbers depend on it and on their seeds alone."""
        return self.state.tick

    @tick.setter
    def tick(self, tick: int) -> None:
        self.state.tick = tick

    @property
    def ticks(self) -> tuple[int, ...]:
        """`tick` of each member; they differ in members that were not always in one array."""
        return self.state.ticks

    @ticks.setter
    def ticks(self, ticks: Sequence[int]) -> None:
        self.state.ticks = ticks

    @property
    def version(self) -> int:
        """Incremented when parameters are frozen or unfrozen; steps captured at an earlier version are out of date."""
        return self.state.version

    @property
    def partial(self) -> bool:
        """Whether the array is partially fused: the members differ in some submodules."""
        return bool(self.state.unfused)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Every member's output, stacked: [B, N, ...] where a member returns [N, ...]. Members share plain inputs."""
        return self.map(_call, args, kwargs)

    def map(self, fn: Callable[..., Any], *batch: Any) -> Any:
        """Compute `[fn(member, *batch) for member in members]` in one run for all members.

        A first call of `fn` that fails is rolled back: its effects on parameters, gradients, buffers, attributes, and
        on the lists, dicts and variables that `fn` names.

        Args:
            fn: Function that takes a model and a batch and returns tensors, nested in any way. It sees the shapes of
                one member. It may call `backward`. Optimizers that were made outside of `fn` must step outside of it.
            batch: Arguments that all members share, or that are `Stacked`.

        Returns:
            The result of `fn`, with each tensor or number as a tensor with a leading axis B. Other leaves but None (a
            string, a numpy array, an object that is not a pytree node of torch) are refused.

        Raises:
            FusionError: `fn` is not a function; `map` is called within a function that this array or another one runs;
                `fn` accesses gradients of parameters without using the model that it is given, as an optimizer
                does; or `fn` cannot run for all members at once, since it needs the value of a single one.
        """
        if not callable(fn):
            raise FusionError(f"`fn` must be a function of a model and a batch, got {fn!r}")
        self.check_can_run()
        self.check_batch(batch)
        return self._run(fn, self.training, batch)

    def open(self, keys: Tensor | None = None) -> AbstractContextManager[nn.Module]:
        """Context manager that yields one model of the user's own class, which stands for all members.

        The model's tensors are `Stacked`.

        Args:
            keys: Keys of the random numbers drawn in the context, int64 [B]; by default those of the next call.
        """
        return self.state.open(keys)

    def unfuse(self) -> list[nn.Module]:
        """Return the members: models of their own classes, with their current weights and buffers.

        Nothing is copied. The members' tensors remain views of the array's tensors, and all members share the memory
        of a frozen parameter that is stored once. To get an independent model, or before saving or unfreezing a
        single member, copy the member with `copy.deepcopy`.
        """
        return list(self.members)

    def select(self, indices: Iterable[int] | Tensor) -> "ModelArray":
        """Make a new array of some members, in the order given; this array cannot be used any more.

        Args:
            indices: Indices of members, where negative indices count from the end; or B booleans.

        Raises:
            FusionError: There are no indices, one is out of range or given twice, or the members have left already.
        """
        self.check_present()
        chosen = parse_indices(indices, len(self))
        array = ModelArray([self.members[i] for i in chosen], [self.seeds[i] for i in chosen], self.strict)
        array.ticks = tuple(self.ticks[i] for i in chosen)
        return array

    def train(self, mode: bool = True) -> "ModelArray":
        """Set all members and their submodules to training or evaluation mode."""
        self.training = mode
        self.state.template.train(mode)
        for member in self.members:
            member.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "ModelArray":
        """Freeze or unfreeze all parameters of the array and of its members.

        Raises:
            FusionError: A frozen parameter that is stored once would be unfrozen.
        """
        for slot in self.state.slots:
            slot.check_requires_grad(requires_grad)
        for member in self.members:
            member.requires_grad_(requires_grad)
        self.state.sync_slots()
        return self

    def stacked_tensors(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Yield the path of every stacked tensor, the tensor, and the members' own tensors: views of its rows."""
        return ((slot.path, slot.data, slot.member_tensors) for slot in self.state.stacked_slots())

    def shared_parameters(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Yield the path of every frozen parameter that is stored once, its tensor `[*shape]`, and the members' own."""
        return ((slot.path, slot.data, slot.member_tensors) for slot in self.state.slots if slot.shared)

    def unfused_parameters(self) -> Iterator[tuple[str, int, nn.Parameter]]:
        """Yield the path, the member and the parameter, for submodules in which the members differ."""
        return unfused_parameters(self.state.unfused)

    def check_can_run(self) -> None:
        """Refuse to run inside a function that an array runs, or after the members have joined another array."""
        if active_source() is not None:
            raise FusionError(
                "an array is called within a function that an array runs; call it before that, and pass its result to "
                "the function as a stacked batch: `shoal.stack(result)`"
            )
        self.check_present()

    def check_present(self) -> None:
        """Refuse to use an array, or its optimizer, after its members have joined another array."""
        if self._left:
            raise FusionError(
                "the members have left this array by `select`, `concat` or another `fuse`; use the new array, and the "
                "optimizer that `fuse_optimizers` makes for that array from the members' own optimizers"
            )

    def check_batch(self, batch: Any) -> None:
        """Refuse batches that are stacked for another number of members."""
        for leaf in tensors_in(batch):
            if isinstance(leaf, Stacked) and len(leaf.whole) != len(self):
                raise FusionError(f"{len(leaf.whole)} batches are stacked for an array of {len(self)} members")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy the tensors of a `state_dict` into the array; its members, whose tensors are views, change too.

        Raises:
            FusionError: `assign` is set, so that the members' tensors would no longer be views of the array's.
        """
        if assign:
            raise FusionError(
                "an array cannot use a state_dict's tensors (assign=True): its members' tensors are views of its own; "
                "load with assign=False, which copies, after moving the array (`to`) to the wanted type and device"
            )
        return super().load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ModelArray":
        if any(fn(one[:0] if one.dim() else one).is_meta and not one.is_meta for one in self.stacked.parameters()):
            raise FusionError("an array cannot be moved to 'meta', where its members would lose their values")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for slot in self.state.slots:
            slot.bind_members()
        self.state.prepare_quantised()
        return self


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _rebuild(members: Sequence[nn.Module], seeds: Sequence[int], strict: bool, ticks: tuple[int, ...]) -> ModelArray:
    array = ModelArray(members, seeds, strict)
    array.ticks = ticks
    return array


_arrays: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Model -> weak reference to the array into which the model was fused last."""


def _take_ownership(array: ModelArray, members: Iterable[nn.Module]) -> set[Any]:
    """Record that models are members of an array."""
    before = set()
    here = ref(array)
    for member in members:
        there = _arrays.get(member)  # type: ignore[no-untyped-call]
        before.add(there() if there is not None else None)
        _arrays[member] = here
    return before - {None, array}
