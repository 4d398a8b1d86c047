"""Searches that are timed from the call begin as the first of their process."""

import os
import time

__all__ = ["first_search"]


def first_search() -> None:
    """Change the environment, so that the next search has no server of workers of the one before."""
    os.environ["FIRST_SEARCH"] = str(time.monotonic_ns())
