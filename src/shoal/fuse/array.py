"""`ModelArray`: models of one structure as one model with a leading axis B."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.errors import FusionError
from shoal.fuse.array_state import ArrayState
from shoal.fuse.checks import indices_of
from shoal.fuse.map_runner import MapRunner
from shoal.fuse.per_member import tensors_in
from shoal.fuse.randomness import active
from shoal.fuse.stacked import Stacked
from shoal.fuse.unfused_module import own_parameters

__all__ = ["ModelArray"]


class ModelArray(nn.Module):
    """B models of one structure, run as one.

    Its parameters and buffers are the members', stacked: a member's [F, E] weight is a row of a [B, F, E] parameter. A
    frozen parameter with equal values in all members is kept once, [F, E], and what is computed of it alone is computed
    once. Submodules in which the members differ run member by member and keep their own tensors.

    The members live on as ordinary modules whose tensors are views of those rows, so they are always up to date, and
    `unfuse` returns them as they are. A model is a member of one array at a time: fusing it again moves it.

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
        own = zip(*(part.own for part in self.state.apart), strict=True)  # of each member
        self.separate = nn.ModuleList(map(nn.ModuleList, own))
        self.training = members[0].training
        self._left = False
        for left in _take_ownership(self, members):
            left._left = True

    def __len__(self) -> int:
        return len(self.members)

    def __reduce__(self) -> Any:
        if active() is not None:
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
        """Number that grows when parameters are frozen or unfrozen; an older captured step is then out of date."""
        return self.state.version

    @property
    def partial(self) -> bool:
        """Whether members differ in some submodules."""
        return bool(self.state.apart)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Every member's output, stacked: [B, N, ...] where a member gives [N, ...]. Plain inputs are shared."""
        return self.map(_call, args, kwargs)

    def map(self, fn: Callable[..., Any], *batch: Any) -> Any:
        """Like `[fn(member, *batch) for member in members]`, at once.

        If the first call of `fn` shows that it cannot run at once, its effects on parameters, gradients, buffers,
        attributes, and on lists, dicts and variables that it names are rolled back, and it runs member by member. The
        same happens if `fn` returns an object, or leaves a tensor in such a list, dict or variable; these then get
        each member's own.

        Args:
            fn: Function that takes a model and a batch and returns tensors, nested as it likes. It sees the shapes of
                one member. It may go backward; optimizers that were made outside of it must step outside of it.
            batch: Arguments that all members share, or that are `Stacked`.

        Returns:
            The result of `fn`, each tensor or number as a tensor with a leading axis B. Any other leaf but None (a
            string, a numpy array, an object that `torch.utils._pytree` does not know) becomes a list of the members'.

        Raises:
            FusionError: `fn` is no function; `map` is called within a function that this array or another one runs;
                `fn` asks for the gradients of parameters from outside of the model that it is given, as an optimizer
                does; or a later call of `fn` than its first shows that it must run member by member.
        """
        if not callable(fn):
            raise FusionError(f"`fn` must be a function of a model and a batch, got {fn!r}")
        self.check_free()
        self.check_batch(batch)
        return self._run(fn, self.training, batch)

    def open(self, keys: Tensor | None = None) -> AbstractContextManager[nn.Module]:
        """Within, the members are one model of the user's own class, whose tensors are `Stacked`.

        Args:
            keys: Keys of the random numbers drawn within, int64 [B]; by default those of the next call.
        """
        return self.state.open(keys)

    def unfuse(self) -> list[nn.Module]:
        """The members themselves: their own classes, with their current weights and buffers.

        Nothing is copied. Their tensors still are views of the array's, and a frozen parameter that is kept once is
        one memory for all: `copy.deepcopy` a member to have it by itself, or before it is saved or unfrozen alone.
        """
        return list(self.members)

    def select(self, indices: Iterable[int] | Tensor) -> "ModelArray":
        """A new array of some members, in the order given. All members leave this array, which cannot be used any more.

        Args:
            indices: Indices of members, negative ones from the end; or B truth values.

        Raises:
            FusionError: There are no indices, one is out of range or given twice, or the members have left already.
        """
        self.check_present()
        chosen = indices_of(indices, len(self))
        array = ModelArray([self.members[i] for i in chosen], [self.seeds[i] for i in chosen], self.strict)
        array.ticks = tuple(self.ticks[i] for i in chosen)
        return array

    def train(self, mode: bool = True) -> "ModelArray":
        """Set all members, and modules within them, to training or evaluation."""
        self.training = mode
        self.state.stage.train(mode)
        for member in self.members:
            member.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> "ModelArray":
        """Freeze or unfreeze all parameters, the members' own with them.

        Raises:
            FusionError: A frozen parameter that is kept once would be unfrozen.
        """
        for slot in self.state.slots:
            slot.check_requires_grad(requires_grad)
        for member in self.members:
            member.requires_grad_(requires_grad)
        self.state.follow_slots()
        return self

    def columns(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Every stacked tensor with its path and the members' own tensors, which are views of its rows."""
        return ((slot.path, slot.data, slot.own) for slot in self.state.own_slots())

    def shared(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Every frozen parameter that is kept once, [*shape], with its path and the members' own."""
        return ((slot.path, slot.data, slot.own) for slot in self.state.slots if slot.shared)

    def apart(self) -> Iterator[tuple[str, int, nn.Parameter]]:
        """Every parameter of a submodule in which the members differ, with its path and its member."""
        return own_parameters(self.state.apart)

    def check_free(self) -> None:
        """Refuse to run within a function that an array runs, or when the members have left.

        Raises:
            FusionError: An array runs in this thread, or the members have left.
        """
        if active() is not None:
            raise FusionError(
                "an array is called within a function that an array runs; call it before that, and hand over what it "
                "returns as a batch of each member's own: `shoal.stack(result)`"
            )
        self.check_present()

    def check_present(self) -> None:
        """Refuse to use an array, or its optimizer, whose members are in another array.

        Raises:
            FusionError: The members have left.
        """
        if self._left:
            raise FusionError(
                "the members have left this array by `select`, `concat` or another `fuse`; use the array that "
                "resulted, and the optimizer that `fuse_optimizers` makes for that array of its members' own"
            )

    def check_batch(self, batch: Any) -> None:
        """Refuse batches that are stacked for another number of members.

        Raises:
            FusionError: Names both numbers.
        """
        for leaf in tensors_in(batch):
            if isinstance(leaf, Stacked) and len(leaf.whole) != len(self):
                raise FusionError(f"{len(leaf.whole)} batches are stacked for an array of {len(self)} members")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy the tensors of a `state_dict` into the array, and so into its members.

        Raises:
            FusionError: `assign` is set, which would part the array from its members.
        """
        if assign:
            raise FusionError(
                "an array cannot take over a state_dict's tensors (assign=True): its members' are views of its own; "
                "load with assign=False, which copies, after moving the array (`to`) to the wanted type and device"
            )
        return super().load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ModelArray":
        if any(fn(one[:0] if one.dim() else one).is_meta and not one.is_meta for one in self.stacked.parameters()):
            raise FusionError("an array cannot be moved to 'meta', where its members would lose their values")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for slot in self.state.slots:
            slot.adopt()
        return self


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _rebuild(members: Sequence[nn.Module], seeds: Sequence[int], strict: bool, ticks: tuple[int, ...]) -> ModelArray:
    array = ModelArray(members, seeds, strict)
    array.ticks = ticks
    return array


_arrays: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Weak reference to the array of each model: the last one that the model was fused into."""


def _take_ownership(array: ModelArray, members: Iterable[nn.Module]) -> set[Any]:
    """Record the array of some models.

    Returns:
        The arrays that the models have left, if these still exist.
    """
    before = set()
    here = ref(array)
    for member in members:
        there = _arrays.get(member)  # type: ignore[no-untyped-call]
        before.add(there() if there is not None else None)
        _arrays[member] = here
    return before - {None, array}
