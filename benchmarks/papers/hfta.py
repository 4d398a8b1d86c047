"""HFTA (Wang et al., MLSys 2021, arXiv:2102.02344): horizontally fused training arrays, and HFHT, its tuner.

Not measured here: MPS and MIG on a GPU, peaks over all B, bfloat16 and the largest array of a GPU (figure 4, tables 5
and 8 to 10), which are the measurements "fusion" of tools/gpu.py; TPUs (figures 5 and 16); counters of the GPU's
hardware (figures 7, 10, 13 and 14) and the statistics of a cluster (table 1).
"""

from collections.abc import Callable

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]

CODE = ("benchmarks/fusion.py", "benchmarks/models", "benchmarks/rivals", "src/shoal")
LANGUAGE = (*CORE, "transformers", "peft")


def fusion(name: str, title: str, seconds: int, *arguments: str, needs: tuple[str, ...] = CORE) -> Measurement:
    """Of some seconds on two cores."""
    command = ("benchmarks/fusion.py", *arguments)
    quick = (*command, "--quick")
    return Measurement(f"hfta_{name}", title, int(seconds / 1.5), 3 * seconds, command, quick, CODE, needs)


def tuning(task: str, seconds: int) -> Measurement:
    command = ("benchmarks/hfht.py", "--tasks", task)
    code = ("benchmarks/hfht.py", "benchmarks/models", "benchmarks/rivals", "benchmarks/search_tasks", "src/shoal")
    title = f"cost of tuning a {task}"
    return Measurement(
        f"hfta_tuning_{task}", title, int(seconds / 1.5), 3 * seconds, command, (*command, "--quick"), code
    )


SPEED = ("--no-compile", "--seconds", "1.5", "--models")
MAIN = fusion("main", "arrays of the major workloads", 60, *SPEED, "pointnet-classification",
              "pointnet-segmentation", "dcgan")  # fmt: skip
SECONDARY = fusion("secondary", "arrays of the secondary workloads", 90, *SPEED, "resnet18", "mobilenet", "transformer",
                   "bert-medium", needs=LANGUAGE)  # fmt: skip
FURTHER = fusion("further", "arrays of an MLP and of adapters", 60, *SPEED, "mlp", "lora", needs=LANGUAGE)
ADAPTERS = fusion("adapters", "arrays of adapters that differ", 60, *SPEED, "lora-mixed", "lora-batches", "--rivals",
                  "serial", "processes", "peft, in turns", "Shoal", needs=LANGUAGE)  # fmt: skip
COMPILED = fusion("compiled", "compiled arrays", 120, "--seconds", "1.5", "--models", "mlp", "transformer", "--rivals",
                  "serial", "processes", "vmap", "Shoal")  # fmt: skip
PARTIAL = fusion("partial", "partial fusion", 30, "--seconds", "3", "--models", "resnet18", "resnet18-half-fused",
                 "resnet18-unfused", "--rivals", "serial", "Shoal eager")  # fmt: skip
MEMORY = fusion("memory", "memory of an array and of processes", 60, "--resident", "--models",
                "pointnet-classification", "pointnet-segmentation", "dcgan")  # fmt: skip
CONVERGENCE = fusion("convergence", "losses of an array and of its members alone", 30, "--convergence")
TUNING = {"PointNet": tuning("pointnet", 200), "MobileNet": tuning("mobilenet", 160)}

