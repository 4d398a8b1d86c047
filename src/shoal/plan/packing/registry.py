"""Registry of packings: name to class, and `make_packing`."""

from shoal.core.errors import PackError
from shoal.plan.packing.base import NoPacking, Packing
from shoal.plan.packing.cost import CostPacking
from shoal.plan.schedule.registry import unknown

__all__ = ["PACKINGS", "make_packing"]

PACKINGS: dict[str, type[Packing]] = {
    "cost": CostPacking,
    "none": NoPacking,
}


def make_packing(packing: str | Packing) -> Packing:
    """Return the packing of this name, else a PackError; a packing object is returned unchanged."""
    if isinstance(packing, Packing):
        return packing
    if not isinstance(packing, str) or packing not in PACKINGS:
        raise PackError(unknown("packing", packing, PACKINGS))
    return PACKINGS[packing]()
