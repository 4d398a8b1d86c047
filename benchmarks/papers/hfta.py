"""HFTA (Wang et al., MLSys 2021, arXiv:2102.02344): horizontally fused training arrays, and HFHT, its tuner.

Not measured here: MPS and MIG on a GPU, peaks over all B, bfloat16 and the largest array of a GPU (figure 4, tables 5
and 8 to 10), which are the measurements "fusion" of tools/gpu.py; TPUs (figures 5 and 16); counters of the GPU's
hardware (figures 7, 10, 13 and 14) and the statistics of a cluster (table 1).
"""

from collections.abc import Callable
from typing import Any

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]

LANGUAGE = (*CORE, "transformers", "peft")


def measured(name: str, title: str, seconds: int, *command: str, needs: tuple[str, ...] = CORE) -> Measurement:
    """Return a measurement of some seconds on two cores."""
    quick = (*command, "--quick")
    return Measurement(f"hfta-{name}", title, int(seconds / 1.5), 3 * seconds, command, quick, needs=needs)


FUSION, SEARCHES = "benchmarks/fusion.py", "benchmarks/searches.py"
SLOTS = "Shoal on slots"
"""An array in a process for each core, as searches run on a CPU."""
SPEED = (FUSION, "--no-compile", "--seconds", "1.5", "--models")
POINTNETS = ("pointnet-classification", "pointnet-segmentation")
MAIN = measured("main", "arrays of the major workloads", 60, *SPEED, *POINTNETS, "dcgan")
SECONDARY = measured("secondary", "arrays of the secondary workloads", 90, *SPEED, "resnet18", "mobilenet",
                     "transformer", "bert-medium", needs=LANGUAGE)  # fmt: skip
FURTHER = measured("further", "arrays of an MLP and of adapters", 60, *SPEED, "mlp", "lora", needs=LANGUAGE)
ADAPTERS = measured("adapters", "arrays of adapters that differ", 60, *SPEED, "lora-mixed", "lora-batches", "--rivals",
                    "serial", "processes", "peft, in turns", "Shoal", SLOTS, needs=LANGUAGE)  # fmt: skip
COMPILED = measured("compiled", "compiled arrays", 120, FUSION, "--seconds", "1.5", "--models", "mlp", "transformer")
PARTIAL = measured("partial", "partial fusion", 30, FUSION, "--seconds", "3", "--models", "resnet18",
                   "resnet18-half-fused", "resnet18-unfused", "--rivals", "serial", "Shoal eager")  # fmt: skip
MEMORY = measured("memory", "memory of an array and of processes", 60, FUSION, "--resident", "--models", *POINTNETS,
                  "dcgan")  # fmt: skip
CONVERGENCE = measured("convergence", "losses of an array and of its members alone", 30, FUSION, "--convergence")
TUNING = {
    task: measured(f"tuning-{task.lower()}", f"cost of tuning a {task}", seconds, SEARCHES, "--rounds", "1", "--ways",
                   "plain", "pool", "empty", "--searches", f"{task}, random", f"{task}, Hyperband")
    for task, seconds in (("PointNet", 200), ("MobileNet", 160))
}  # fmt: skip

V100 = "V100, PyTorch 1.6"
SCALE = "B = 8, float32, sizes reduced for two cores, no step compiled"
BUSY = "one such model leaves a V100 mostly idle, but keeps one of two cores busy"
WITHIN = "within the noise"
PADDED = "ranks that differ are padded or multiplied one by one, and two processes fill two cores"
NOISE = 0.3
"""Of speeds: one loop on two threads varies by a quarter between runs that are minutes apart."""
TURNS = ("serial", "processes", "peft, in turns")
ALL = ("serial", "processes", "vmap")


def row(found: Figures, workload: str) -> dict[str, Any]:
    """The rivals' findings, by name."""
    (findings,) = found["rows"][workload].values()
    return dict(findings)


