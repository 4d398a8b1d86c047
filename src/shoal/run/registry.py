"""The back ends by name."""

from shoal.core.errors import BackendError
from shoal.core.names import nearest_name_hint
from shoal.run.base import Backend
from shoal.run.inline import Inline
from shoal.run.local import Local
from shoal.run.nodes.ray import Ray
from shoal.run.nodes.slurm import Slurm

__all__ = ["BACKENDS", "backend_class"]

BACKENDS: dict[str, type[Backend]] = {
    "inline": Inline,
    "local": Local,
    "ray": Ray,
    "slurm": Slurm,
}


def backend_class(name: str) -> type[Backend]:
    """The class of the back end of a name; BackendError if there is none."""
    if name in BACKENDS:
        return BACKENDS[name]
    known = ", ".join(repr(each) for each in BACKENDS)
    raise BackendError(f"unknown back end {name!r}{nearest_name_hint(name, BACKENDS)}, known are {known}")
