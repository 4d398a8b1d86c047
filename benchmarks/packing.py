"""Packs, arrays that share a process and a stream of data, held against members one after another and the paper's pack.

- ablation   seconds of a step of 2, 4, 8 members that have all in common but one factor, or nothing; preprocessing left
             out (tensors), in (pictures made into tensors), in with decoding and augmentation (PNG files)
- hyperband  the search of the packing paper: 1056 configurations of batch size, optimizer, rate and activation, MLP-3
             and a small CNN on 5,000 pictures of CIFAR-10. "original" trains one configuration after another
- decode     how many files are decoded in an epoch

seq: members one after another in a plain loop. pack: the paper's, one loop, one backward pass over the sum of losses.
All ways run interleaved and the first round is dropped; the tables show medians, and as "speed" that of Shoal against
the better of seq and pack, the median of what the rounds showed.

    python benchmarks/packing.py [--parts ablation hyperband decode] [--cases none] [--rounds 6] [--quick]
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from packs import ours
from packs.cases import CASES, SIZES, Case, Cell
from packs.feeds import FEEDS, kindest
from packs.original import again, original
from packs.pictures import PIPELINES, Files, look_for_data, write
from packs.search import METRIC, Search, hyperband, replayed
from packs.survivors import compared, cut_again
from packs.tasks import TASKS
from packs.ways import Paper, Sequential, Way, measured

WAYS: dict[str, Callable[[Cell], Way]] = {"seq": Sequential, "pack": Paper, "shoal": ours.Chosen}
LEAST = 0.97
"""Of the speed of the better of seq and pack, in every case of the ablation."""
LEAST_GAIN = {"MLP-3, tensors": 2.0, "MLP-3, pictures": 2.0, "MLP-3, png": 6.0}
"""Over the original, of Hyperband with the packing `cost`."""
LEAST_GAIN_OF_WORKERS = 1.6
"""On PNG files, of Hyperband with loader processes over one without them."""
SAMPLES = 2500
"""Of a member's training set, in the ablation."""


def main() -> int:
    options = arguments()
    logging.getLogger("shoal").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    print(machine(), flush=True)
    figures: dict[str, Any] = {}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SHOAL_CACHE"] = f"{folder}/cache"
        options.folder = write(Path(folder), options.pictures) if "png" in options.pipelines else Path(folder)
        for part in options.parts:
            figures[part] = PARTS[part](options, missed)
    missed = [] if options.quick else missed
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--ways", nargs="*", choices=[*WAYS, "original"], default=[*WAYS, "original"])
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS), help="of hyperband")
    parser.add_argument("--pipelines", nargs="*", choices=PIPELINES, default=list(PIPELINES))
    parser.add_argument("--all", action="store_true", help="hyperband on PNG files as well, which takes an hour")
    parser.add_argument(
        "--cases", nargs="*", choices=list(dict.fromkeys(case.name for case in CASES)), help="of the ablation"
    )
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, help="members of the ablation's packs")
    parser.add_argument("--most", type=int, default=27, help="R of hyperband; the paper has 81")
    parser.add_argument("--rounds", type=int, default=6, help="of a cell of the ablation, at least")
    parser.add_argument("--seconds", type=float, default=12.0, help="in which more rounds of a cell are made")
    parser.add_argument(
        "--packings", nargs="*", choices=ours.PACKINGS, default=list(ours.PACKINGS), help="of hyperband"
    )
    parser.add_argument(
        "--workers", nargs="*", type=int, default=[0], help="loader processes of Shoal's side, in hyperband, each a row"
    )
    parser.add_argument("--searches", type=int, default=1, help="rounds of hyperband, each with another seed")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of torch; where others use the machine 1 is the fastest"
    )
    parser.add_argument("--device", default="cpu", help="of the ablation; the other parts use CPU slots")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="100 samples, 2 members, 3 epochs, 1 thread, one case, one packing; judges nothing",
    )
    options = parser.parse_args()
    look_for_data(parser, quick=options.quick)
    options.samples, options.pictures = SAMPLES, None
    if options.quick:
        WAYS["shoal"] = partial(ours.Chosen, settled=1, planned=100)
        options.pictures, options.packings = 400, ["cost"]
        options.samples, options.rounds, options.sizes, options.most, options.searches = 100, 1, [2], 3, 1
        options.seconds = 0.0
        options.tasks, options.pipelines, options.threads = options.tasks[:1], ["tensors", "png"], 1
        options.cases = options.cases or ["all"]
    return options


