"""Models of the fusion benchmark, plain PyTorch. Sizes are reduced unless a GPU trains them (`full`)."""

from collections.abc import Callable
from functools import partial

from models import bert, dcgan, mlp, mobilenet, peft_llama, pointnet, resnet, transformer
from models.workload import Batch, Phase, Workload

__all__ = ["WORKLOADS", "Batch", "Phase", "Workload"]

WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "pointnet-classification": partial(pointnet.workload, pointnet.Classifier),
    "pointnet-segmentation": partial(pointnet.workload, pointnet.Segmenter),
    "dcgan": dcgan.workload,
    "resnet18": resnet.workload,
    "mobilenet": mobilenet.workload,
    "transformer": transformer.workload,
    "bert-medium": bert.workload,
    "mlp": mlp.workload,
    "lora": partial(peft_llama.workload, ranks=(8,)),
    "lora-mixed": peft_llama.workload,
    "lora-batches": partial(peft_llama.workload, batch_sizes=(2, 4, 8)),
    "resnet18-half-fused": partial(resnet.workload, unfused=4),
    "resnet18-unfused": partial(resnet.workload, unfused=8),
}
"""By the name that `--models` takes: sizes for a GPU or not -> the workload."""
