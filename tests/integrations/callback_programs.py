"""Trainings with callbacks of four frameworks; one that `kill` says ends in the third epoch, once."""

import os
import signal
from pathlib import Path
from typing import Any

import torch

import shoal

EPOCHS = 1000
"""More than any budget: the study stops the training."""


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(16, 4, generator=generator)
    return features, features.sum(1, keepdim=True)


class KilledError(Exception):
    """Stands for a kill where the training is not in a process of its own."""


def kill_once(config: Any) -> None:
    marker = Path(config["marker"])
    if config["kill"] and not marker.exists():
        marker.touch()
        if config["kill"] == "raise":
            raise KilledError
        os.kill(os.getpid(), signal.SIGKILL)


def with_lightning(config: Any) -> None:
    import lightning.pytorch as lightning

    from shoal.integrations.lightning import ReportCheckpointCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def loss(self, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if self.current_epoch == 2:
                kill_once(config)
            return self.loss(batch)

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.loss(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.1)

    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), batch_size=8)
    callback = ReportCheckpointCallback()
    quiet = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[callback], **quiet)
    trainer.validate(Module(), loader)
    trainer.fit(Module(), loader, loader, ckpt_path=callback.ckpt_path)


def with_transformers(config: Any) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shoal.integrations.transformers import ReportCheckpointCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted = self.layer(features)
            return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}

    class Fault(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.epoch == 2:
                kill_once(config)

    torch.manual_seed(1)
    data = [{"features": x, "labels": y} for x, y in zip(*samples(), strict=True)]
    callback = ReportCheckpointCallback()
    arguments = TrainingArguments(
        output_dir=str(shoal.checkpoint()),
        eval_strategy="epoch",
        save_strategy="no",
        save_total_limit=1,
        num_train_epochs=EPOCHS,
        learning_rate=0.1,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=[callback, Fault()])
    trainer.evaluate()
    trainer.train(resume_from_checkpoint=callback.resume_from_checkpoint)


def with_keras(config: Any) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    from shoal.integrations.keras import ReportCheckpointCallback

    class Fault(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                kill_once(config)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.1), loss="mse")
    x, y = (each.numpy() for each in samples())
    callbacks = [Fault(), ReportCheckpointCallback()]
    model.fit(x, y, 8, EPOCHS, verbose=0, validation_data=(x, y), shuffle=False, callbacks=callbacks)


def with_skorch(config: Any) -> None:
    from skorch import NeuralNetRegressor
    from skorch.callbacks import Callback

    from shoal.integrations.skorch import ReportCheckpointCallback

    class Fault(Callback):
        def on_epoch_begin(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **kwargs: Any) -> None:
            if len(net.history) == 3:  # its row has begun
                kill_once(config)

    torch.manual_seed(1)
    net = NeuralNetRegressor(
        torch.nn.Linear,
        module__in_features=4,
        module__out_features=1,
        optimizer=torch.optim.Adam,
        lr=0.1,
        batch_size=8,
        max_epochs=EPOCHS - shoal.step(),
        callbacks=[ReportCheckpointCallback(), Fault()],
        verbose=0,
    )
    net.fit(*samples())
