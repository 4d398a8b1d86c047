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
        return (mlp if config["model"] == "mlp" else cnn)(config["width"], config["dropout"])

    def optimizer(self, model, config):
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"])

    def loss(self, model, batch):
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model, batch):
        images, labels = batch
        return {"accuracy": (model(images).argmax(1) == labels).float().mean()}


def mlp(width, dropout):
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def cnn(width, dropout):
    return nn.Sequential(
        nn.Conv2d(1, width // 8, 3, padding=1), nn.BatchNorm2d(width // 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width // 8, width // 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(width, 10),
    )  # fmt: skip


SPACE = {
    "model": shoal.choice(["mlp", "cnn"]),
    "lr": shoal.loguniform(1e-4, 1e-1),
    "width": shoal.choice([64, 128]),
    "dropout": shoal.uniform(0.0, 0.5),
    "batch_size": shoal.choice([32, 64]),
    "weight_decay": shoal.loguniform(1e-6, 1e-2),
}


def main():
    began = time.perf_counter()
    study = shoal.tune(Digits(), SPACE, metric="accuracy", mode="max", algorithm=shoal.Random(128, epochs=10))
    seconds = time.perf_counter() - began
    best = study.best_trial
    print(f"Best: accuracy {best.ranked['accuracy']:.4f} by trial {best.number}")
    for name, value in best.config.items():
        print(f"  {name} = {value:.4g}" if isinstance(value, float) else f"  {name} = {value}")
    epochs = sum(trial.epoch for trial in study.trials)
    print(f"{seconds:.1f} s for {len(study.trials)} trials, {epochs} epochs in all.")


if __name__ == "__main__":
    main()
