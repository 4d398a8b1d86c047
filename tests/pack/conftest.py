"""One thread, and nothing that depends on the machine's speed."""

from quiet import no_autotuning, one_thread

__all__ = ["no_autotuning", "one_thread"]
