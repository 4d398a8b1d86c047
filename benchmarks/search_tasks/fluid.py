"""The three tasks of Fluid (Table 3) at a size for CPU cores, and one whose samples come from slow storage.

On CIFAR-10 the network has a quarter of the paper's channels and an eighth of its dense units. WikiText-2 is cut to its
2,000 most frequent words; layers are a fifth as wide, and their state begins anew with each sequence. The DCGAN makes
pictures of 16 x 16 pixels, and a linear classifier takes its inception score.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from search_tasks.pictures import GAN, Perceptron, Pictures, pictures
from search_tasks.stored import Stored

__all__ = ["DCGAN", "WIKITEXT", "AlexNet", "FromStorage", "Words"]

WIKITEXT = "wikitext2.npz"
WORDS, NOISE, WIDTH = 2000, 32, 8


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
        kinds = {"tanh": nn.RNN, "relu": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
        options = {"nonlinearity": kind} if kinds[kind] is nn.RNN else {}
        self.embedding = nn.Embedding(WORDS, hidden)
        self.recurrent = kinds[kind](hidden, hidden, layers, dropout=dropout, batch_first=True, **options)
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


class Both(nn.Module):
    """Generator and discriminator of one trial."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.ConvTranspose2d(NOISE, 2 * WIDTH, 4, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.ReLU()),
            *(nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()),
            *(nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(1, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(2 * WIDTH, 1, 4), nn.Flatten(0)),
        )


class DCGAN(GAN):
    """A generative adversarial network of convolutions on MNIST."""

    def __init__(self, file, train):
        super().__init__(file, train)
        x, y = self._small("train")
        x = F.pad(x.flatten(1), (0, 1), value=1.0)
        self.classifier = torch.linalg.solve(x.T @ x + 10 * torch.eye(x.shape[1]), x.T @ F.one_hot(y, 10).float())

    def _small(self, part):
        x, y = pictures(self.file, part, self.train)
        return F.avg_pool2d(F.pad(x, (2, 2, 2, 2), value=-1.0), 2), y

    def data(self, config):
        noise = torch.randn(self.train, NOISE, 1, 1, generator=torch.Generator().manual_seed(0))
        return tuple(TensorDataset(self._small(part)[0], noise) for part in ("train", "test"))

    def model(self, config):
        return Both()

    def optimizer(self, model, config):
        pairs = (model.discriminator, config["lr_d"]), (model.generator, config["lr_g"])
        return [torch.optim.Adam(each.parameters(), lr=lr, betas=(0.5, 0.999)) for each, lr in pairs]

    def metrics(self, model, batch):
        made = model.generator(batch[1]).flatten(1)
        of_each = (10 * (made @ self.classifier[:-1] + self.classifier[-1])).log_softmax(1)
        of_all = of_each.exp().mean(0)
        return {"inception": (of_each.exp() * (of_each - of_all.log())).sum(1).mean().exp()}


class FromStorage(Perceptron):
    """A perceptron on MNIST, each picture of which comes after a wait of a millisecond."""

    def data(self, config):
        return tuple(Stored(each, len(each), 1e-3) for each in super().data(config))
