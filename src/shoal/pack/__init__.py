"""Pack: trains several models, of any structure, in one process on one data stream."""

from shoal.pack.loaded import Loaded, free, load
from shoal.pack.pack import Pack

__all__ = ["Loaded", "Pack", "free", "load"]