V100 = "V100, PyTorch 1.6"
CORES = "{}, B = 8, float32, sizes reduced for two cores, no step compiled"
POINTS = "N=8, 64 points, width 16"
WORKLOADS = (
    # key, title, measurement, sizes, reported peaks over serial, concurrent and MPS
    ("pointnet-classification", "PointNet, classification", MAIN, POINTS, (2.62, 2.54, 2.36)),
    ("pointnet-segmentation", "PointNet, segmentation", MAIN, POINTS, (1.62, 1.62, 1.17)),
    ("dcgan", "DCGAN", MAIN, "64x64, N=4, width 8", (4.18, 1.95, 1.95)),
    ("resnet18", "ResNet-18", SECONDARY, "32x32, N=4, width 8", ()),
    ("mobilenet", "MobileNetV3-Large", SECONDARY, "32x32, N=4, width 0.25", ()),
    ("transformer", "Transformer", SECONDARY, "2 layers, d=128, N=4, length 32", ()),
    ("bert-medium", "BERT-Medium", SECONDARY, "8 layers, d=64, N=2, length 32", ()),
)
LEAST = (2.42, 1.67, 1.25)
"""The least that the paper reports over serial, concurrent and MPS of the secondary workloads."""
SECONDARY_REPORTED = "2.42 to 3.94 times serial, 1.67 to 3.02 concurrent, 1.25 to 2.24 MPS, over four models"
CPU_BOUND = "at these sizes two cores are full of arithmetic; fusing saves the calls around it, and no more"
PROCESSES_FILL = "two processes of one thread fill two cores, and share no input, as the paper's GPU would have them do"


def over(workload: str, *rivals: str) -> Callable[[Figures], float]:
    """How many times as fast an array is as the fastest of some rivals."""

    def figure(found: Figures) -> float:
        (row,) = found["rows"][workload].values()
        return float(row["Shoal"]["of_serial"]) / max(row[rival]["of_serial"] for rival in rivals)

    return figure


def of_workload(
    key: str, title: str, measured: Measurement, sizes: str, peaks: tuple[float, ...]
) -> tuple[Experiment, ...]:
    """An array against serial training, processes and vmap."""
    serial, concurrent, mps = peaks or LEAST
    place, reported = "figure 15", f"{V100}: {SECONDARY_REPORTED}"
    if peaks:
        place = "figure 4, table 8"
        reported = f"{V100}, FP32: peak {serial} times serial, {concurrent} concurrent, {mps} MPS"
    setting = CORES.format(sizes)
    return (
        Experiment(
            f"{title}: array over one after another", place, reported, setting, measured, over(key, "serial"),
            asked=serial, published=serial, why=CPU_BOUND,
        ),
        Experiment(
            f"{title}: array over processes", place, reported, f"{setting}; two processes, one thread each", measured,
            over(key, "processes"), asked=1.0, published=mps, why=PROCESSES_FILL,
        ),
        Experiment(
            f"{title}: array over torch.func.vmap", place, "not compared", setting, measured, over(key, "vmap"),
            asked=1.0,
        ),
    )  # fmt: skip


def fit(key: str, title: str, reported: str, published: float) -> Experiment:
    """More models in the same memory than as processes."""
    return Experiment(
        f"{title}: models in the memory of processes", "figures 4 and 6", f"{V100}: {reported} times as many as MPS",
        "B = 8, reduced: private memory at the peak of eight processes over that of one with an array", MEMORY,
        lambda found: float(found["resident"][key]["more_fit"]), asked=published, published=published,
    )  # fmt: skip


def adapters(key: str, differ: str) -> Experiment:
    return Experiment(
        f"LoRA, {differ}: array over the best rival", "beyond the paper", "LoRA is later",
        "Llama of 4 layers, d=128; B = 8, not compiled; one after another, two processes, peft's own adapters in turns",
        ADAPTERS, over(key, "serial", "processes", "peft, in turns"), asked=2.0,
        why="small products of ranks that differ are padded, and two processes fill two cores",
    )  # fmt: skip


