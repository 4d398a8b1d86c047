"""Candidates and contexts that hypothesis invents, for the conformance suite of packings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from shoal.core.array import Array, FusionKey, Member
from shoal.core.trial import Trial
from shoal.planner.packing.base import Candidate, PackingContext

__all__ = ["packing_contexts"]

_GB = 10**9
_BATCH_SIZES = (20, 25, 40)
_AXES: Mapping[str, Sequence[object]] = {"batch_size": _BATCH_SIZES, "size": ("small", "medium", "large")}
_PACES = (0.5, 0.9, 1.0, 1.1, 2.0)


@st.composite
def packing_contexts(draw: st.DrawFn, most: int = 12) -> tuple[tuple[Candidate, ...], PackingContext]:
    """The arguments of a call of `Packing.pack`.

    Args:
        draw: by hypothesis.
        most: candidates.
    """
    numbers = iter(range(10**6))
    candidates = tuple(draw(_candidates(numbers)) for _ in range(draw(st.integers(0, most))))
    keys = list(dict.fromkeys(candidate.key for candidate in candidates))
    pairs = [frozenset((one, other)) for index, one in enumerate(keys) for other in keys[index:]]
    pack_speeds = draw(st.dictionaries(st.sampled_from(pairs), st.sampled_from(_PACES))) if pairs else {}
    context = PackingContext(
        loads=tuple(draw(st.lists(st.sampled_from((0.0, 0.0, 5.0, 100.0)), min_size=1, max_size=4))),
        memory=draw(st.sampled_from((0, 6, 12, 1000))) * _GB,
        start=draw(st.sampled_from((0.0, 1.0, 20.0))),
        pack_speeds=pack_speeds,
        axes=draw(st.sampled_from(({}, _AXES))),
        seed=draw(st.integers(0, 3)),
    )
    return candidates, context


@st.composite
def _candidates(draw: st.DrawFn, numbers: Iterator[int]) -> Candidate:
    batch_size = draw(st.sampled_from(_BATCH_SIZES))
    key = FusionKey(draw(st.sampled_from("ABC")), draw(st.sampled_from(("", "", "other"))), batch_size)
    members = tuple(
        Member(Trial(next(numbers), draw(_configs(batch_size)), seed=0, data_seed=0), start=0, target=1)
        for _ in range(draw(st.integers(1, 2)))
    )
    seconds = draw(st.sampled_from((0.0, 1.0, 10.0, 35.0, 100.0)))
    return Candidate(
        Array(key, members),
        seconds,
        fetching=seconds * draw(st.sampled_from((0.0, 0.1, 0.5, 1.0))),
        memory=draw(st.integers(0, 4)) * _GB,
        base=draw(st.integers(0, 2)) * _GB,
    )


@st.composite
def _configs(draw: st.DrawFn, batch_size: int) -> Mapping[str, Any]:
    optimizer = draw(st.sampled_from(({"name": "adam"}, {"name": "sgd", "momentum": 0.9})))
    config: dict[str, Any] = {"batch_size": batch_size, "optimizer": optimizer}
    config["lr"] = draw(st.sampled_from((1e-4, 0.003, 0.02, 0.3)))
    config["size"] = draw(st.sampled_from(("small", "medium", "large", "immense")))
    config["betas"] = draw(st.sampled_from(([0.9, 0.99], [0.5, 0.9])))
    return config