def over(workload: str, *rivals: str, ours: tuple[str, ...] = ("Shoal",)) -> Callable[[Figures], float]:
    """Speed of the faster of our ways relative to the fastest of some rivals."""

    def figure(found: Figures) -> float:
        findings = row(found, workload)
        best, rival = (max(float(findings[x]["of_serial"]) for x in ways) for ways in (ours, rivals))
        return best / rival

    return figure


def unfused(key: str) -> Callable[[Figures], float]:
    """Speed of an array with unfused blocks over that of one without."""

    def figure(found: Figures) -> float:
        some, none = (row(found, name)["Shoal eager"]["samples_per_second"] for name in (key, "resnet18"))
        return float(some / none)

    return figure


def more_fit(key: str) -> Callable[[Figures], float]:
    """Members that fit, relative to those that fit in processes."""
    return lambda found: float(found["resident"][key]["more_fit"])


def cost(search: str, way: str) -> Callable[[Figures], float]:
    """Seconds of a search in some way over those of Shoal."""
    return lambda found: 1 / float(found["searches"][search]["compared"][f"empty of {way}"])


LEAST = (2.42, 1.25)
"""The least that the paper reports over serial and MPS of the secondary workloads."""
OF_SECONDARY = (
    "the least and the most of four models: 2.42 to 3.94 times serial, 1.67 to 3.02 concurrent, 1.25 to 2.24 MPS"
)
PEAK = "FP32: peak {} times serial, {} concurrent, {} MPS"
WORKLOADS = (
    # key, title, measurement, sizes, reported, peaks over serial and MPS
    ("pointnet-classification", "PointNet, classification", MAIN, "N=8, 64 points, width 16",
     PEAK.format(2.62, 2.54, 2.36), (2.62, 2.36)),
    ("pointnet-segmentation", "PointNet, segmentation", MAIN, "N=8, 64 points, width 16",
     PEAK.format(1.62, 1.62, 1.17), (1.62, 1.17)),
    ("dcgan", "DCGAN", MAIN, "64x64, N=4, width 8", PEAK.format(4.18, 1.95, 1.95), (4.18, 1.95)),
    ("resnet18", "ResNet-18", SECONDARY, "32x32, N=4, width 8", OF_SECONDARY, LEAST),
    ("mobilenet", "MobileNetV3-Large", SECONDARY, "32x32, N=4, width 0.25", OF_SECONDARY, LEAST),
    ("transformer", "Transformer", SECONDARY, "2 layers, d=128, N=4, length 32", OF_SECONDARY, LEAST),
    ("bert-medium", "BERT-Medium", SECONDARY, "8 layers, d=64, N=2, length 32", OF_SECONDARY, LEAST),
)  # fmt: skip
MLP, LLAMA = "64-64-64-10, N=32, B = 8", "Llama of 4 layers, d=128, B = 8"
BEYOND = (
    # title, setting, measurement, workload, rivals, asked, why
    ("MLP", f"{MLP}, not compiled", FURTHER, "mlp", ALL, 1.0, ""),
    ("MLP, compiled", MLP, COMPILED, "mlp", ALL, 2.0, ""),
    ("LoRA, one rank", f"{LLAMA}, not compiled", FURTHER, "lora", ALL, 1.0, ""),
    ("LoRA, ranks 4 to 32", f"{LLAMA}, not compiled", ADAPTERS, "lora-mixed", TURNS, 2.0, PADDED),
    ("LoRA, ranks 4 to 32 and batches of 2 to 8", f"{LLAMA}, bfloat16, checkpointed, not compiled", ADAPTERS,
     "lora-batches", TURNS, 2.0, PADDED),
)  # fmt: skip
FIT = (
    ("pointnet-classification", "PointNet, classification", 1.80),
    ("pointnet-segmentation", "PointNet, segmentation", 1.60),
    ("dcgan", "DCGAN", 7.57),
)
TUNED = (
    ("PointNet, random", "60 configurations x 2 epochs of 384 clouds (paper: 60 x 25)"),
    ("PointNet, Hyperband", "R = 25, eta 5, last round skipped, 384 clouds (paper: R = 250)"),
    ("MobileNet, random", "50 configurations x 1 epoch of 128 pictures (paper: 50 x 20)"),
    ("MobileNet, Hyperband", "R = 9, eta 3, last round skipped, 128 pictures (paper: R = 81, two skipped)"),
)

