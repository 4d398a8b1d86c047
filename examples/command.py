"""A logistic regression on handwritten digits in NumPy, as a program of its own that knows next to nothing of Shoal.

Search its arguments with

    shoal run --space examples/command.toml --metric accuracy --mode max --algorithm hyperband --epochs 9 \
        -- python examples/command.py --lr {lr} --decay {decay}

or call it by hand: then its reports are printed.
"""

import argparse
import os

import numpy as np
from sklearn.datasets import load_digits

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--decay", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=100)
settings = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = images / 16
train, valid = slice(1437), slice(1437, None)
weights = np.zeros((64, 10))

kept = shoal.checkpoint() / "weights.npy" if "SHOAL_CHECKPOINT" in os.environ else None
if kept and kept.exists():
    weights = np.load(kept)
for epoch in range(shoal.step(), settings.epochs):
    scores = images[train] @ weights
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    gradient = images[train].T @ (chances - np.eye(10)[labels[train]]) / len(chances)
    weights -= settings.lr * (gradient + settings.decay * weights)
    if kept:
        np.save(kept, weights)
    right = (images[valid] @ weights).argmax(1) == labels[valid]
    shoal.report({"accuracy": right.mean()}, step=epoch + 1)