def cost(task: str, algorithm: str, way: str) -> Experiment:
    scale = {
        ("PointNet", "random"): "60 configurations x 2 epochs of 384 clouds (paper: 60 x 25)",
        ("PointNet", "hyperband"): "R = 25, eta 5, last round skipped, 384 clouds (paper: R = 250)",
        ("MobileNet", "random"): "50 configurations x 1 epoch of 128 pictures (paper: 50 x 20)",
        ("MobileNet", "hyperband"): "R = 9, eta 3, last round skipped, 128 pictures (paper: R = 81, two skipped)",
    }[task, algorithm]
    title = "random search" if algorithm == "random" else "Hyperband"
    return Experiment(
        f"{task}, {title}: cost {way} over fused", "figure 8", f"{V100}: up to 5.10 times fewer GPU hours than serial",
        f"{scale}; seconds from call to result, empty history", TUNING[task],
        lambda found: found["cost"][task.lower()][algorithm][way] / found["cost"][task.lower()][algorithm]["fused"],
        asked=5.1 if way == "serial" else 1.0, published=5.1 if way == "serial" else None,
        why=f"{CPU_BOUND}; half a minute of training pays for starting workers and measuring models",
    )  # fmt: skip


def partial_fusion(key: str, title: str, asked: float) -> Experiment:
    return Experiment(
        f"ResNet-18, {title}: speed over fully fused", "figure 17",
        "V100, 30 models: throughput falls block by block; no figure in the text",
        "ResNet-18, N=4, width 8, B = 8, eager", PARTIAL, lambda found: _eager(found, key) / _eager(found, "resnet18"),
        asked=asked, better="at most", why="members one after another are no slower in this block on two cores",
    )  # fmt: skip


def _eager(found: Figures, key: str) -> float:
    (row,) = found["rows"][key].values()
    return float(row["Shoal eager"]["samples_per_second"])


EXPERIMENTS: tuple[Experiment, ...] = (
    *(each for workload in WORKLOADS for each in of_workload(*workload)),
    Experiment(
        "MLP: array over the best rival", "beyond the paper", "not compared",
        "64-64-64-10, N=32, B = 8, not compiled; one after another, two processes, vmap", FURTHER,
        over("mlp", "serial", "processes", "vmap"), asked=1.0,
    ),
    Experiment(
        "LoRA, one rank: array over the best rival", "beyond the paper", "LoRA is later",
        "Llama of 4 layers, d=128, B = 8, not compiled; one after another, two processes, vmap", FURTHER,
        over("lora", "serial", "processes", "vmap"), asked=1.0,
    ),
    adapters("lora-mixed", "ranks 4 to 32"),
    adapters("lora-batches", "ranks 4 to 32 and batches of 2 to 8, bfloat16, checkpointed"),
    Experiment(
        "MLP: compiled array over the best rival", "beyond the paper", "not compared",
        "64-64-64-10, N=32, B = 8; one after another, two processes, vmap", COMPILED,
        over("mlp", "serial", "processes", "vmap"), asked=2.0,
    ),
    Experiment(
        "Transformer: compiled array over one after another", "figure 15", f"{V100}: {SECONDARY_REPORTED}",
        "2 layers, d=128, N=4, length 32, B = 8", COMPILED, over("transformer", "serial"), asked=2.42, published=2.42,
        why=CPU_BOUND,
    ),
    fit("pointnet-classification", "PointNet, classification", "up to 1.80", 1.80),
    fit("pointnet-segmentation", "PointNet, segmentation", "up to 1.60", 1.60),
    fit("dcgan", "DCGAN", "up to 7.57", 7.57),
    Experiment(
        "ResNet-18: losses of an array and of its members alone", "figure 11", "V100: the curves overlap entirely",
        "three learning rates, N=4, width 8, 100 steps, float64; largest relative difference", CONVERGENCE,
        lambda found: float(found["apart"]["float64"]), asked=1e-6, better="at most", unit="", noise=10.0,
    ),
    partial_fusion("resnet18-half-fused", "4 of 8 blocks unfused", 0.95),
    partial_fusion("resnet18-unfused", "no block fused", 0.9),
    *(
        cost(task, algorithm, way)
        for task in TUNING
        for algorithm in ("random", "hyperband")
        for way in ("serial", "concurrent")
    ),
)  # fmt: skip
