"""`FusedOptimizer`: steps the optimizers of all members of an array together."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.checks import check_iterable
from shoal.fuse.optim.param_group_batch import Lowering, ParamGroupBatch
from shoal.fuse.optim.param_state import StackedParam
from shoal.fuse.optim.rule import UpdateRule, unreadable_settings
from shoal.fuse.optim.table import has_unmodified_step, rule_of
from shoal.fuse.optim.traced import TracedStep, trace
from shoal.fuse.optim.unfused_step import MemberLoop, UnfusedStep, check_fusible

__all__ = ["FusedOptimizer", "fuse_optimizers"]


class FusedOptimizer:
    """B optimizers that step together, each with its own hyper-parameters.

    A step reads the gradients of the array's stacked parameters, and of the members' own parameters in submodules in
    which members differ. Frozen parameters that the array stores once have no gradient; optimizers may contain them.

    The members remain ordinary torch optimizers. Their `param_groups` are read at every step, so LR schedulers work
    unchanged. Their `state` consists of views of the stacked state, so `state_dict()` is always up to date, and
    `load_state_dict()` and `add_param_group()` take effect at the next step. Do not call the members' own `step`.
    The step count that Adam stores is on the parameters' device, as with `capturable=True`.

    Args:
        members: See `fuse_optimizers`.
        array: Array of the members' models.
        lowering: See `fuse_optimizers`.
    """

    def __init__(self, members: Sequence[Optimizer], array: ModelArray, lowering: Lowering | None = None) -> None:
        self.members = tuple(members)
        self.version = 0
        """Incremented when anything but hyper-parameters changes; earlier `traced` steps are then out of date."""
        self.array = array
        self._last_sizes: list[int] | None = None
        self._lowering: Lowering | None = lowering
        self._updates = [UnfusedStep(member) for member in members]
        self._stepped_together = False
        self._units: list[ParamGroupBatch | MemberLoop] = []
        self._arrange()

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters that a member updates: stacked ones, and those of single members."""
        return self._params

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters that a member updates to None, or to zero."""
        self.array.check_present()
        if self._sizes() != self._last_sizes:
            self._arrange()
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach().zero_()

    def step(self, closure: None = None, skip: Collection[int] = ()) -> None:
        """Update all members' parameters that have gradients.

        Args:
            closure: Must be None; present for compatibility with torch's optimizers.
            skip: Indices of members whose parameters and state stay unchanged.

        Raises:
            FusionError: `closure` is not None, a gradient is sparse, or an optimizer moved its parameters in memory.
        """
        if closure is not None:
            raise FusionError("an array's optimizer takes no closure; compute the gradients before `step()`")
        self.refresh()
        for unit in self._units:
            unit.step(skip)
        self._last_state_counts = self._state_counts()
        self.mark_stepped()

    def refresh(self) -> None:
        """Read the members' `param_groups`, and rearrange the members if anything but hyper-parameters has changed."""
        self.array.check_present()
        if (
            self._param_groups_changed()
            or self._arrangement_key() != self._last_key
            or not all(unit.refresh() for unit in self._units)
        ):
            self._arrange()

    def traced(self, params: Sequence[Tensor] | None = None, kernels: bool = False) -> TracedStep | None:
        """The step as a function of tensors, or None if the optimizer of a member has no fused rule.

        Call this method right before the first traced step, since it initialises the state of the parameters. Before
        each run of the trace call `refresh` and compare `version`; after each run call `mark_stepped`.

        Args:
            params: Stacked parameters with a gradient in this step; None for all that require one.
            kernels: Whether torch's fused kernels may be called. Then hyper-parameters other than learning rates become
                constants, unless they have changed before, and `version` changes if they do.
        """
        self.refresh()
        param_batches = [unit for unit in self._units if isinstance(unit, ParamGroupBatch)]
        if len(param_batches) < len(self._units):
            return None
        trained = [p for p in self._params if p.requires_grad] if params is None else params
        traced = trace(param_batches, trained, kernels)
        self._last_state_counts = self._state_counts()
        return traced

    def step_each(self, uneven: bool, skip: Collection[int] = ()) -> None:
        """Take the members' steps one by one, with the gradients of their own parameters; `skip` as for `step`.

        If `uneven`, some members have no gradient for a parameter for which others have one.
        """
        if uneven or skip or self._param_groups_changed():
            self._last_sizes = None  # the state must be stacked again: more than its values changes
        if self._stepped_together:
            for update in self._updates:
                update.forget_counts()
            self._stepped_together = False
        for b, update in enumerate(self._updates):
            if b not in skip:
                update()
        if skip:
            self.mark_stepped()

    def mark_stepped(self) -> None:
        """Record a step of all members, also for LR schedulers, which warn if no optimizer step precedes their step."""
        self._stepped_together = True
        for member in self.members:
            member._opt_called = True  # type: ignore[attr-defined]

    def unfuse(self) -> list[Optimizer]:
        """Return the members' optimizers, with their current settings and state."""
        return list(self.members)

    def _param_groups_changed(self) -> bool:
        """Whether parameters have moved to other param groups, or the state of some parameters was deleted."""
        if self._sizes() != self._last_sizes or self._state_counts() != self._last_state_counts:
            return True
        return not all(map(is_, self._all_params(), self._order))

    def _all_params(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for member in self.members for group in member.param_groups)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for member in self.members for group in member.param_groups]

    def _state_counts(self) -> list[int]:
        return [len(member.state) for member in self.members]

    def _arrange(self) -> None:
        stacked_params = [StackedParam(path, data, own) for path, data, own in self.array.stacked_tensors()]
        stacked_params += [StackedParam(path, own, [own], b) for path, b, own in self.array.unfused_parameters()]
        groups = _param_indices(self.members, stacked_params, self.array)
        used = sorted({i for member in groups for group in member for i in group})
        self._params = [stacked_params[i].stacked for i in used]
        rates_only = all(unit.changes_rates_only for unit in self._units if isinstance(unit, ParamGroupBatch))
        self._units = _make_units(self.members, stacked_params, groups, self._lowering)
        for unit in self._units:
            unit.refresh()
            if isinstance(unit, ParamGroupBatch):
                unit.changes_rates_only = rates_only
        self._states = [member.state for member in self.members]  # kept alive, so that no other object gets the same id
        self._last_state_counts = self._state_counts()
        self._order = list(self._all_params())
        self._last_sizes = self._sizes()
        self._last_key = self._arrangement_key()
        self.version += 1

    def _arrangement_key(self) -> list[Any]:
        """Everything that the arrangement in units depends on, except the rules, which the units check in `refresh`."""
        key: list[Any] = [self.array.version]
        for member in self.members:
            key += (id(member.state), has_unmodified_step(member))
        key += [param.data_ptr() for param in self._params]
        return key


