"""A training whose steps are long enough to be divided between devices."""

from torch import nn

from search_tasks.stored import FromStorage

__all__ = ["Divided"]


class Divided(FromStorage):
    """A wide perceptron on the pictures of `FromStorage`."""

    def model(self, config):
        inputs = 784 if self.mnist.is_file() else 64
        hidden = nn.Sequential(nn.Linear(inputs, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
        return nn.Sequential(nn.Flatten(), hidden, nn.Linear(1024, 10))
