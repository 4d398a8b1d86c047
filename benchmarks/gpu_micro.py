"""Parts of a step on a GPU: lowerings of optimizers and convolutions, and the workspaces of two recorded steps.

- optimizers    one update of B ResNet-18: Shoal's lowerings; torch's fused kernels, member by member and, recorded as
                one graph, without the launches; and as a floor one optimizer over all members' parameters, which knows
                one learning rate
- convolutions  forward and backward pass of those of a ResNet-18, B members: one with B groups, a loop, a loop whose
                members have a stream each, and unfolded to matrix products; float32, bfloat16, bfloat16 with channels
                last. Each is recorded as a CUDA graph, and the graph is timed
- hazards       two steps of one process, each recorded as a CUDA graph: (1) both are replayed at once, on two streams;
                (2) one is dropped, its memory filled, and the other replayed. Their losses must stay as they were alone

Milliseconds, medians. On a CPU, for which no figure here is meant, nothing is recorded and there are no streams.

    python benchmarks/gpu_micro.py [--parts optimizers convolutions hazards] [--members 8] [--quick]
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, get_args

import torch
import torch.nn.functional as F
from models.resnet import BLOCKS, resnet
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.fuse.api import fuse
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.optim.param_group_batch import Lowering

RUNS, REPEATS = 5, 10
"""Rounds of which the median counts, and calls in each."""
WARM_UP = 3
STREAM_ROUNDS, REPLAYS = 300, 4
POOLED_STREAMS = 32
"""Streams that torch hands out in turn."""
FILLED_BYTES = 2 * 2**30
"""Taken and overwritten after a graph is dropped."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], Any], device: torch.device, quick: bool) -> float:
    """Median time of a call, the device's work included."""
    runs, repeats = (1, 1) if quick else (RUNS, REPEATS)
    call()
    times = []
    for _ in range(runs):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - began) / repeats)
    return round(median(times), 4)


def recorded(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The call as a CUDA graph; itself on a CPU."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def optimizers(options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Milliseconds of one update of all members, by optimizer and lowering."""
    found: dict[str, float] = {}
    width = 4 if device.type == "cpu" else 64
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "Adam": torch.optim.Adam,
        "SGD": partial(torch.optim.SGD, momentum=0.9),
    }
    for name, kind in kinds.items():
        for lowering in (None, *get_args(Lowering)):
            models = [resnet(width, BLOCKS[18]).to(device) for _ in range(options.members)]
            array = fuse(models)
            own = [kind(model.parameters(), lr=1e-3 * (b + 1)) for b, model in enumerate(models)]
            try:
                optimizer = fuse_optimizers(own, array, lowering=lowering)
                for parameter in array.parameters():
                    parameter.grad = torch.ones_like(parameter)
                taken = milliseconds(optimizer.step, device, options.quick)
            except (ShoalError, RuntimeError) as error:
                print(f"{name}, Shoal {lowering or 'by itself'}: fails: {str(error)[:90]}", flush=True)
                continue
            found[f"{name}, Shoal {lowering or 'by itself'}"] = taken
        models = [resnet(width, BLOCKS[18]).to(device) for _ in range(options.members)]
        params = [list(model.parameters()) for model in models]
        every = [parameter for own in params for parameter in own]
        for parameter in every:
            parameter.grad = torch.ones_like(parameter)
        graphs = {"capturable": True} if kind is torch.optim.Adam and device.type == "cuda" else {}
        each = [kind(own, lr=1e-3 * (b + 1), fused=True, **graphs) for b, own in enumerate(params)]
        all_at_once = kind(every, lr=1e-3, fused=True, **graphs)

        def members(each: Sequence[torch.optim.Optimizer] = each) -> None:
            for optimizer in each:
                optimizer.step()

        found[f"{name}, torch fused, member by member"] = milliseconds(members, device, options.quick)
        found[f"{name}, the same, recorded"] = milliseconds(recorded(members, device), device, options.quick)
        found[f"{name}, floor, recorded"] = milliseconds(recorded(all_at_once.step, device), device, options.quick)
    for name, taken in found.items():
        print(f"{name:40} {taken:9.3f}", flush=True)
    return found


