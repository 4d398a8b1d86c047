"""Models of the fusion benchmark, plain PyTorch. Sizes are reduced unless a GPU trains them (`full`)."""

from collections.abc import Callable

from models import bert, dcgan, lora, lstm, mlp, mobilenet, peft_llama, pointnet, resnet, transformer
from models.workload import Batch, Phase, Workload

__all__ = ["WORKLOADS", "Batch", "Phase", "Workload"]

WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "mlp": mlp.workload,
    "transformer": transformer.workload,
    "bert-tiny": bert.tiny,
    "bert-medium": bert.medium,
    "lstm": lstm.workload,
    "lora": lora.workload,
    "lora-ranks": lora.ranks,
    **peft_llama.kinds(),
    "peft-words": peft_llama.words,
    "pointnet-classification": pointnet.classification,
    "pointnet-segmentation": pointnet.segmentation,
    "dcgan": dcgan.workload,
    "resnet18": resnet.workload,
    "mobilenet": mobilenet.workload,
}
"""By the name that `--models` takes: sizes for a GPU or not -> the workload."""