def fuse_optimizers(
    optimizers: Iterable[Optimizer], array: ModelArray, *, lowering: Lowering | None = None
) -> FusedOptimizer:
    """Fuse the members' optimizers into one.

    `SGD`, `Adam`, `AdamW`, `Adamax`, `NAdam`, `RAdam`, `Adagrad`, `Adadelta` and `RMSprop` have fused rules. Optimizers
    of other classes, with step hooks, with a replaced `step` or with `differentiable=True` step one after another.
    `foreach`, `fused` and `capturable`, which choose between torch's implementations, are ignored. A hyper-parameter
    that is a tensor is read as a number.

    Args:
        optimizers: One optimizer per member of `array.members`, for all or some of its parameters, with any state.
        array: The fused models.
        lowering: "kernels" or "elementwise"; None for the faster one on the device. Both compute the same values.

    Raises:
        FusionError: The number of optimizers differs from the number of members, an optimizer updates parameters of
            another model, needs a closure or sparse gradients, or has a `zero_grad` or modes (`train`, `eval`) of its
            own.
    """
    if not isinstance(array, ModelArray):
        raise FusionError(
            f"`fuse_optimizers` takes a list of torch.optim.Optimizer and the array that `fuse` made, got "
            f"{type(array).__name__} as the array"
        )
    array.check_present()
    members = list(check_iterable(optimizers, "optimizers", "torch.optim.Optimizer"))
    for b, member in enumerate(members):
        if not isinstance(member, Optimizer):
            raise FusionError(f"`optimizers` must be a list of torch.optim.Optimizer, got {member!r} for member {b}")
        check_fusible(b, member)
    if len(members) != len(array):
        raise FusionError(f"an array of {len(array)} members needs as many optimizers, got {len(members)}")
    return FusedOptimizer(members, array, lowering)


