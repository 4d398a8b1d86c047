"""Samples that come from slow storage, and a plain PyTorch program that trains on them and reports.

A network file system takes about a millisecond to deliver a small file, in which the processor of the reader has
nothing to do. `time.sleep` stands for that wait: a real one would end with the first epoch, since the page cache keeps
small files. Each sample is augmented at random as it is read, so no epoch's samples can be kept for the next one.
Nobody reads ahead: a `DataLoader` with `num_workers`, or a task with `loader_workers`, would hide a part of the wait.
"""

import time
from itertools import count

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import shoal
from search_tasks.search import Supervised

__all__ = ["Stored", "program"]

NOISE = 0.02
"""Standard deviation of the noise that is added to each sample."""


class Stored(Dataset[tuple[Tensor, Tensor]]):
    """A data set, each sample of which comes after a wait, with a little noise.

    Args:
        samples: The data set: inputs and classes.
        count: Number of samples, the first ones.
        seconds: Wait for a sample.
    """

    def __init__(self, samples: TensorDataset, count: int, seconds: float) -> None:
        self.tensors = tuple(tensor[:count] for tensor in samples.tensors)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        x, y = (tensor[index] for tensor in self.tensors)
        return x + NOISE * torch.randn(x.shape), y


def program(task: Supervised, config) -> None:
    """Train as a plain PyTorch program does that keeps its state and calls `shoal.report` after each epoch."""
    train, valid = task.data(config)
    torch.manual_seed(0)
    model = task.model(config)
    optimizer = task.optimizer(model, config)
    state = shoal.checkpoint() / "state.pt"
    if state.exists():
        kept = torch.load(state, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        for group in optimizer.param_groups:  # of a trial of PBT that begins with the state of another one
            group["lr"] = config["lr"]
    for epoch in count(shoal.step()):  # the report of the last epoch of the budget does not return
        torch.manual_seed(epoch)
        model.train()
        for batch in DataLoader(train, config["batch_size"], shuffle=True):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            (batch,) = DataLoader(valid, len(valid))
            found = {
                "valid_loss": float(task.loss(model, batch)),
                "accuracy": float(task.metrics(model, batch)["accuracy"]),
            }
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, state)
        shoal.report(found, step=epoch + 1)
