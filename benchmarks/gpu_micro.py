"""Parts of a step on a GPU: lowerings of optimizers and convolutions, and the workspaces of two recorded steps.

- optimizers    one update of B ResNet-18: Shoal's lowerings; torch's fused kernels, member by member and, recorded as
                one graph, without the launches; and as a floor one optimizer over all members' parameters, which knows
                one learning rate
- convolutions  forward and backward pass of those of a ResNet-18, B members: one with B groups, a loop, and unfolded to
                matrix products; float32, bfloat16, bfloat16 with channels last. Each is recorded as a CUDA graph, and
                the graph is timed
- hazards       two steps of one process, each recorded as a CUDA graph: (1) both are replayed at once, on two streams;
                (2) one is dropped, its memory filled, and the other replayed. Their losses must stay as they were alone

Milliseconds, medians. On a CPU, for which no figure here is meant, nothing is recorded and there are no streams.

    python benchmarks/gpu_micro.py [--parts optimizers convolutions hazards] [--quick]
"""

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, get_args

import torch
import torch.nn.functional as F
from models.resnet import BLOCKS, resnet
from torch import Tensor, nn

from shoal.fuse.api import fuse
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.optim.param_group_batch import Lowering

RUNS, REPEATS = 5, 10
"""Rounds of which the median counts, and calls in each."""
MEMBERS = 8
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


def optimizers(device: torch.device, members: int, quick: bool) -> dict[str, float]:
    """Milliseconds of one update of all members, by optimizer and lowering."""
    found: dict[str, float] = {}
    width = 4 if device.type == "cpu" else 64
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "Adam": torch.optim.Adam,
        "SGD": partial(torch.optim.SGD, momentum=0.9),
    }
    for name, kind in kinds.items():
        for lowering in (None, *get_args(Lowering)):
            models = [resnet(width, BLOCKS[18]).to(device) for _ in range(members)]
            array = fuse(models)
            own = [kind(model.parameters(), lr=1e-3 * (b + 1)) for b, model in enumerate(models)]
            optimizer = fuse_optimizers(own, array, lowering=lowering)
            for parameter in array.parameters():
                parameter.grad = torch.ones_like(parameter)
            found[f"{name}, Shoal {lowering or 'by itself'}"] = milliseconds(optimizer.step, device, quick)
        params = [list(resnet(width, BLOCKS[18]).to(device).parameters()) for _ in range(members)]
        every = [parameter for own in params for parameter in own]
        for parameter in every:
            parameter.grad = torch.ones_like(parameter)
        graphs = {"capturable": True} if kind is torch.optim.Adam and device.type == "cuda" else {}
        each = [kind(own, lr=1e-3 * (b + 1), fused=True, **graphs) for b, own in enumerate(params)]
        all_at_once = kind(every, lr=1e-3, fused=True, **graphs)
        found[f"{name}, torch fused, member by member"] = milliseconds(partial(_step, each), device, quick)
        found[f"{name}, the same, recorded"] = milliseconds(recorded(partial(_step, each), device), device, quick)
        found[f"{name}, floor, recorded"] = milliseconds(recorded(all_at_once.step, device), device, quick)
    for name, taken in found.items():
        print(f"{name:40} {taken:9.3f}", flush=True)
    return found


def _step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


SHAPES = (
    (64, 64, 32, 3, 1), (64, 128, 32, 3, 2), (128, 128, 16, 3, 1), (128, 256, 16, 3, 2),
    (256, 256, 8, 3, 1), (256, 512, 8, 3, 2), (512, 512, 4, 3, 1), (64, 128, 32, 1, 2),
)  # fmt: skip
"""Convolutions of a ResNet-18 on pictures of 32 x 32: channels in and out, pixels of a side, kernel, stride."""
MOST_COLUMNS = 2**30
"""Elements of the columns of all members, beyond which nothing is unfolded."""
KINDS = {
    "float32": (torch.float32, torch.contiguous_format),
    "bfloat16": (torch.bfloat16, torch.contiguous_format),
    "bfloat16, channels last": (torch.bfloat16, torch.channels_last),
}
"""Type, and order of the axes in memory."""


def lowerings(x: Tensor, weights: Sequence[Tensor], stride: int) -> dict[str, Callable[[], Any]]:
    """All members' convolutions of [N, B*C, H, W] with B weights [O, C, K, K], forward and backward, by lowering."""
    members, (outputs, inputs, kernel, _) = len(weights), weights[0].shape
    order = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    together = torch.cat(list(weights)).detach().requires_grad_()
    own = [part.contiguous(memory_format=order).requires_grad_() for part in x.detach().chunk(members, 1)]
    whole = x.detach().requires_grad_()

    def run(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
        return F.conv2d(x, weight, None, stride, kernel // 2, 1, groups)

    def backward(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        return torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs])

    def unfolded() -> Any:
        rows = whole.view(len(whole) * members, inputs, *whole.shape[2:])
        columns = F.unfold(rows, kernel, 1, kernel // 2, stride).unflatten(0, (len(whole), members))
        return backward([torch.matmul(together.view(members, outputs, -1), columns)], [whole, together])

    found: dict[str, Callable[[], Any]] = {
        "grouped": lambda: backward([run(whole, together, members)], [whole, together]),
        "loop": lambda: backward([run(*pair) for pair in zip(own, weights, strict=True)], [*own, *weights]),
    }
    if x.numel() * kernel**2 // stride**2 <= MOST_COLUMNS and x.is_contiguous():
        found["unfolded"] = unfolded
    return found


def convolutions(device: torch.device, members: int, quick: bool) -> dict[str, dict[str, float]]:
    """Milliseconds by shape and kind, then by lowering."""
    found: dict[str, dict[str, float]] = {}
    for inputs, outputs, pixels, kernel, stride in ((4, 8, 4, 3, 2),) if quick else SHAPES:
        for kind, (dtype, order) in KINDS.items():
            size = (2 if quick else 64, members * inputs, pixels, pixels)
            x = torch.randn(size, device=device, dtype=dtype).to(memory_format=order)
            drawn = torch.randn(members, outputs, inputs, kernel, kernel, device=device, dtype=dtype)
            weights = [weight.contiguous(memory_format=order).requires_grad_() for weight in drawn]
            row = {
                name: milliseconds(recorded(lowering, device), device, quick)
                for name, lowering in lowerings(x, weights, stride).items()
            }
            title = f"{inputs}->{outputs} {kernel}x{kernel}/{stride} at {pixels}, {kind}"
            found[title] = row
            print(f"{title:48} " + "  ".join(f"{name} {taken:.3f}" for name, taken in row.items()), flush=True)
    return found


def hazards(device: torch.device, members: int, quick: bool) -> dict[str, Any]:
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
    rounds = 2 if quick else STREAM_ROUNDS
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


PARTS = {"optimizers": optimizers, "convolutions": convolutions, "hazards": hazards}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="B = 2, one small convolution; judges nothing")
    options = parser.parse_args()
    members = 2 if options.quick else MEMBERS
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, Python {platform.python_version()}, torch {torch.__version__}, B = {members}; milliseconds")
    figures = {part: PARTS[part](device, members, options.quick) for part in options.parts}
    found, missed = figures.get("hazards"), []
    if found and not options.quick:
        if found["streams"]:
            missed.append(f"hazards: {found['streams']} replays on two streams had other losses than alone")
        if found["dropped"] or not found["memory intact"]:
            missed.append(f"hazards: {found['dropped']} replays had other losses after another step was dropped")
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
