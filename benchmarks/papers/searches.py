"""Whole searches as users write them, from the call to the result, beside a pool of forked processes and a loop."""

from collections.abc import Mapping
from statistics import geometric_mean

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS", "means"]

NAMES = (
    "tabular", "tabular, halving", "200 linear", "MNIST CNN", "CIFAR CNN, halving", "ViT", "autoencoder", "GAN",
    "6 perceptrons", "LSTM", "GPT, halving", "LoRA", "BERT-Tiny",
)  # fmt: skip
EMPTY, FULL = 1.0, 1 / 0.95
"""Asked of the speed with an empty and with a full job history, relative to the pool's."""
MEAN = 0.75
"""Asked of the geometric mean of the seconds with an empty history, relative to the pool's."""
FILLS = "one model fills a core, where an array gains little over a process for each"
MEASURES = ", and is measured first"
NEEDS = {
    "LoRA": ("transformers", "peft"), "BERT-Tiny": ("transformers",), "tabular": ("sklearn",),
    "200 linear": ("sklearn",),
}  # fmt: skip


def _measurement(name: str) -> Measurement:
    words = "-".join(name.lower().replace(",", "").split())
    command = ("benchmarks/searches.py", "--searches", name)
    needs = (*CORE, *NEEDS.get(name, ()))
    return Measurement(f"search-{words}", name, 120, 900, command, (*command, "--quick"), needs=needs)


def _experiment(name: str, history: str, asked: float) -> Experiment:
    setting = "13 searches on two CPU slots beside a pool of two forked processes, torch and data loaded"

    def speed(figures: Figures) -> float:
        seconds: dict[str, float] = figures["searches"][name]["seconds"]
        return seconds["pool"] / seconds[history]

    return Experiment(
        f"{name}, {history} history",
        "",
        "",
        setting,
        _measurement(name),
        speed,
        asked,
        noise=0.08,
        why=FILLS + (MEASURES if history == "empty" else ""),
    )


EXPERIMENTS = tuple(
    _experiment(name, history, asked) for name in NAMES for history, asked in (("empty", EMPTY), ("full", FULL))
)


def means(figures: Mapping[str, Figures]) -> str:
    """Return how all searches compare, in words, given the figures of measurements by name."""
    found = [figures.get(_measurement(name).name, {}).get("searches", {}).get(name) for name in NAMES]
    seconds = [each["seconds"] for each in found if each]
    if len(seconds) < len(NAMES):
        return f"The means need all {len(NAMES)} searches; asked is {MEAN} of the pool's seconds."
    speeds = {way: [each["plain"] / each[way] for each in seconds] for way in ("empty", "full", "pool")}
    mean = {way: geometric_mean(each) for way, each in speeds.items()}
    empty, full = (mean["pool"] / mean[history] for history in ("empty", "full"))
    behind = [sum(each["pool"] < each[history] for each in seconds) for history in ("empty", "full")]
    ways = zip(("an empty history", "a full one", "the pool"), speeds, strict=True)
    over_plain = (
        f"{said} {min(speeds[way]):.1f} to {max(speeds[way]):.1f}, mean {mean[way]:.1f}" for said, way in ways
    )
    return (
        f"Geometric means of the seconds relative to the pool's: {empty:.2f} with an empty history, {full:.2f} with a "
        f"full one; asked {MEAN}{'' if empty <= MEAN else f': **missed**, as often {FILLS}'}. The pool is faster in "
        f"{behind[0]} and {behind[1]} of {len(NAMES)}. Speed relative to the plain loop: {'; '.join(over_plain)}."
    )