def machine() -> str:
    """What the figures are measured on."""
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def ablation(options: argparse.Namespace, missed: list[str]) -> dict[str, Any]:
    """T_s in milliseconds; the improvement is (seq - other) / seq, as the paper has it."""
    makers = {name: make for name, make in WAYS.items() if name in options.ways}
    if not makers:
        return {}
    rivals = [name for name in makers if name != "shoal"]
    print(f"\nablation: {options.samples} samples, medians; milliseconds for as many samples of each member as the "
          "largest batch has")  # fmt: skip
    titles = [f"{name:>8}" for name in makers] + [f"{name + ' gains':>12}" for name in makers if name != "seq"]
    print(f"{'input':9} {'differs':11} {'members':>7} {' '.join(titles)} {'speed':>7} {'rounds':>6}")
    figures = {}
    for case in CASES:
        if case.pipeline not in options.pipelines or case.name not in (options.cases or [case.name]):
            continue
        for members in options.sizes:
            cell = Cell(case, members, options.samples, options.folder, torch.device(options.device))
            taken = measured(cell, makers, options.rounds, options.seconds)
            steps = {name: taken.per_step(name) for name in makers}
            gains = [1 - steps[name] / steps["seq"] for name in makers if name != "seq" and "seq" in makers]
            speeds = [taken.speed("shoal", rival) for rival in rivals] if "shoal" in makers else []
            columns = [f"{1000 * each:8.2f}" for each in steps.values()] + [f"{100 * gain:11.0f}%" for gain in gains]
            speed = f"{min(speeds):.2f}x" if speeds else ""
            print(f"{case.pipeline:9} {case.name:11} {members:7} {' '.join(columns)} {speed:>7} {taken.rounds:6}",
                  flush=True)  # fmt: skip
            name = f"{case.pipeline}, {case.name}, {members}"
            figures[name] = {way: round(1000 * each, 4) for way, each in steps.items()}
            if speeds:
                figures[name]["speed"] = round(min(speeds), 3)
                if min(speeds) < LEAST:
                    missed.append(f"{name}: {min(speeds):.2f}x of the better of seq and pack, asked {LEAST}x")
    return figures


def searches(options: argparse.Namespace, missed: list[str]) -> dict[str, Any]:
    """Seconds of whole searches, and whether the same trials survive."""
    print(f"\nhyperband: R = {options.most}, eta = 3, metric {METRIC}, median of {options.searches}", flush=True)
    figures: dict[str, Any] = {}
    for name in options.tasks:
        for pipeline in options.pipelines:
            if pipeline == "png" and not options.all:
                continue
            cell = one_search(options, name, pipeline, missed)
            figures[f"{name}, {pipeline}"] = cell
    return figures


