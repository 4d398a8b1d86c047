"""Whole searches as users write them, from the call to the result, beside a pool of forked processes and a loop."""

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]

NAMES = (
    "tabular", "tabular, halving", "200 linear", "MNIST CNN", "CIFAR CNN, halving", "ViT", "autoencoder", "GAN",
    "6 perceptrons", "LSTM", "GPT, halving", "LoRA", "BERT-Tiny",
)  # fmt: skip
EMPTY, FULL = 1.0, 1 / 0.95
"""Asked of the speed with an empty and with a full job history, relative to the pool's."""
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
