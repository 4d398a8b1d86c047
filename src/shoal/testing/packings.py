"""Conformance suite for packings: checks the packs of invented arrays."""

import copy
from collections.abc import Callable, Sequence

from shoal.core.errors import PackError
from shoal.plan.packing.base import Candidate, Packing, PackingContext
from shoal.plan.packing.packs import check_packs

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
    packs = packing.pack(candidates, context)
    assert (candidates, context) == before, "the packing changed what it was given"
    try:
        check_packs(packs, candidates, context)
    except PackError as error:
        raise AssertionError(f"the packs are illegal: {error}") from error
    found = _pack_positions(packs, candidates)
    assert _pack_positions(packing.pack(candidates, context), candidates) == found, "a second call returns other packs"
    assert _pack_positions(make().pack(candidates, context), candidates) == found, (
        "another instance returns other packs"
    )


def _pack_positions(packs: Sequence[Sequence[Candidate]], candidates: Sequence[Candidate]) -> list[list[int]]:
    """Return the packs as positions of candidates, since candidates may be equal."""
    place = {id(candidate): index for index, candidate in enumerate(candidates)}
    return [[place[id(candidate)] for candidate in pack] for pack in packs]
