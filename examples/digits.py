"""Handwritten digits: an MLP and a small CNN, searched over six hyper-parameters.

Run it with `shoal run examples/digits.py`, or as a plain script.
"""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import TensorDataset

import shoal


class Digits(shoal.Task):
    def data(self, config):
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        parts = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0, stratify=labels)
        return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])

    def model(self, config):
        width, dropout = config["width"], nn.Dropout(config["dropout"])
        if config["model"] == "mlp":
            return nn.Sequential(
                nn.Flatten(), nn.Linear(64, width), nn.ReLU(), dropout, nn.Linear(width, width), nn.ReLU(),
                nn.Linear(width, 10),
            )  # fmt: skip
        return nn.Sequential(
            nn.Conv2d(1, width // 8, 3, padding=1), nn.BatchNorm2d(width // 8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width // 8, width // 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), dropout, nn.Linear(width, 10),
        )  # fmt: skip

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model, batch):
        images, labels = batch
        return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


SPACE = {
    "model": shoal.choice(["mlp", "cnn"]),
    "lr": shoal.loguniform(1e-4, 1e-1),
    "width": shoal.choice([64, 128]),
    "dropout": shoal.uniform(0.0, 0.5),
    "batch_size": shoal.choice([32, 64]),
    "weight_decay": shoal.loguniform(1e-6, 1e-2),
}

if __name__ == "__main__":
    began = time.perf_counter()
    study = shoal.tune(
        Digits(), SPACE, metric="accuracy", mode="max", algorithm=shoal.Hyperband(max_epochs=27, eta=3)
    )
    print(time.perf_counter() - began, study.best_trial)
