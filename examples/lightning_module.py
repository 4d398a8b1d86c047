"""A LightningModule, unchanged, in a search over learning rate and width: trials of one width are one array.

python examples/lightning_module.py [--trials 8] [--epochs 4]
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import shoal
from shoal.integrations.lightning import LightningTask


class Digits(LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        whole = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
        self.train, self.valid = random_split(whole, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.valid, 128)


class Classifier(LightningModule):
    def __init__(self, lr, width):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        study = shoal.tune(
            LightningTask(Classifier, Digits, max_epochs=given.epochs, gradient_clip_val=1.0),
            {"lr": shoal.loguniform(1e-3, 3e-2), "width": shoal.choice([32, 64])},
            metric="accuracy", mode="max", algorithm=shoal.Random(given.trials, epochs=given.epochs),
            directory=f"{directory}/study", backend="inline",
        )  # fmt: skip
        best = study.best_trial
        print(f"Best of {given.trials} trials: accuracy {best.ranked['accuracy']:.3f} with {best.config}")
