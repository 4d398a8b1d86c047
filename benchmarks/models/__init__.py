"""Models of the fusion benchmark, plain PyTorch. Sizes are reduced unless a GPU trains them (`full`)."""

from collections.abc import Callable

from models import bert, dcgan, mlp, mobilenet, peft_llama, pointnet, resnet, transformer
from models.workload import Batch, Phase, Workload

__all__ = ["WORKLOADS", "Batch", "Phase", "Workload"]

WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "pointnet-classification": pointnet.classification,
    "pointnet-segmentation": pointnet.segmentation,
    "dcgan": dcgan.workload,
    "resnet18": resnet.workload,
    "mobilenet": mobilenet.workload,
    "transformer": transformer.workload,
    "bert-medium": bert.workload,
    "mlp": mlp.workload,
    "lora": peft_llama.workload,
    "lora-mixed": peft_llama.mixed,
    "lora-batches": peft_llama.batches,
    "resnet18-half-fused": resnet.half_fused,
    "resnet18-unfused": resnet.unfused,
}
"""By the name that `--models` takes: sizes for a GPU or not -> the workload."""
