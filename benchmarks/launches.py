"""Kernel launches and host waits of one settled training step on a GPU, counted without one (`pretended_gpu.py`).

Members differ in learning rate, weight decay, dropout rate, label smoothing, momentum of batch norms and LoRA's alpha;
gradients are clipped. Per step mode: of the forward and backward pass, of the optimizer, and of the rest of a step.
What a captured step launches are the copies around its graph and the graph, as one; its kernels are counted as well.
Batches are on the GPU already. Waits that the model's own code makes, which a plain loop makes as well, are left out of
what is judged (a look at the positions of tokens in `transformers`).

    python benchmarks/launches.py [--models mlp transformer resnet18 bert-tiny lora] [--members 8] [--quick]
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from models import WORKLOADS, peft_llama
from pretended_gpu import Counts, PretendedGpu
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.capture import CapturedStep
from shoal.fuse.grads import parse_thresholds
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep

MOST_LAUNCHES = 1.2
"""Asked of the array's optimizer in an eager step: launches over the number of stacked parameter tensors."""

MODES = ("plain", "eager", "captured")
CLIP_NORM = 1.0
Figures = dict[str, Any]


def main() -> int:
    options = arguments()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    figures: dict[str, Figures] = {}
    missed: list[str] = []
    print(f"{'':34}{'forward+backward':>18}{'optimizer':>11}{'rest':>6}{'waits':>7}   in the graph", flush=True)
    for name in options.models:
        for kind in options.optimizers:
            for mode in MODES:
                title = f"{name}, {kind}, {mode}"
                found = measured(name, OPTIMIZERS[kind], mode, options.members)
                figures[title] = found
                missed += [f"{title}: {fault}" for fault in faults(mode, found)]
                print(row(title, found), flush=True)
    print(json.dumps({"figures": figures, "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two models, four members, Adam")
    options = parser.parse_args()
    if options.quick:
        options.models, options.members, options.optimizers = ["mlp", "transformer"], 4, ["Adam"]
    return options


class Smoothed(nn.Module):
    """A model with dropout before its head and a label smoothing of its own."""

    def __init__(self, body: nn.Module, rate: float, smoothing: float) -> None:
        super().__init__()
        self.body = body
        self.rate = rate
        self.smoothing = smoothing

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return F.dropout(out, self.rate, self.training)


def smoothed_loss(net: Any, batch: Any) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(net(inputs).flatten(0, -2), labels.flatten(), label_smoothing=net.smoothing)


def member_of(name: str) -> Callable[[int], nn.Module]:
    """Member b of a workload, with settings of its own."""

    def make(b: int) -> nn.Module:
        net = WORKLOADS[name](False).model()
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1 + 0.05 * b
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.1 + 0.05 * b
            elif isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.1 + 0.01 * b
        return Smoothed(net, 0.1 + 0.05 * b, 0.02 * b)

    return make


def adapted(b: int) -> nn.Module:
    return peft_llama.Base(False).adapted(peft_llama.Adapter(rank=8, alpha=8 + b))


MODELS: dict[str, tuple[str, Callable[[int], nn.Module], Callable[[Any, Any], Tensor]]] = {
    "mlp": ("mlp", member_of("mlp"), smoothed_loss),
    "transformer": ("transformer", member_of("transformer"), smoothed_loss),
    "resnet18": ("resnet18", member_of("resnet18"), smoothed_loss),
    "bert-tiny": (
        "bert-tiny",
        lambda b: WORKLOADS["bert-tiny"](False).model(),
        WORKLOADS["bert-tiny"](False).phases[0].loss,
    ),
    "lora": ("peft-same-float32", adapted, peft_llama.loss),
}
"""By the name that `--models` takes: the workload whose batches it gets, what makes member b, the loss."""

OPTIMIZERS: dict[str, Callable[[Sequence[Tensor], int], Optimizer]] = {
    "SGD": lambda params, b: torch.optim.SGD(params, lr=1e-2 * (1 + b), momentum=0.9, weight_decay=1e-3 * (1 + b)),
    "Adam": lambda params, b: torch.optim.Adam(params, lr=1e-3 * (1 + b), weight_decay=1e-3 * (1 + b)),
}


def measured(name: str, make: Callable[[Sequence[Tensor], int], Optimizer], mode: str, members: int) -> Figures:
    """The counts of one settled step."""
    workload, of_member, loss = MODELS[name]
    torch.manual_seed(0)
    extra, *models = (of_member(b).train() for b in (0, *range(members)))
    batch = WORKLOADS[workload](False).batch()
    with PretendedGpu() as gpu:
        gpu.claim(extra, models, batch)
        with gpu.counting() as alone:
            loss(extra.eval(), batch)
        array = fuse(models, seeds=range(members))
        params = [[p for p in model.parameters() if p.requires_grad] for model in models]
        optimizer = fuse_optimizers([make(own, b) for b, own in enumerate(params)], array)
        stacked = sum(p.requires_grad for p in array.parameters())
        step: Any = TrainingStep(array, optimizer, loss, ("plain" if mode == "plain" else "eager",), max_norm=CLIP_NORM)
        while step.mode is None:
            step(batch)
        try:
            take = captured(step, optimizer, batch) if mode == "captured" else step
        except FusionError as reason:
            return {"refused": str(reason)}
        take(batch)
        passes, updates = Counts(), Counts()
        if mode == "plain":
            watch(gpu, step._plain, "_backward", passes)
            watch(gpu, optimizer, "step_each", updates)
        elif mode == "eager":
            watch(gpu, step, "gradients", passes)
            watch(gpu, optimizer, "step", updates)
        with gpu.counting() as counts:
            take(batch)
    rest = counts.launches.total() - passes.launches.total() - updates.launches.total()
    return {
        "launches": {
            "forward+backward": passes.launches.total(),
            "optimizer": updates.launches.total(),
            "rest": rest,
        },
        "in_graph": counts.in_graphs.total(),
        "waits": dict(counts.waits),
        "waits_of_model": alone.waits.total() * (members if mode == "plain" else mode == "eager"),
        "stacked_parameters": stacked,
    }


def captured(step: TrainingStep, optimizer: Any, batch: Any) -> Callable[[Any], Tensor]:
    """What takes captured steps of an array that has begun to train."""
    max_norms = parse_thresholds(step.array, CLIP_NORM, "max_norm")
    graph = CapturedStep(step.array, optimizer, step.loss, batch, compiling=False, max_norms=max_norms)

    def take(batch: Any) -> Tensor:
        if not graph.fits(batch):
            raise RuntimeError("the recorded step does not fit any more, though nothing has changed")
        return graph(batch)

    return take


def watch(gpu: PretendedGpu, owner: Any, name: str, counts: Counts) -> None:
    """Count a method of an object."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with gpu.counting(counts):
            return method(*args, **kwargs)

    setattr(owner, name, watched)


def faults(mode: str, found: Figures) -> list[str]:
    """What was asked and is missed."""
    if "refused" in found:
        return [found["refused"]]
    missed = []
    if waits := sum(found["waits"].values()) - found["waits_of_model"]:
        missed.append(f"{waits} host waits")
    most = MOST_LAUNCHES * found["stacked_parameters"]
    if found["launches"]["optimizer"] > most and mode == "eager":
        missed.append(f"{found['launches']['optimizer']} launches of the optimizer, asked {most:.0f}")
    return missed


def row(title: str, found: Figures) -> str:
    if "refused" in found:
        return f"{title:34}{'refused: ' + found['refused']}"
    numbers = found["launches"]
    line = f"{title:34}{numbers['forward+backward']:18}{numbers['optimizer']:11}{numbers['rest']:6}"
    waits = "".join(f"\n{'':10}{number:4} {name}" for name, number in sorted(found["waits"].items()))
    return f"{line}{sum(found['waits'].values()):7}{found['in_graph'] or '':>15}{waits}"


if __name__ == "__main__":
    sys.exit(main())
