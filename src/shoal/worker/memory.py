"""Memory of a device that arrays have had."""

import gc

import torch

__all__ = ["give_back"]


def give_back(device: torch.device) -> None:
    """Let memory of a GPU that nobody refers to any more be used by others."""
    if device.type == "cuda":
        gc.collect()  # an array is a cycle
        torch.cuda.empty_cache()
