"""Tasks that a GPU is to train: the networks of other searches at their full size, without files that it may lack."""

import torch
from models.resnet import BLOCKS, resnet
from torch.utils.data import TensorDataset

from search_tasks.pictures import Pictures
from search_tasks.search import Supervised
from search_tasks.tabular import CLASSES, COLUMNS, Tabular, split
from search_tasks.text import WORDS, Reviews

__all__ = ["ResNet", "Rows", "Sentences"]


class ResNet(Pictures):
    """ResNet-18 on pictures of 32 x 32 pixels, by SGD with momentum; `width` is that of its first layer."""

    eval_batch_size = Supervised.eval_batch_size

    def __init__(self, file, train, valid, width):
        super().__init__(file, train, valid)
        self.width = width

    def model(self, config):
        return resnet(self.width, BLOCKS[18])

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)


class Rows(Tabular):
    """A perceptron on random rows, whose classes are those of a linear model."""

    def data(self, config):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, COLUMNS, generator=generator)
        y = (x @ torch.randn(COLUMNS, CLASSES, generator=generator)).argmax(1)
        return split(x, y, self.rows * 4 // 5)


class Sentences(Reviews):
    """BERT-Tiny on random sentences, which the first word classifies."""

    def data(self, config):
        x = torch.randint(1, WORDS, (self.train + self.valid, self.length), generator=torch.Generator().manual_seed(0))
        y = (x[:, 0] < WORDS // 2).long()
        return TensorDataset(x[: self.train], y[: self.train]), TensorDataset(x[self.train :], y[self.train :])
