"""Whole searches as users write them, from the call to the result, beside a pool of forked processes and a loop."""

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]

NAMES = (
    "tabular", "tabular, halving", "200 linear", "MNIST CNN", "CIFAR CNN, halving", "ViT", "autoencoder", "GAN",
    "6 perceptrons", "LSTM", "GPT, halving", "LoRA", "BERT-Tiny",
)  # fmt: skip
EMPTY, FULL = 1.0, 0.95
"""Asked of the seconds with an empty and with a full job history, relative to the pool's."""
FILLS = "one model fills a core, where an array gains little over a process for each"
NEEDS = {"LoRA": ("transformers",), "BERT-Tiny": ("transformers",), "tabular": ("sklearn",), "200 linear": ("sklearn",)}


def _measurement(name: str) -> Measurement:
    words = "-".join(name.lower().replace(",", "").split())
    command = ("benchmarks/searches.py", "--searches", name)
    code = ("src/shoal", "benchmarks/searches.py", "benchmarks/search_tasks", "benchmarks/rivals/plain_search.py")
    needs = (*CORE, *NEEDS.get(name, ()))
    return Measurement(f"search-{words}", name, 120, 900, command, (*command, "--quick"), code, needs)


def _experiments(name: str) -> tuple[Experiment, Experiment]:
    measurement = _measurement(name)

    def of_pool(figures: Figures, history: str) -> float:
        found: float = figures["searches"][name]["of_pool"][history]
        return found

    return (
        Experiment(
            f"{name}, empty history", "–", "–", "seconds relative to a pool of two forked processes", measurement,
            lambda figures: of_pool(figures, "empty"), EMPTY, "at most", unit="", noise=0.08, why=FILLS,
        ),
        Experiment(
            f"{name}, full history", "–", "–", "the same, with what the run before has measured", measurement,
            lambda figures: of_pool(figures, "full"), FULL, "at most", unit="", noise=0.08, why=FILLS,
        ),
    )  # fmt: skip


EXPERIMENTS = tuple(each for name in NAMES for each in _experiments(name))
