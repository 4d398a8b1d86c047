"""Handwritten digits: an MLP and a small CNN, searched over six hyper-parameters.

Run it with `shoal run examples/digits.py`, or as a plain script.
"""

import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def plain_loop(task, config, epochs):
    """Train one configuration without Shoal, as most people do, and return the seconds it took."""
    train, valid = task.data(config)
    began = time.perf_counter()
    model = task.model(config)
    optimizer = task.optimizer(model, config)
    for _ in range(epochs):
        model.train()
        for batch in DataLoader(train, config["batch_size"], shuffle=True):
            task.step(model, batch, optimizer)
        model.eval()
        with torch.no_grad():
            for batch in DataLoader(valid, config["batch_size"]):
                task.loss(model, batch)
                task.metrics(model, batch)
    return time.perf_counter() - began


def estimate_plain_loop(task, trials):
    """Seconds that a plain loop over all trials would take, from a measured sample of one trial of each kind."""
    kinds = {}
    for trial in sorted(trials, key=lambda trial: trial.epoch):
        kinds.setdefault(tuple(trial.config[name] for name in ("model", "width", "batch_size")), []).append(trial)
    sample = [alike[len(alike) // 2] for alike in kinds.values()]
    estimate = 0.0
    for trial, alike in zip(sample, kinds.values(), strict=True):
        seconds = min(plain_loop(task, trial.config, trial.epoch) for _ in range(2))  # first steps are slow
        estimate += seconds * sum(each.epoch for each in alike) / trial.epoch
    return estimate, sample


def main():
    began = time.perf_counter()
    study = shoal.tune(Digits(), SPACE, metric="accuracy", mode="max", algorithm=shoal.Random(128, epochs=10))
    seconds = time.perf_counter() - began
    best = study.best_trial
    print(f"Best: accuracy {best.metrics['accuracy']:.4f} by trial {best.number}")
    for name, value in best.config.items():
        print(f"  {name} = {value:.4g}" if isinstance(value, float) else f"  {name} = {value}")
    epochs = sum(trial.epoch for trial in study.trials)
    print(f"Shoal: {seconds:.1f} s for {len(study.trials)} trials, {epochs} epochs in all.")
    plain, sample = estimate_plain_loop(Digits(), study.trials)
    print(f"A plain loop: about {plain:.1f} s, {plain / seconds:.1f} times as long.")
    threads = torch.get_num_threads()
    print(f"This is estimated from a sample of {len(sample)} trials, one of each model, width and batch size,")
    print(f"trained with a DataLoader and PyTorch's {threads} default threads; of two runs the faster counts.")


if __name__ == "__main__":
    main()
