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
        f"{name}, {history} history", "", "", setting, _measurement(name), speed, asked, noise=0.08, why=FILLS
    )


EXPERIMENTS = tuple(
    _experiment(name, history, asked) for name in NAMES for history, asked in (("empty", EMPTY), ("full", FULL))
)


def means(speeds: Mapping[str, float]) -> str:
    """Return the geometric means of all searches in words, given the values of experiments by title."""
    found = {history: [speeds.get(f"{name}, {history} history") for name in NAMES] for history in ("empty", "full")}
    values = {history: 1 / geometric_mean(filter(None, each)) if all(each) else None for history, each in found.items()}
    said = [f"{history} history {value:.2f}" for history, value in values.items() if value is not None]
    if not said:
        return f"The geometric means need all {len(NAMES)} searches; asked is {MEAN} of the pool's seconds."
    reached = "" if values["empty"] is not None and values["empty"] <= MEAN else ": **missed**"
    return f"Geometric means of the seconds, relative to the pool's: {', '.join(said)}; asked {MEAN}{reached}."
