"""What a user writes: one class, plain PyTorch inside."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from shoal.trial import Config

__all__ = ["Task"]


class Task(ABC):
    """A training that a study searches the configuration of.

    Every method may read any part of the config. Trials whose `data` read equal values share one copy of the data, and
    trials whose models have one structure are trained as one; nothing needs to be marked.

    What becomes of it, alone or fused: torch is seeded with the trial's seed and `model` and `optimizer` are called.
    The model is set to training, and to evaluation for validation alone. At each epoch the training set is shuffled by
    the data seed and the epoch's number, cut into batches (the last may be smaller), and each is a training step on
    `loss`. Then `metrics` and `loss` are averaged over the validation set, weighted by batch size, `scheduler` steps
    once (`ReduceLROnPlateau` with the validation loss), and the averages are reported, the loss as `valid_loss`.

    Every process that needs the data calls `data`, with all random generators seeded alike. Batches are what
    `torch.utils.data.default_collate` makes of samples, on the trial's device. A sample is to depend on its index, and
    on what its data set draws from the generators of torch, Python and NumPy (not from one of its own): where it draws
    nothing it is not asked for again as long as it can be kept. The task is pickled (by cloudpickle): keep data sets
    out of its attributes and load them in `data`. One object serves many trials: what a method puts on `self` is seen
    by all of them. In the process that calls `tune` (`backend="inline"`, `Study.best_model`) that is the object given,
    which stays in memory as long as the process; if it has changed since (an attribute; a class, function or global of
    a script or a notebook), a copy of what it was, and neither ever changes the other.
    """

    shared_augmentation: bool = False
    """Whether what is drawn for a sample depends on the data seed, the epoch and the sample alone.

    It matters where samples draw random numbers (crops, flips, noise). By default these belong to the batch that the
    sample is in, so only trials of one batch size can share what was made of a sample. With True the generators are
    seeded for each sample by itself: trials of all batch sizes see the same augmented sample in the same epoch, and
    when they train in one process it is prepared once. Either way a trial sees the same samples alone as in company.
    """

    @abstractmethod
    def data(self, config: Config) -> tuple[Dataset[Any], Dataset[Any]]:
        """The training and the validation set, with a length and indices (map style)."""

    @abstractmethod
    def model(self, config: Config) -> nn.Module:
        """A new model with its initial weights."""

    @abstractmethod
    def optimizer(self, model: nn.Module, config: Config) -> Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]:
        """A new optimizer of the model's parameters; several for a `step` of your own."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean loss over a batch, a scalar."""

    def scheduler(self, optimizer: Any, config: Config) -> Any | None:
        """A torch LR scheduler of what `optimizer` returned, stepped once per epoch, or None; several for several."""
        return None

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Scalars by name, each a mean over a validation batch.

        Called without gradients, the model evaluating. A forward pass that `loss` made on the same tensors is not
        computed again.
        """
        return {}

    def batch_size(self, config: Config) -> int:
        """Samples per step."""
        size: int = config.get("batch_size", 32)
        return size

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        """One training step; returns the loss.

        To be overridden for several optimizers (a GAN), several losses, gradient clipping: whatever a training loop may
        do. Trials are still trained at once: `model` and `optimizer` then stand for all of them. Where the step asks
        for what each trial has of its own, a number or a closure (LBFGS), they take it one after another.

        Args:
            model: set to training.
            batch: as for `loss`.
            optimizer: what `optimizer` returned.
        """
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss
