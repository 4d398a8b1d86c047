"""The three tasks of Fluid (Table 3) at a size for CPU cores, and one whose samples come from slow storage.

On CIFAR-10 the network has a quarter of the paper's channels and an eighth of its dense units. WikiText-2 is cut to its
2,000 most frequent words; layers are a fifth as wide, and their state begins anew with each sequence. The DCGAN has a
sixteenth of the channels.
"""

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from models import dcgan
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from search_tasks.pictures import GAN, Perceptron, Pictures, pictures
from search_tasks.stored import Stored

__all__ = ["DCGAN", "WIKITEXT", "AlexNet", "FromStorage", "Words"]

WIKITEXT = "wikitext2.npz"
WORDS = 2000


class AlexNet(Pictures):
    """Three blocks of convolutions and two dense layers on CIFAR-10."""

    def model(self, config):
        first, second, dense = config["conv_1"], config["conv_2"], config["dense_1"]
        return nn.Sequential(
            *(nn.Conv2d(3, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout(config["dropout_1"]), nn.Conv2d(second, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1024, dense), nn.ReLU(), nn.Dropout(config["dropout_2"]), nn.Linear(dense, 10)),
        )

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])


class Recurrent(nn.Module):
    """Recurrent layers of one of four kinds, and scores of the next word."""

    def __init__(self, kind, hidden, layers, dropout):
        super().__init__()
        make = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(kind) or partial(nn.RNN, nonlinearity=kind)
        self.embedding = nn.Embedding(WORDS, hidden)
        self.recurrent = make(hidden, hidden, layers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(hidden, WORDS)

    def forward(self, tokens):
        return self.decoder(self.recurrent(self.embedding(tokens))[0])


class Words(shoal.Task):
    """Predicts each next word of WikiText-2, whose words are numbered by their frequency."""

    def __init__(self, file, train, valid):
        self.file, self.counts = file, {"train": train, "valid": valid}

    def data(self, config):
        length, sets = config["bptt"], []
        with np.load(self.file) as arrays:
            for part, count in self.counts.items():
                words = torch.tensor(arrays[part][: count // length * length + 1].astype("int64")).clamp(max=WORDS - 1)
                sets.append(TensorDataset(words[:-1].view(-1, length), words[1:].view(-1, length)))
        return tuple(sets)

    def model(self, config):
        return Recurrent(config["kind"], config["hidden"], config["layers"], config["dropout"])

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def clip_norm(self, config):
        return config["clip"]

    def loss(self, model, batch):
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


class DCGAN(GAN):
    """A generative adversarial network of convolutions on MNIST, enlarged to 64 x 64 pixels."""

    def data(self, config):
        sets = []
        for part in ("train", "test"):
            x, _ = pictures(self.file, part, self.train)
            noise = torch.randn(len(x), dcgan.NOISE, 1, 1, generator=torch.Generator().manual_seed(0))
            sets.append(TensorDataset(F.interpolate(x, 64).repeat(1, 3, 1, 1), noise))
        return tuple(sets)

    def model(self, config):
        return dcgan.DCGAN(4)

    def optimizer(self, model, config):
        pairs = (model.discriminator, config["lr_d"]), (model.generator, config["lr_g"])
        return [torch.optim.Adam(each.parameters(), lr=lr, betas=(0.5, 0.999)) for each, lr in pairs]


class FromStorage(Perceptron):
    """A perceptron on MNIST, each picture of which comes after a wait of a millisecond."""

    def data(self, config):
        return tuple(Stored(each, len(each), 1e-3) for each in super().data(config))
