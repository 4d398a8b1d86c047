"""The back ends by name."""

import difflib

from shoal.backends.base import Backend
from shoal.backends.inline import Inline
from shoal.backends.local import Local
from shoal.backends.nodes.ray import Ray
from shoal.backends.nodes.slurm import Slurm
from shoal.core.errors import BackendError

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
    nearest = difflib.get_close_matches(str(name), BACKENDS, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise BackendError(f"unknown back end {name!r}, known are {known}{hint}")