def one_search(options: argparse.Namespace, name: str, pipeline: str, missed: list[str]) -> dict[str, float]:
    """All ways in turn, each round with another seed; the first original is the kindest."""
    sizes = {"train": options.samples, "test": 100} if options.quick else {}
    tasks = {workers: TASKS[name](pipeline, options.folder, workers=workers, **sizes) for workers in options.workers}
    task = tasks[options.workers[0]]
    title = f"{name}, {pipeline}"
    plain = {f"original, {feed}": FEEDS[feed] for feed in (FEEDS if pipeline == "tensors" else ["DataLoader"])}
    seconds: dict[str, list[float]] = {}
    best: dict[str, float] = {}
    notes = []
    for seed in range(options.searches):
        make = partial(hyperband, options.most, seed)
        reference: Search | None = None
        for way, feed in plain.items() if "original" in options.ways else ():
            took, found = original(task, make(), feed)
            print(f"{title:16} {way:24} {took:8.1f}  seed {seed}", flush=True)
            seconds.setdefault(way, []).append(took)
            best[way] = min(best.get(way, float("inf")), found.best().metrics[METRIC])
            if feed is kindest(pipeline):
                reference = found
        packed: dict[str, Search] = {}
        rows = [(packing, workers) for packing in options.packings for workers in options.workers]
        shift = seed % len(rows)  # else the same row would always find the machine as the original left it
        for packing, workers in (*rows[shift:], *rows[:shift]) if "shoal" in options.ways else ():
            took, reports = ours.searched(tasks[workers], options.most, seed, packing)
            way = f"{packing}, {workers} workers" if workers else packing
            print(f"{title:16} {way:24} {took:8.1f}  seed {seed}", flush=True)
            packed[way] = replayed(make(), reports)
            seconds.setdefault(way, []).append(took)
            best[way] = min(best.get(way, float("inf")), packed[way].best().metrics[METRIC])
        if reference is not None and packed and pipeline != "png":  # where samples are random, each way draws its own
            rounded = again(task, make, reference)
            notes.append(
                "alone with other roundings: {} of {} cuts are the same".format(*cut_again(reference, rounded))
            )
            for packing, search in packed.items():
                comparison = compared(search, reference, rounded)
                notes.append(f"{packing}: {comparison}")
                missed += [f"{title}, {packing}: {p}" for p in comparison.partings if not p.explained]
    taken = {way: median(times) for way, times in seconds.items()}
    originals = [value for way, value in taken.items() if way in plain]
    print(f"{'':16} {'way':24} {'seconds':>8} {'speed-up':>9} {'best loss':>9}")
    for way, value in taken.items():
        gain = f"{min(originals) / value:8.2f}x" if originals else ""
        print(f"{title:16} {way:24} {value:8.1f} {gain:>9} {best[way]:9.4f}")
    for line in "\n".join(notes).splitlines():
        print(f"{'':16} {line}", flush=True)
    missed += judged(title, taken, originals)
    return {way: round(value, 2) for way, value in taken.items()}


def judged(title: str, taken: dict[str, float], originals: Sequence[float]) -> list[str]:
    """What the packing `cost` lacks."""
    if "cost" not in taken:
        return []
    with_workers = {way: value for way, value in taken.items() if way.startswith("cost, ")}
    faster = {way: value for way, value in taken.items() if value < taken["cost"] and way not in with_workers}
    found = [f"{title}: {way} takes {value:.1f} s, cost {taken['cost']:.1f} s" for way, value in faster.items()]
    if title.endswith("png"):
        found += [
            f"{title}: {way} is {taken['cost'] / value:.2f}x as fast as without, asked {LEAST_GAIN_OF_WORKERS}x"
            for way, value in with_workers.items()
            if taken["cost"] / value < LEAST_GAIN_OF_WORKERS
        ]
    least = LEAST_GAIN.get(title)
    if originals and least and min(originals) / taken["cost"] < least:
        found.append(f"{title}: {min(originals) / taken['cost']:.2f}x over the original, asked {least}x")
    return found


def decodes(options: argparse.Namespace, missed: list[str]) -> dict[str, Any]:
    """Files decoded in an epoch after the first."""
    makers = {name: make for name, make in WAYS.items() if name in options.ways}
    print(f"\ndecode: pictures decoded in an epoch of 4 members, of {options.samples} samples")
    print(f"{'differs':11} " + " ".join(f"{name:>8}" for name in makers))
    figures: dict[str, Any] = {}
    write(options.folder, options.pictures)
    for case in (case for case in CASES if case.pipeline == "png" and len(case.parts) == 1):
        if options.quick and case.name != "batch size":
            continue
        counts = {name: decoded(case, make, options) for name, make in makers.items()}
        print(f"{case.name:11} " + " ".join(f"{count:8}" for count in counts.values()), flush=True)
        figures[case.name] = counts
        if counts.get("shoal", options.samples) != options.samples:
            missed.append(f"decode, {case.name}: {counts['shoal']} pictures, asked {options.samples}")
    return figures


def decoded(case: Case, make: Callable[[Cell], Way], options: argparse.Namespace) -> int:
    way = make(Cell(case, 4, options.samples, options.folder))
    way.run()
    before = Files.decoded["train"]
    way.run()
    return Files.decoded["train"] - before


PARTS: dict[str, Callable[[argparse.Namespace, list[str]], dict[str, Any]]] = {
    "ablation": ablation,
    "hyperband": searches,
    "decode": decodes,
}

if __name__ == "__main__":
    sys.exit(main())