def _make_units(
    members: Sequence[Optimizer],
    stacked_params: Sequence[StackedParam],
    groups: Sequence[Sequence[tuple[int, ...]]],
    lowering: Lowering | None,
) -> list[ParamGroupBatch | MemberLoop]:
    """Divide the members into runs whose optimizers differ only in hyper-parameters; one batch per run and group."""
    units: list[ParamGroupBatch | MemberLoop] = []
    shared = [[tuple(i for i in group if stacked_params[i].member is None) for group in mine] for mine in groups]
    layouts = [_rules(b, member, mine) for b, (member, mine) in enumerate(zip(members, shared, strict=True))]
    for layout, run in groupby(range(len(members)), key=layouts.__getitem__):
        indices = list(run)
        start, chosen = indices[0], [members[b] for b in indices]
        if layout is None:
            each = [[stacked_params[i] for group in shared[b] for i in group] for b in indices]
            units.append(MemberLoop(chosen, start, each))
            continue
        for number, (rule, mine) in enumerate(layout):
            for alike in _by_dtype([stacked_params[i] for i in mine]):
                units.append(ParamGroupBatch(rule, chosen, start, number, alike, lowering))
            for b in indices:
                own = [stacked_params[i] for i in groups[b][number] if stacked_params[i].member == b]
                for alike in _by_dtype(own):
                    units.append(ParamGroupBatch(rule, [members[b]], b, number, alike, lowering))
    return units


def _by_dtype(params: Sequence[StackedParam]) -> list[list[StackedParam]]:
    """Parameters of one dtype each, as a fused kernel takes them on CUDA."""
    found: dict[torch.dtype, list[StackedParam]] = {}
    for param in params:
        found.setdefault(param.stacked.dtype, []).append(param)
    return list(found.values())


def _param_indices(
    members: Sequence[Optimizer], stacked_params: Sequence[StackedParam], array: ModelArray
) -> list[list[tuple[int, ...]]]:
    """Indices of the stacked parameters that each member's optimizer updates, per group; without frozen ones."""
    owners: dict[int, tuple[int | None, str, int | None]] = {}
    for i, param in enumerate(stacked_params):
        owners |= {id(own): (b, param.path, i) for b, own in enumerate(param.member_params, start=param.member or 0)}
    for path, _, frozen in array.shared_parameters():
        common = len(frozen) > 1 and frozen[0] is frozen[-1]  # one parameter of all members' models
        owners |= {id(own): (None if common else b, path, None) for b, own in enumerate(frozen)}
    groups = []
    for b, member in enumerate(members):
        mine = []
        for number, group in enumerate(member.param_groups):
            places = [_index_of(owners.get(id(param)), b, number, k) for k, param in enumerate(group["params"])]
            mine.append(tuple(i for i in places if i is not None))
        groups.append(mine)
    return groups


def _index_of(found: tuple[int | None, str, int | None] | None, b: int, group: int, position: int) -> int | None:
    if found is None:
        raise FusionError(
            f"the optimizer of member {b} updates a tensor that is not a parameter of its model (parameter "
            f"{position} of group {group}); make it from the model's own parameters()"
        )
    owner, path, index = found
    if owner not in (b, None):
        raise FusionError(
            f"the optimizer of member {b} updates {path!r} of member {owner}; "
            "give the optimizers in the order of the array's members"
        )
    return index


def _rules(
    b: int, member: Optimizer, groups: Sequence[tuple[int, ...]]
) -> tuple[tuple[UpdateRule, tuple[int, ...]], ...] | None:
    """Rule and parameter indices of each group, equal in members updated together; None without a fused rule."""
    layout = []
    for number, (group, indices) in enumerate(zip(member.param_groups, groups, strict=True)):
        try:
            rule = rule_of(member, group)
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable_settings(b, number, group, error) from error
        if rule is None:
            return None
        layout.append((rule, indices))
    return tuple(layout)
