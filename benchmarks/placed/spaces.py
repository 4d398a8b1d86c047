"""What the placement benchmark trains: HyperSack's search spaces SP1 to SP4, reduced, and mixes of demands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import shoal
from placed.jobs import FULL, QUICK, SMALL, Pictures
from placed.languages import LANGUAGE_MODELS, LanguageReviews
from placed.mixes import MIXES, Mixed, mix
from placed.ours import BY_TRIAL, FUSION_AND_PACKING, ONE_JOB
from placed.plain import PLAIN
from shoal.core.space import Space

__all__ = ["Jobs", "jobs"]


@dataclass(frozen=True)
class Jobs:
    """All jobs of a search.

    Args:
        task: What to train.
        space: The jobs as a search space, every point of which is one.
        epochs: Epochs of each job.
        rows: Ways of getting them done that are compared, unless others are asked for.
        asked: Way -> its least speed-up over one job per device; `LEAST` for others.
    """

    task: shoal.Task
    space: Mapping[str, Any]
    epochs: int
    rows: Sequence[str]
    asked: Mapping[str, float]

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The jobs as a list."""
        return Space(self.space).grid()


def jobs(name: str, *, gpu: bool, quick: bool) -> Jobs:
    """Return the jobs of a search space, or of a mix, by name."""
    if name in MIXES:
        asked = {BY_TRIAL: 1.3} if name == "input" else {}
        rows = (ONE_JOB, BY_TRIAL)
        return Jobs(
            Mixed(0.02 if quick else 1.0), mix(MIXES[name], 3 if quick else 12), 1 if quick else 10, rows, asked
        )
    sizes, batch_sizes = replace(FULL, samples=2500) if gpu else SMALL, (64,) if gpu else (8, 32)
    models: Sequence[str] = sizes.models
    task: shoal.Task = Pictures(sizes)
    rates, policies = 4 if gpu else 2, ("wfd",)
    match name:
        case "sp1":
            policies = ("ff", "ffd", "wf", "wfd")
        case "sp2":
            models, batch_sizes, policies = tuple(LANGUAGE_MODELS[gpu]), (8, 16, 32, 64), ("ff", "wfd")
            task = LanguageReviews(gpu, 2000 if gpu else 800, 200, length=128 if gpu else 32)
        case "sp3":
            models, batch_sizes, rates, policies = (models[4],), (8, 16, 32, 64), 6, ("ff", "wfd")
        case "sp4":
            rates *= 2
    if quick:
        batch_sizes, rates = batch_sizes[:1], 2
        models = models[:1] if name == "sp2" else QUICK.models
        task = LanguageReviews(False, 24, 8, length=8) if name == "sp2" else Pictures(QUICK)
    least = 5e-5 if name == "sp2" else 1e-5
    space = {
        "model": shoal.choice(models),
        "batch_size": shoal.choice(batch_sizes),
        "lr": shoal.grid([least * 1e4 ** (number / (rates - 1)) for number in range(rates)]),
    }
    asked = {"mps + ffd": 2.8, FUSION_AND_PACKING: 6.0} if gpu else {}
    return Jobs(task, space, 1, (PLAIN, ONE_JOB, *policies, FUSION_AND_PACKING), asked)
