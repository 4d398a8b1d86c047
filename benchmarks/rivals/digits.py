"""The search of `search_vs_peers.py` in plain PyTorch: one trial, and all trials as an ensemble of `torch.func`.

As a program it is one trial of Syne Tune. It imports torch alone, so that the processes of the rivals start fast.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["Sets", "ensemble", "indexed", "load", "model", "train"]

BATCH = 32
Sets = tuple[TensorDataset, TensorDataset]
"""The training and the validation set."""


def load() -> Sets:
    """Read the handwritten digits of scikit-learn, which four fifths of are for training."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    first, last = order[:1437], order[1437:]
    return TensorDataset(x[first], y[first]), TensorDataset(x[last], y[last])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def indexed(dataset: TensorDataset) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch, without a DataLoader."""
    x, y = dataset.tensors
    for rows in torch.randperm(len(dataset)).split(BATCH):
        yield x[rows], y[rows]


def train(sets: Sets, rate: float, number: int, epochs: int, loader: bool = True) -> float:
    """One trial, as a plain PyTorch script trains it; returns the validation accuracy."""
    torch.manual_seed(number)
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=rate)
    batches = DataLoader(sets[0], batch_size=BATCH, shuffle=True)
    for _ in range(epochs):
        net.train()
        for x, y in batches if loader else indexed(sets[0]):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            correct = [(net(x).argmax(1) == y).sum() for x, y in DataLoader(sets[1], batch_size=BATCH)]
    return float(sum(correct)) / len(sets[1])


def ensemble(sets: Sets, rates: Sequence[float], epochs: int) -> float:
    """Train a model for each learning rate at once; returns the best accuracy.

    The user writes the stack of parameters and Adam anew, as an optimizer of torch has one learning rate for a tensor.
    All models see the same batches.
    """
    models = []
    for number in range(len(rates)):
        torch.manual_seed(number)
        models.append(model())
    parameters = {name: stacked.detach() for name, stacked in stack_module_state(models)[0].items()}
    first = {name: torch.zeros_like(stacked) for name, stacked in parameters.items()}
    second = {name: torch.zeros_like(stacked) for name, stacked in parameters.items()}

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(models[0], own, (x,)), y)

    gradients = vmap(grad(loss), in_dims=(0, None, None))
    outputs = vmap(lambda own, x: functional_call(models[0], own, (x,)), in_dims=(0, None))
    steps = 0
    with torch.no_grad():
        for _ in range(epochs):
            for x, y in indexed(sets[0]):
                steps += 1
                for name, gradient in gradients(parameters, x, y).items():
                    first[name].lerp_(gradient, 0.1)
                    second[name].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                    size = torch.tensor(rates).view(-1, *[1] * (gradient.dim() - 1)) / (1 - 0.9**steps)
                    root = (second[name] / (1 - 0.999**steps)).sqrt_().add_(1e-8)
                    parameters[name].sub_(first[name].div(root).mul_(size))
            x, y = sets[1].tensors
            accuracies = (outputs(parameters, x).argmax(2) == y).float().mean(1)
    return float(accuracies.max())


def trial_of_syne_tune() -> None:
    from syne_tune import Reporter

    parser = argparse.ArgumentParser()
    for name, kind in {"lr": float, "number": int, "epochs": int, "data": Path}.items():
        parser.add_argument(f"--{name}", type=kind)
    given = parser.parse_known_args()[0]
    torch.set_num_threads(1)
    sets = tuple(TensorDataset(*tensors) for tensors in torch.load(given.data))
    Reporter()(accuracy=train(sets, given.lr, given.number, given.epochs))


if __name__ == "__main__":
    trial_of_syne_tune()
