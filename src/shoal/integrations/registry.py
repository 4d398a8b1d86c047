"""Registry of trackers: name to class."""

from collections.abc import Callable, Mapping

from shoal.callbacks.base import Callback
from shoal.integrations.mlflow import MLflowCallback
from shoal.integrations.tensorboard import TensorBoardCallback
from shoal.integrations.wandb import WandbCallback

__all__ = ["TRACKERS"]

TRACKERS: Mapping[str, Callable[[], Callback]] = {
    "mlflow": MLflowCallback,
    "tensorboard": TensorBoardCallback,
    "wandb": WandbCallback,
}
"""Name -> class; called without arguments it gives a tracker with the library's own settings."""
