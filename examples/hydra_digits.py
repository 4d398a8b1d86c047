"""Handwritten digits as a program of Hydra, whose multirun is a study by `pip install hydra-shoal-sweeper`:

    python examples/hydra_digits.py -m hydra/sweeper=shoal hydra.sweep.dir=runs/digits hydra.sweeper.n=32 \
        hydra.sweeper.metric=accuracy hydra.sweeper.mode=max \
        'lr=tag(log,interval(1e-4,1e-1))' width=64,128 'dropout=interval(0,0.5)'

Each trial calls `main`. With these two more, trials train as arrays:

        'hydra.sweeper.task={_target_:digits.Digits}' 'hydra.sweeper.algorithm={name:random,epochs:3}'
"""

from dataclasses import dataclass

import hydra
import torch
from digits import Digits
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from torch.utils.data import DataLoader


@dataclass
class Config:
    model: str = "mlp"
    lr: float = 1e-3
    width: int = 64
    dropout: float = 0.0
    batch_size: int = 64
    weight_decay: float = 1e-4
    epochs: int = 3


ConfigStore.instance().store(name="digits", node=Config)


@hydra.main(version_base=None, config_name="digits")
def main(cfg):
    task, config = Digits(), OmegaConf.to_container(cfg)
    train, valid = task.data(config)
    model = task.model(config)
    optimizer = task.optimizer(model, config)
    for _ in range(cfg.epochs):
        model.train()
        for batch in DataLoader(train, cfg.batch_size, shuffle=True):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = task.metrics(model, valid[:])["accuracy"].item()
    print(f"accuracy {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
