"""The members' optimizers as one."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.checks import listed
from shoal.fuse.optim.layout import arrange, owned
from shoal.fuse.optim.own_update import OwnUpdate
from shoal.fuse.optim.param_group_batch import Lowering, ParamGroupBatch
from shoal.fuse.optim.stacked_param import StackedParam
from shoal.fuse.optim.table import steps_as_made
from shoal.fuse.optim.traced import TracedStep, trace
from shoal.fuse.rows import forget, missing

__all__ = ["FusedOptimizer", "fuse_optimizers"]


class FusedOptimizer:
    """B optimizers that step at once, each with its own hyper-parameters.

    Gradients are those of the array's stacked parameters, and of the members' own in submodules in which they differ.
    Frozen parameters that the array keeps once have none, and may be in an optimizer or not.

    The members stay ordinary torch optimizers: their `param_groups` are read at every step, so LR schedulers work on
    them as always; their `state` is made of views of the stacked state, so `state_dict()` is always up to date, and
    `load_state_dict()` and `add_param_group()` are noticed at the next step. Only their own `step` is to be left alone.
    The number of updates that Adam keeps lies on the parameters' device, as with `capturable=True`.

    Args:
        members: see `fuse_optimizers`.
        array: of the members' models.
        lowering: see `fuse_optimizers`.
    """

    def __init__(self, members: Sequence[Optimizer], array: ModelArray, lowering: Lowering | None = None) -> None:
        self.members = tuple(members)
        self.version = 0
        """Grows when something other than a number has changed; a `traced` step of before is then out of date."""
        self.array = array
        self._sized: list[int] | None = None
        self._lowering: Lowering | None = lowering
        self._updates = [OwnUpdate(member) for member in members]
        self._arrange()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters that a member updates, or make them zero."""
        self.array.check_present()
        if self._sizes() != self._sized:
            self._arrange(self._skipped)
        for param in self._params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad = param.grad.detach().zero_()
        forget(self._params)

    def step(self, closure: None = None, skip: Collection[int] = ()) -> None:
        """Update every member's parameters that have gradients.

        Args:
            closure: torch's optimizers have one here; must be None.
            skip: indices of members whose parameters and state stay as they are.

        Raises:
            FusionError: a closure was given, a gradient is sparse, or an optimizer moved its parameters in memory.
        """
        if closure is not None:
            raise FusionError("an array's optimizer takes no closure; compute the gradients before `step()`")
        if self._skipped != set(skip):
            self._arrange(skip)
        self.refresh()
        without = missing(self._params)
        for unit in self._units:
            unit.step(without)
        self._kept = self._states_kept()
        self.mark_stepped()

    def refresh(self) -> None:
        """Read the members' `param_groups`, and arrange the members anew if more than numbers changed."""
        self.array.check_present()
        if self._moved() or self._look() != self._seen or not all(unit.refresh() for unit in self._units):
            self._arrange(self._skipped)

    def traced(self, params: Sequence[Tensor] | None = None) -> TracedStep | None:
        """The step as a function of tensors, or None if a member's optimizer must do some of it by itself.

        To be called right before the first step that is traced: it begins the state of the parameters. Before each
        run of the trace call `refresh`, and compare `version`; after it, `mark_stepped`.

        Args:
            params: stacked parameters that the step will have gradients of; by default those that require one.
        """
        if self._skipped:
            self._arrange()
        self.refresh()
        param_batches = [unit for unit in self._units if isinstance(unit, ParamGroupBatch)]
        if len(param_batches) < len(self._units):
            return None
        traced = trace(param_batches, [p for p in self._params if p.requires_grad] if params is None else params)
        self._kept = self._states_kept()
        return traced

    def step_each(self, uneven: bool) -> None:
        """Let the members step by themselves, with the gradients that their own parameters have.

        Args:
            uneven: whether some members have no gradient of a parameter of which others have one.
        """
        if uneven or self._moved():
            self._sized = None  # so that the state, of which more than numbers changes, is taken over anew
        for update in self._updates:
            update()

    def mark_stepped(self) -> None:
        """Let LR schedulers, which warn if no step came before them, know of it."""
        for member in self.members:
            member._opt_called = True  # type: ignore[attr-defined]

    def unfuse(self) -> list[Optimizer]:
        """The members themselves, with their current settings and state."""
        return list(self.members)

    def _moved(self) -> bool:
        """Whether parameters have moved between groups, or the state of some has been dropped."""
        if self._sizes() != self._sized or self._states_kept() != self._kept:
            return True
        return not all(map(is_, self._grouped(), self._order))

    def _grouped(self) -> Iterator[Tensor]:
        """Every member's parameters, in the order of its groups."""
        return chain.from_iterable(group["params"] for member in self.members for group in member.param_groups)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for member in self.members for group in member.param_groups]

    def _states_kept(self) -> list[int]:
        """Of how many parameters each member has state."""
        return [len(member.state) for member in self.members]

    def _arrange(self, skipped: Collection[int] = ()) -> None:
        self._skipped = frozenset(skipped)
        columns = [StackedParam(*column) for column in self.array.columns()]
        columns += [StackedParam(path, own, [own], b) for path, b, own in self.array.apart()]
        groups = owned(self.members, columns, self.array)
        used = sorted({i for member in groups for group in member for i in group})
        self._params = [columns[i].stacked for i in used]
        self._units = arrange(self.members, columns, groups, self._lowering, self._skipped)
        for unit in self._units:
            unit.refresh()
        self._states = [member.state for member in self.members]  # kept alive, so that no other takes its address
        self._kept = self._states_kept()
        self._order = list(self._grouped())
        self._sized = self._sizes()
        self._seen = self._look()
        self.version += 1

    def _look(self) -> list[Any]:
        """All that the arrangement depends on, but for the rules, which the units look after."""
        seen: list[Any] = [self.array.version]
        for member in self.members:
            seen += (id(member.state), steps_as_made(member))
        seen += [param.data_ptr() for param in self._params]
        return seen


def fuse_optimizers(
    optimizers: Iterable[Optimizer], array: ModelArray, *, lowering: Lowering | None = None
) -> FusedOptimizer:
    """Make one optimizer of the members' own.

    `SGD`, `Adam`, `AdamW`, `Adamax`, `NAdam`, `RAdam`, `Adagrad`, `Adadelta` and `RMSprop` have fused rules; members of
    other classes, with step hooks, with another function in the place of `step` or with `differentiable=True` step one
    after another. `foreach`, `fused` and `capturable` choose between torch's implementations and are not looked at; a
    tensor among the numbers is read as a number.

    Args:
        optimizers: one for each of `array.members`, made from that member's parameters (all or some), with any state.
        array: the fused models.
        lowering: "kernels" or "elementwise", instead of what is faster on the device; both give the same numbers.

    Raises:
        FusionError: not one optimizer for each member, one that updates another model's parameters, or one that
            needs a closure or sparse gradients.
    """
    if not isinstance(array, ModelArray):
        raise FusionError(
            f"`fuse_optimizers` takes a list of torch.optim.Optimizer and the array that `fuse` made, got "
            f"{type(array).__name__} as the array"
        )
    array.check_present()
    members = list(listed(optimizers, "optimizers", "torch.optim.Optimizer"))
    for b, member in enumerate(members):
        if not isinstance(member, Optimizer):
            raise FusionError(f"`optimizers` must be a list of torch.optim.Optimizer, got {member!r} for member {b}")
    if len(members) != len(array):
        raise FusionError(f"an array of {len(array)} members needs as many optimizers, got {len(members)}")
    return FusedOptimizer(members, array, lowering)