EXPERIMENTS: tuple[Experiment, ...] = (
    *(
        Experiment(
            f"{title}: {words}",
            "" if rival == "vmap" else "figure 4, table 8" if measurement is MAIN else "figure 15",
            "" if rival == "vmap" else f"{V100}: {reported}", f"{sizes}, {SCALE}", measurement,
            over(key, rival, ours=(ours,)), asked, published=published if measurement is MAIN else None, noise=NOISE,
            why=why,
        )
        for key, title, measurement, sizes, reported, (serial, mps) in WORKLOADS
        for rival, words, ours, asked, published, why in (
            ("serial", "array over one after another", "Shoal", serial, serial, BUSY),
            ("processes", "arrays in two processes over two processes", SLOTS, 1.0, mps, WITHIN),
            ("vmap", "array over torch.func.vmap", "Shoal", 1.0, None, WITHIN),
        )
    ),
    *(
        Experiment(
            f"{title}: over the best rival", "", "", f"{setting}; {', '.join(rivals)}", measurement,
            over(key, *rivals, ours=("Shoal", SLOTS)), asked, noise=NOISE, why=why,
        )
        for title, setting, measurement, key, rivals, asked, why in BEYOND
    ),
    Experiment(
        "Transformer: compiled array over one after another", "figure 15", f"{V100}: {OF_SECONDARY}",
        "2 layers, d=128, N=4, length 32, B = 8", COMPILED, over("transformer", "serial"), asked=2.42,
        noise=NOISE, why=BUSY,
    ),
    *(
        Experiment(
            f"{title}: models in the memory of processes", "figures 4 and 6",
            f"{V100}: up to {most} times as many as MPS",
            "B = 8, reduced: private memory at the peak of eight processes over that of one with an array", MEMORY,
            more_fit(key), asked=most, published=most,
            why="on a CPU no process has a CUDA context, which an array needs once",
        )
        for key, title, most in FIT
    ),
    Experiment(
        "ResNet-18: losses of an array and of its members alone", "figure 11", "V100: the curves overlap entirely",
        "three learning rates, N=4, width 8, 100 steps, float64; largest relative difference", CONVERGENCE,
        lambda found: float(found["apart"]["float64"]), asked=1e-6, better="at most", unit="", noise=0.5,
    ),
    *(
        Experiment(
            f"ResNet-18, {title}: speed over fully fused", "figure 17",
            "V100, 30 models: throughput falls block by block; no figure in the text",
            "ResNet-18, N=4, width 8, B = 8, eager", PARTIAL, unfused(key), asked=asked, better="at most",
        )
        for key, title, asked in (
            ("resnet18-half-fused", "4 of 8 blocks unfused", 0.95), ("resnet18-unfused", "no block fused", 0.9),
        )
    ),
    *(
        Experiment(
            f"{search}: cost {name} over fused", "figure 8",
            f"{V100}: up to 5.10 times fewer GPU hours than serial over four searches; Hyperband gains less",
            f"{scale}; one run, seconds from call to result, empty history", TUNING[search.split(",")[0]],
            cost(search, way), asked, published=published if "random" in search else None, noise=0.3,
            why=why,
        )
        for search, scale in TUNED
        for way, name, asked, published, why in (
            ("plain", "serial", 5.1, 5.1, BUSY),
            ("pool", "concurrent", 1.0, None, "steps gain little; checkpoints, building and measuring are on top"),
        )
    ),
)  # fmt: skip
