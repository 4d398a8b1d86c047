"""Fixtures: one thread, and no autotuning, which would depend on the speed of the machine."""

from quiet import no_autotuning, one_thread

__all__ = ["no_autotuning", "one_thread"]
