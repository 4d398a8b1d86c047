"""Begin or resume a study: `python ray_engine.py DIRECTORY EPOCHS DEVICES [ADDRESS]`; a test kills this process.

It is a study over Ray if there is an address of a cluster.
"""

import sys
import time
from pathlib import Path
from typing import Any

import tasks
from torch import Tensor, nn

import shoal
from shoal.core.errors import JournalError

SPACE = {"lr": shoal.grid([0.003, 0.01, 0.03, 0.1]), "width": shoal.grid([6, 8])}


class Slow(tasks.Blobs):
    """Small models whose steps take some time, so that a test can interfere while they train."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.005)
        return super().loss(model, batch)


def search(directory: Path, epochs: int, **where: Any) -> shoal.Study:
    """Two structures of four trials each."""
    return shoal.tune(
        Slow(),
        SPACE,
        metric="valid_loss",
        mode="min",
        algorithm=shoal.Grid(epochs),
        directory=directory,
        checkpoint_seconds=0.2,
        show_progress=False,
        **where,
    )


def main(directory: str, epochs: str, devices: str, address: str = "") -> None:
    where = {"backend": "ray", "ray_address": address} if address else {}
    try:
        shoal.resume(directory, show_progress=False)
    except JournalError:
        search(Path(directory), int(epochs), devices=devices, **where)


if __name__ == "__main__":
    main(*sys.argv[1:])
