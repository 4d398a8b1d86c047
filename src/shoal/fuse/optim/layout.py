"""Which members, groups and parameters are updated together."""

from collections.abc import Sequence
from itertools import groupby

from torch.optim import Optimizer

from shoal.errors import FusionError
from shoal.fuse.optim.cohort import Cohort, Lowering
from shoal.fuse.optim.column import Column
from shoal.fuse.optim.loop import MemberLoop
from shoal.fuse.optim.rule import Rule
from shoal.fuse.optim.table import rule_of

__all__ = ["arrange", "owned"]


def arrange(
    members: Sequence[Optimizer],
    columns: Sequence[Column],
    groups: Sequence[Sequence[tuple[int, ...]]],
    lowering: Lowering | None,
) -> list[Cohort | MemberLoop]:
    """Divide the members into runs whose optimizers differ in numbers alone, and those into cohorts.

    Args:
        members: one optimizer for each member of the array.
        columns: the array's parameters.
        groups: what `owned` says.
        lowering: see `Cohort`.
    """
    units: list[Cohort | MemberLoop] = []
    layouts = [_rules(member, mine) for member, mine in zip(members, groups, strict=True)]
    for layout, run in groupby(range(len(members)), key=lambda b: layouts[b]):
        indices = list(run)
        start, chosen = indices[0], [members[b] for b in indices]
        if layout is None:
            each = [[columns[i] for group in groups[b] for i in group] for b in indices]
            units.append(MemberLoop(chosen, start, each))
            continue
        for number, (rule, mine) in enumerate(layout):
            if mine:
                units.append(Cohort(rule, chosen, start, number, [columns[i] for i in mine], lowering))
    return units


def owned(members: Sequence[Optimizer], columns: Sequence[Column]) -> list[list[tuple[int, ...]]]:
    """For each member and each of its parameter groups, the indices of its columns.

    Raises:
        FusionError: an optimizer updates what is not its own model's; names the member and the parameter.
    """
    home = {id(own): (b, i) for i, column in enumerate(columns) for b, own in enumerate(column.own)}
    result = []
    for b, member in enumerate(members):
        groups = []
        for number, group in enumerate(member.param_groups):
            found = [home.get(id(param)) for param in group["params"]]
            for position, place in enumerate(found):
                if place is None:
                    raise FusionError(
                        f"the optimizer of member {b} updates a tensor that is no parameter of its model (parameter "
                        f"{position} of group {number}); make it from the model's own parameters()"
                    )
                if place[0] != b:
                    raise FusionError(
                        f"the optimizer of member {b} updates {columns[place[1]].path!r} of member {place[0]}; "
                        "give the optimizers in the order of the array's members"
                    )
            groups.append(tuple(place[1] for place in found if place is not None))
        result.append(groups)
    return result


def _rules(member: Optimizer, groups: Sequence[tuple[int, ...]]) -> tuple[tuple[Rule, tuple[int, ...]], ...] | None:
    """What must agree for optimizers to be updated together; None if this one steps by itself."""
    layout = []
    for group, columns in zip(member.param_groups, groups, strict=True):
        rule = rule_of(member, group)
        if rule is None:
            return None
        layout.append((rule, columns))
    return tuple(layout)