@dataclass(frozen=True)
class Shape:
    """A convolution of a ResNet-18 on pictures of 32 x 32 pixels."""

    inputs: int
    outputs: int
    pixels: int
    kernel: int
    stride: int

    def __str__(self) -> str:
        return f"{self.inputs}->{self.outputs} {self.kernel}x{self.kernel}/{self.stride} at {self.pixels}"

    def run(self, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
        return F.conv2d(x, weight, None, self.stride, self.kernel // 2, 1, groups)


SHAPES = (
    Shape(64, 64, 32, 3, 1), Shape(64, 128, 32, 3, 2), Shape(128, 128, 16, 3, 1), Shape(128, 256, 16, 3, 2),
    Shape(256, 256, 8, 3, 1), Shape(256, 512, 8, 3, 2), Shape(512, 512, 4, 3, 1), Shape(64, 128, 32, 1, 2),
)  # fmt: skip
QUICK_SHAPES = (Shape(4, 8, 4, 3, 2),)
MOST_COLUMNS = 2**30
"""Elements of the columns of all members, beyond which nothing is unfolded."""
KINDS = {
    "float32": (torch.float32, torch.contiguous_format),
    "bfloat16": (torch.bfloat16, torch.contiguous_format),
    "bfloat16, channels last": (torch.bfloat16, torch.channels_last),
}
"""Type, and order of the axes in memory."""


def lowerings(shape: Shape, x: Tensor, weights: Sequence[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """All members' convolutions of [N, B*C, H, W] with B weights [O, C, K, K], each lowering in its own layout."""
    members = len(weights)
    together = torch.cat(list(weights)).detach().requires_grad_()
    parts = x.detach().chunk(members, 1)
    own = [part.contiguous(memory_format=_order(x)).requires_grad_() for part in parts]
    whole = x.detach().requires_grad_()
    streams = [torch.cuda.Stream() for _ in range(members)] if x.is_cuda else []

    def backward(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
        gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs])
        return gradients[0]

    def grouped() -> Tensor:
        return backward([shape.run(whole, together, members)], [whole, together])

    def loop() -> Tensor:
        return backward([shape.run(*pair) for pair in zip(own, weights, strict=True)], [*own, *weights])

    def forked() -> Tensor:
        current, outputs = torch.cuda.current_stream(), []
        for stream, *pair in zip(streams, own, weights, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                outputs.append(shape.run(*pair))
        for stream in streams:
            current.wait_stream(stream)
        return backward(outputs, [*own, *weights])

    def unfolded() -> Tensor:
        rows = whole.view(len(whole) * members, shape.inputs, *whole.shape[2:])
        columns = F.unfold(rows, shape.kernel, 1, shape.kernel // 2, shape.stride)
        columns = columns.view(len(whole), members, *columns.shape[1:])
        return backward([torch.matmul(together.view(members, shape.outputs, -1), columns)], [whole, together])

    found = {"grouped": grouped, "loop": loop}
    if streams:
        found["streams"] = forked
    columns = x.numel() * shape.kernel**2 // shape.stride**2
    if columns <= MOST_COLUMNS and _order(x) is torch.contiguous_format:
        found["unfolded"] = unfolded
    return found


def _order(x: Tensor) -> torch.memory_format:
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def convolutions(options: argparse.Namespace, device: torch.device) -> dict[str, dict[str, float]]:
    """Milliseconds by shape and kind, then by lowering."""
    samples = 2 if options.quick else 64
    found: dict[str, dict[str, float]] = {}
    for shape in QUICK_SHAPES if options.quick else SHAPES:
        for kind, (dtype, order) in KINDS.items():
            size = (samples, options.members * shape.inputs, shape.pixels, shape.pixels)
            x = torch.randn(size, device=device, dtype=dtype).to(memory_format=order)
            kernel = (shape.outputs, shape.inputs, shape.kernel, shape.kernel)
            weights = [torch.randn(kernel, device=device, dtype=dtype) for _ in range(options.members)]
            weights = [weight.to(memory_format=order).requires_grad_() for weight in weights]
            row = {}
            for name, lowering in lowerings(shape, x, weights).items():
                try:
                    row[name] = milliseconds(recorded(lowering, device), device, options.quick)
                except RuntimeError as error:
                    print(f"{shape}, {kind}, {name}: fails: {str(error)[:90]}", flush=True)
            found[f"{shape}, {kind}"] = row
            print(f"{shape!s:24} {kind:24} " + "  ".join(f"{name} {taken:.3f}" for name, taken in row.items()),
                  flush=True)  # fmt: skip
    return found


def hazards(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """How often two recorded steps had other losses than alone."""
    wide = 64 if device.type == "cpu" else 8192
    made = []
    for seed in (1, 2):
        made.append(recorded_step(seed, wide, device))
        for _ in range(POOLED_STREAMS - 1 if device.type == "cuda" else 0):
            torch.cuda.Stream()  # so that both steps are recorded on the same one
    steps, batches = zip(*made, strict=True)
    del made
    alone = [torch.stack([step(batch) for _ in range(REPLAYS)]) for step, batch in zip(steps, batches, strict=True)]
    same = [bool((losses == losses[0]).all()) for losses in alone]
    print(f"alone, each step has the same losses each time: {same}")
    rounds = 2 if options.quick else STREAM_ROUNDS
    streams = [torch.cuda.Stream() for _ in steps] if device.type == "cuda" else []
    different = 0
    for _ in range(rounds):
        found = []
        for number, (step, batch) in enumerate(zip(steps, batches, strict=True)):
            if not streams:
                found.append(torch.stack([step(batch) for _ in range(REPLAYS)]))
                continue
            streams[number].wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(streams[number]):
                found.append(torch.stack([step(batch) for _ in range(REPLAYS)]))
        synchronize(device)
        different += sum(bool((now != then[0]).any()) for now, then in zip(found, alone, strict=True))
    print(f"(1) replayed on two streams: {different} of {2 * rounds} have other losses than alone")
    (kept, _), (batch, _) = steps, batches
    del steps, step, found
    gc.collect()
    filled = []
    if device.type == "cuda":
        torch.cuda.empty_cache()
        filled = [torch.full((2**20,), torch.nan, device=device) for _ in range(FILLED_BYTES // 2**22)]
    after = torch.stack([kept(batch) for _ in range(rounds)])
    intact = all(bool(part.isnan().all()) for part in filled)
    wrong = int((after != alone[0][0]).any(1).sum())
    print(f"(2) after the other was dropped: {wrong} of {rounds} have other losses; "
          f"memory that was taken then is {'as it was' if intact else 'overwritten'}")  # fmt: skip
    return {"repeats alone": all(same), "streams": different, "dropped": wrong, "memory intact": intact}


def recorded_step(seed: int, wide: int, device: torch.device) -> tuple[CapturedStep, list[Tensor]]:
    """A step of two members whose thin and long products need a workspace, and its batch; the learning rate is 0."""
    torch.manual_seed(seed)
    models = [
        nn.Sequential(
            nn.Linear(wide, 256), nn.ReLU(), nn.Linear(256, wide), nn.ReLU(), nn.Linear(wide, 16)
        ).to(device)
        for _ in range(2)
    ]  # fmt: skip
    array = fuse(models, seeds=[0, 1])
    optimizer = fuse_optimizers([torch.optim.SGD(model.parameters(), 0.0) for model in models], array)
    batch = [torch.randn(64, wide, device=device), torch.randint(0, 16, (64,), device=device)]

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    array.map(loss, batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    array.map(loss, batch).sum().backward()
    return CapturedStep(array, optimizer, loss, batch, compiling=False), batch


def missed(found: dict[str, Any]) -> list[str]:
    """What is wrong with recorded steps; times are not judged."""
    said = []
    if found["streams"]:
        said.append(f"hazards: {found['streams']} replays on two streams had other losses than alone")
    if found["dropped"] or not found["memory intact"]:
        said.append(f"hazards: {found['dropped']} replays had other losses after another recorded step was dropped")
    return said


PARTS = {"optimizers": optimizers, "convolutions": convolutions, "hazards": hazards}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--members", type=int, default=8, help="B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="B = 2, one small convolution; judges nothing")
    options = parser.parse_args()
    if options.quick:
        options.members = 2
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, Python {platform.python_version()}, torch {torch.__version__}, B = {options.members}; milliseconds")
    figures = {part: PARTS[part](options, device) for part in options.parts}
    faults = missed(figures["hazards"]) if "hazards" in figures and not options.quick else []
    print(json.dumps({**figures, "missed": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
