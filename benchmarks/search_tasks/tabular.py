"""Tables: perceptrons on a made-up table of 32 columns, and linear models on handwritten digits."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from search_tasks.search import Supervised

__all__ = ["CLASSES", "COLUMNS", "Linear", "Tabular", "split"]

COLUMNS, CLASSES = 32, 4


class Tabular(Supervised):
    """A perceptron with two hidden layers.

    Args:
        rows: Rows of the table; four fifths of them are trained on.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def data(self, config):
        from sklearn.datasets import make_classification  # which a machine with a GPU may lack

        x, y = make_classification(
            self.rows, COLUMNS, n_informative=16, n_classes=CLASSES, n_clusters_per_class=4, random_state=0
        )
        return split(torch.tensor(x, dtype=torch.float32), torch.tensor(y), self.rows * 4 // 5)

    def model(self, config):
        width = config["width"]
        return nn.Sequential(
            *(nn.Linear(COLUMNS, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, CLASSES),
        )


class Linear(Supervised):
    """A linear classifier of digits of 8 x 8 pixels."""

    def data(self, config):
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return split(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y), 1437)

    def model(self, config):
        return nn.Linear(64, 10)

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])


def split(x, y, rows):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, valid = order[:rows], order[rows:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[valid], y[valid])
