"""`ModelArray`: B models of equal structure as one `nn.Module`, whose tensors have a leading axis B."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.errors import FusionError
from shoal.fuse.array_state import ArrayState
from shoal.fuse.checks import parse_indices
from shoal.fuse.map_runner import MapRunner
from shoal.fuse.per_member import tensors_in
from shoal.fuse.randomness import active_source
from shoal.fuse.stacked import Stacked
from shoal.fuse.unfused_module import unfused_parameters

__all__ = ["ModelArray"]


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

        The first call of `fn` may show that `fn` cannot run for all members at once. Then the call's effects on
        parameters, gradients, buffers, attributes, and on the lists, dicts and variables that `fn` names are rolled
        back, and `fn` runs member by member. This also happens if `fn` returns an object, or stores a tensor in such
        a list, dict or variable, so that each member's own value is stored.

        Args:
            fn: Function that takes a model and a batch and returns tensors, nested in any way. It sees the shapes of
                one member. It may call `backward`. Optimizers that were made outside of `fn` must step outside of it.
            batch: Arguments that all members share, or that are `Stacked`.

        Returns:
            The result of `fn`, with each tensor or number as a tensor with a leading axis B. Any other leaf but None (a
            string, a numpy array, an object that is not a pytree node of torch) becomes a list of B values.

        Raises:
            FusionError: `fn` is not a function; `map` is called within a function that this array or another one runs;
                `fn` accesses gradients of parameters without using the model that it is given, as an optimizer
                does; or a call of `fn` after the first one shows that it must run member by member.
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
        """Refuse to run inside a function that an array runs, or after the members have joined another array.

        Raises:
            FusionError: An array runs in this thread, or the members are in another array.
        """
        if active_source() is not None:
            raise FusionError(
                "an array is called within a function that an array runs; call it before that, and pass its result to "
                "the function as a stacked batch: `shoal.stack(result)`"
            )
        self.check_present()

    def check_present(self) -> None:
        """Refuse to use an array, or its optimizer, after its members have joined another array.

        Raises:
            FusionError: The members are in another array.
        """
        if self._left:
            raise FusionError(
                "the members have left this array by `select`, `concat` or another `fuse`; use the new array, and the "
                "optimizer that `fuse_optimizers` makes for that array from the members' own optimizers"
            )

    def check_batch(self, batch: Any) -> None:
        """Refuse batches that are stacked for another number of members.

        Raises:
            FusionError: A batch is stacked for another number of members; names both numbers.
        """
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
