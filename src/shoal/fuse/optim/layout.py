"""Which members, groups and parameters are updated together."""

from collections.abc import Collection, Sequence
from itertools import groupby

from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.loop import MemberLoop
from shoal.fuse.optim.param_group_batch import Lowering, ParamGroupBatch
from shoal.fuse.optim.rule import UpdateRule, unreadable
from shoal.fuse.optim.stacked_param import StackedParam
from shoal.fuse.optim.table import rule_of

__all__ = ["arrange", "owned"]


def arrange(
    members: Sequence[Optimizer],
    columns: Sequence[StackedParam],
    groups: Sequence[Sequence[tuple[int, ...]]],
    lowering: Lowering | None,
    skipped: Collection[int] = (),
) -> list[ParamGroupBatch | MemberLoop]:
    """Divide the members into runs whose optimizers differ in numbers alone, and those into batches of groups.

    Args:
        members: one optimizer for each member of the array.
        columns: the array's parameters, those that one member alone has among them.
        groups: of each member and group, the indices of its columns; see `owned`.
        lowering: see `ParamGroupBatch`.
        skipped: members to be left out.
    """
    units: list[ParamGroupBatch | MemberLoop] = []
    shared = [[tuple(i for i in group if columns[i].member is None) for group in mine] for mine in groups]
    layouts = [_rules(b, member, mine) for b, (member, mine) in enumerate(zip(members, shared, strict=True))]
    for (left_out, layout), run in groupby(range(len(members)), key=lambda b: (b in skipped, layouts[b])):
        if left_out:
            continue
        indices = list(run)
        start, chosen = indices[0], [members[b] for b in indices]
        if layout is None:
            each = [[columns[i] for group in shared[b] for i in group] for b in indices]
            units.append(MemberLoop(chosen, start, each))
            continue
        for number, (rule, mine) in enumerate(layout):
            if mine:
                units.append(ParamGroupBatch(rule, chosen, start, number, [columns[i] for i in mine], lowering))
            for b in indices:
                if alone := [columns[i] for i in groups[b][number] if columns[i].member == b]:
                    units.append(ParamGroupBatch(rule, [members[b]], b, number, alone, lowering))
    return units


def owned(
    members: Sequence[Optimizer], columns: Sequence[StackedParam], array: ModelArray
) -> list[list[tuple[int, ...]]]:
    """For each member and each of its parameter groups, the indices of the columns that its optimizer updates.

    Frozen parameters that the array keeps once are left out: they are not updated.

    Raises:
        FusionError: an optimizer updates what is not its own model's; names the member and the parameter.
    """
    home: dict[int, tuple[int, str, int | None]] = {}
    for i, column in enumerate(columns):
        home |= {id(own): (b, column.path, i) for b, own in enumerate(column.own, start=column.member or 0)}
    for path, _, frozen in array.shared():
        home |= {id(own): (b, path, None) for b, own in enumerate(frozen)}
    groups = []
    for b, member in enumerate(members):
        mine = []
        for number, group in enumerate(member.param_groups):
            places = [_place(home.get(id(param)), b, number, k) for k, param in enumerate(group["params"])]
            mine.append(tuple(i for i in places if i is not None))
        groups.append(mine)
    return groups


def _place(found: tuple[int, str, int | None] | None, b: int, group: int, position: int) -> int | None:
    """The column of a parameter in the groups of member b, if it has one."""
    if found is None:
        raise FusionError(
            f"the optimizer of member {b} updates a tensor that is no parameter of its model (parameter "
            f"{position} of group {group}); make it from the model's own parameters()"
        )
    owner, path, column = found
    if owner != b:
        raise FusionError(
            f"the optimizer of member {b} updates {path!r} of member {owner}; "
            "give the optimizers in the order of the array's members"
        )
    return column


def _rules(
    b: int, member: Optimizer, groups: Sequence[tuple[int, ...]]
) -> tuple[tuple[UpdateRule, tuple[int, ...]], ...] | None:
    """What must agree for optimizers to be updated together; None if this one steps by itself."""
    layout = []
    for number, (group, columns) in enumerate(zip(member.param_groups, groups, strict=True)):
        try:
            rule = rule_of(member, group)
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable(b, number, group, error) from error
        if rule is None:
            return None
        layout.append((rule, columns))
    return tuple(layout)
