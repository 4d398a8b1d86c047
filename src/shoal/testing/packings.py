"""Conformance suite for packings: checks the groups of invented arrays."""

import copy
from collections.abc import Callable, Sequence

from shoal.core.errors import PackError
from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.groups import check_groups

__all__ = ["check_packing"]


def check_packing(make: Callable[[], Packing], *, examples: int = 200) -> None:
    """Run the whole suite on a packing.

    Args:
        make: Factory of new instances with the same settings.
        examples: Number of contexts, with candidates, to invent.

    Raises:
        AssertionError: the contract of `shoal.plan.packing.Packing` is broken; hypothesis shows the smallest context
            and candidates that break it.
        ImportError: hypothesis is not installed.
    """
    try:
        from hypothesis import given, settings
    except ImportError as error:
        raise ImportError("check_packing needs hypothesis. Install it with: pip install hypothesis") from error
    from shoal.testing.strategies import packing_contexts

    @settings(max_examples=examples, deadline=None, database=None, report_multiple_bugs=False)
    @given(packing_contexts())
    def check(drawn: tuple[tuple[Candidate, ...], PackingContext]) -> None:
        _check(make, *drawn)

    check()


def _check(make: Callable[[], Packing], candidates: tuple[Candidate, ...], context: PackingContext) -> None:
    packing = make()
    before = copy.deepcopy((candidates, context))
    groups = packing.pack(candidates, context)
    assert (candidates, context) == before, "the packing changed what it was given"
    try:
        check_groups(groups, candidates, context)
    except PackError as error:
        raise AssertionError(f"the groups are illegal: {error}") from error
    found = _group_positions(groups, candidates)
    assert _group_positions(packing.pack(candidates, context), candidates) == found, (
        "a second call returns other groups"
    )
    assert _group_positions(make().pack(candidates, context), candidates) == found, (
        "another instance returns other groups"
    )


def _group_positions(groups: Sequence[Sequence[Candidate]], candidates: Sequence[Candidate]) -> list[list[int]]:
    """Return the groups as positions of candidates, since candidates may be equal."""
    place = {id(candidate): index for index, candidate in enumerate(candidates)}
    return [[place[id(candidate)] for candidate in group] for group in groups]
