"""A runner that takes as long to import as torch does."""

import time

from shoal.testing.backends import follow

__all__ = ["follow"]

time.sleep(3)
