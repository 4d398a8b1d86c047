"""A search on a GPU, from the call to the result: a plain loop, processes that share the GPU by MPS, and Shoal.

- plain   one configuration after another in one process
- pool    processes that share the GPU by MPS, or by time slices where MPS cannot be had; each takes configurations from
          a queue, and successive halving continues its survivors from files
- empty   Shoal with an empty job history
- full    the same search again, with what the run before has measured
- no MPS  Shoal with an empty job history and `sharing="plain"`

All ways have the same configurations, seeds, orders of samples and budgets. Each runs in a process of its own, forked
from one that has imported torch, Shoal and the modules of the task and has not used the GPU. The plain ways index
tensors on the GPU. Below the ways of Shoal the table shows what the time was spent on, as `shoal report --accounting`
says it; "closing" is the time between the last event of the study and the return of `tune`. The overhead of a way is
its time without training steps.

    python benchmarks/gpu_search.py [--search resnet18] [--configurations 8 32] [--halving] [--device cuda:0] [--quick]
"""

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # takes seconds, which else each process would pay that makes its first optimizer
from models.bert import classifier
from placed.jobs import Pictures
from rivals.forked import in_a_fork
from rivals.plain_search import Asked, PlainSearch, in_a_loop, in_processes
from search_tasks.search import Supervised
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.algorithms.base import Algorithm
from shoal.core.activity import Activity
from shoal.core.errors import MpsError
from shoal.host.discover import discover
from shoal.journal.view import JournalView
from shoal.look.accounting import accounting
from shoal.run.mps import MpsDaemon

PLAIN, POOL, EMPTY, SECOND, WITHOUT_MPS = "plain", "pool", "empty", "full", "no MPS"
WAYS = (PLAIN, POOL, EMPTY, SECOND, WITHOUT_MPS)
SEED = 1
METRIC, MODE = "valid_loss", "min"
MOST_OF_PLAIN = {8: 0.6, 32: 0.35}
"""Asked of a ResNet-18 search with an empty history: seconds relative to the plain loop's, by configurations."""
MOST_OF_POOL = {32: 0.7}
"""Likewise relative to the pool's."""
MOST_OF_FIRST_OVERHEAD = 0.5
"""Asked of a second search's overhead, relative to the first one's."""
SHOWN_SECONDS = 0.05
"""Activities that take less are not in the table."""


class Rows(Supervised):
    """A perceptron of two hidden layers on random rows.

    Args:
        rows: To train on; a quarter as many more to validate on.
    """

    COLUMNS, WIDTH, CLASSES = 32, 128, 4

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def data(self, config):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows * 5 // 4, self.COLUMNS, generator=generator)
        y = (x @ torch.randn(self.COLUMNS, self.CLASSES, generator=generator)).argmax(1)
        return TensorDataset(x[: self.rows], y[: self.rows]), TensorDataset(x[self.rows :], y[self.rows :])

    def model(self, config):
        sizes = (self.COLUMNS, self.WIDTH, self.WIDTH)
        hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(self.WIDTH, self.CLASSES))


class Sentences(Supervised):
    """BERT-Tiny on random sentences, as long and as many as those of reviews of films.

    Args:
        sentences: To train on; a quarter as many more to validate on.
    """

    WORDS, LENGTH = 4000, 48

    def __init__(self, sentences: int) -> None:
        self.sentences = sentences

    def data(self, config):
        generator = torch.Generator().manual_seed(0)
        count = self.sentences * 5 // 4
        x = torch.randint(self.WORDS, (count, self.LENGTH), generator=generator)
        y = (x[:, 0] < self.WORDS // 2).long()
        return (
            TensorDataset(x[: self.sentences], y[: self.sentences]),
            TensorDataset(x[self.sentences :], y[self.sentences :]),
        )

    def model(self, config):
        return classifier(self.WORDS)

    def loss(self, model, batch):
        return model(input_ids=batch[0], labels=batch[1]).loss

    def metrics(self, model, batch):
        return {"accuracy": (model(input_ids=batch[0]).logits.argmax(1) == batch[1]).float().mean()}


@dataclass(frozen=True)
class Sought:
    """What is searched.

    Args:
        task: Makes the task, for a quick run or not.
        space: Search space.
        configurations: By default.
        imports: Name of a module that the task imports when it is used; "" for none.
    """

    task: Callable[[bool], shoal.Task]
    space: Mapping[str, Any]
    configurations: tuple[int, ...]
    imports: str = ""


SEARCHES = {
    "resnet18": Sought(
        lambda quick: Pictures(False, 24, 8) if quick else Pictures(True, 5000, 1000),
        {"lr": shoal.loguniform(1e-3, 1e-1), "batch_size": 64},
        (8, 32),
    ),
    "mlp": Sought(
        lambda quick: Rows(64 if quick else 8000), {"lr": shoal.loguniform(1e-4, 1e-2), "batch_size": 64}, (64,)
    ),
    "bert-tiny": Sought(
        lambda quick: Sentences(16 if quick else 2000),
        {"lr": shoal.loguniform(1e-4, 1e-3), "batch_size": 32},
        (24,),
        "transformers.models.bert.modeling_bert",
    ),
}
"""ResNet-18 trains on 5,000 pictures of 32 x 32 pixels with batches of 64, by SGD with momentum."""


@dataclass(frozen=True)
class Run:
    """One way of a search.

    Args:
        seconds: From the call to the result.
        best: Best of the trials' last validation losses.
        spent: Seconds by activity; empty in a plain way.
        note: What else the table says.
    """

    seconds: float
    best: float
    spent: Mapping[str, float]
    note: str = ""

    @property
    def overhead(self) -> float:
        """Seconds without training steps."""
        return self.seconds - self.spent.get(str(Activity.STEPS), 0.0)

    def figures(self) -> dict[str, Any]:
        spent = {name: round(seconds, 2) for name, seconds in self.spent.items() if seconds >= SHOWN_SECONDS}
        return {"seconds": round(self.seconds, 2), "best": round(self.best, 4)} | ({"spent": spent} if spent else {})


@dataclass(frozen=True)
class Setting:
    """What all ways of a search have in common.

    Args:
        task: What is trained.
        space: Search space, with all that the task reads.
        configurations: Number of them.
        epochs: Of each configuration, or of the last rung.
        halving: Whether half of the configurations go on after each rung.
        device: As of `shoal.tune`.
        processes: Of the pool, at most.
        quick: Whether Shoal trains in this process.
    """

    task: shoal.Task
    space: Mapping[str, Any]
    configurations: int
    epochs: int
    halving: bool
    device: str
    processes: int
    quick: bool

    def algorithm(self) -> Algorithm:
        if self.halving:  # as many epochs as without, where all rungs are full
            return shoal.SuccessiveHalving(n=self.configurations, max_epochs=2 * self.epochs, eta=2)
        return shoal.Random(self.configurations, epochs=self.epochs)


def run(setting: Setting, way: str, cache: str) -> Run:
    """Run a search in one way.

    Args:
        cache: Folder of what Shoal measures; new but for the way "full".
    """
    if way in (PLAIN, POOL):
        return run_plain(setting, way)
    os.environ["SHOAL_CACHE"] = cache
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/inductor"
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        study = shoal.tune(
            setting.task, setting.space, metric=METRIC, mode=MODE, algorithm=setting.algorithm(), seed=SEED,
            devices=setting.device, sharing="plain" if way == WITHOUT_MPS else "auto",
            backend="inline" if setting.quick else "local", directory=f"{folder}/study", show_progress=False,
        )  # fmt: skip
        best = study.best_trial.objective
        seconds = time.perf_counter() - began
        with JournalView.read(f"{folder}/study") as journal:
            found = accounting(journal, time.time())
    spent = {str(activity): each for activity, each in found.seconds.items()} | {"closing": seconds - found.wall}
    return Run(seconds, best, spent)


def run_plain(setting: Setting, way: str) -> Run:
    (device,) = [each for _, each in discover(setting.device)]
    asked = Asked(setting.task, setting.space, setting.algorithm(), METRIC, MODE, SEED, torch.device(device.torch_name))
    if way == PLAIN:
        return _timed(partial(in_a_loop, asked), "")
    processes = min(setting.processes, setting.configurations)
    torch.set_num_threads(1)
    daemon, note = None, f"{processes} processes"
    began = time.perf_counter()
    if device.is_cuda:
        daemon = MpsDaemon(device.uuid)
        try:
            daemon.start()
            note += ", MPS"
        except MpsError as error:
            daemon, note = None, f"{note}, time slices: {error}"
    begun = time.perf_counter() - began
    environment = None if daemon is None else daemon.environment()
    with tempfile.TemporaryDirectory() as folder:
        found = _timed(partial(in_processes, asked, Path(folder), processes, environment=environment), note)
    if daemon is not None:
        daemon.stop()
    return replace(found, seconds=found.seconds + begun)


def _timed(searched: Callable[[], PlainSearch], note: str) -> Run:
    began = time.perf_counter()
    best = searched().best
    return Run(time.perf_counter() - began, best, {}, note)


def measured(setting: Setting, ways: list[str], forked: bool) -> dict[str, Run]:
    """Run all ways in turn, and print a row of each as it ends."""
    found: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as place:
        for way in ways:
            given = (setting, way, f"{place}/{EMPTY if way == SECOND else way}")
            found[way] = in_a_fork(run, *given) if forked else run(*given)
            print(row(setting, way, found), flush=True)
    return found


def row(setting: Setting, way: str, found: Mapping[str, Run]) -> str:
    """A line of the table, and below it what Shoal spent its time on."""
    this = found[way]
    columns = [f"{this.seconds / found[each].seconds:9.2f}" if each in found else f"{'':9}" for each in (PLAIN, POOL)]
    line = f"{setting.configurations:4} {way:7} {this.seconds:8.2f} {' '.join(columns)} {this.best:10.4f}  {this.note}"
    if not this.spent:
        return line.rstrip()
    spent = [f"{name} {seconds:.2f}" for name, seconds in this.spent.items() if seconds >= SHOWN_SECONDS]
    return f"{line.rstrip()}\n{'':12} overhead {this.overhead:.2f} s; seconds: {', '.join(spent)}"


def judged(configurations: int, found: Mapping[str, Run]) -> list[str]:
    """What is asked of a ResNet-18 search and was not reached; nothing of ways that did not run."""
    said = []
    for other, asked in ((PLAIN, MOST_OF_PLAIN), (POOL, MOST_OF_POOL)):
        if configurations in asked and {EMPTY, other} <= found.keys():
            part = found[EMPTY].seconds / found[other].seconds
            if part > asked[configurations]:
                said.append(f"{configurations}: {part:.2f} of the {other}'s seconds, asked {asked[configurations]}")
    if {EMPTY, SECOND} <= found.keys():
        part = found[SECOND].overhead / found[EMPTY].overhead
        if part > MOST_OF_FIRST_OVERHEAD:
            said.append(
                f"{configurations}: a second search has {part:.2f} of the first one's overhead, "
                f"asked {MOST_OF_FIRST_OVERHEAD}"
            )
    return said


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--search", choices=list(SEARCHES), nargs="+", default=["resnet18"])
    parser.add_argument("--configurations", type=int, nargs="+", help="by default those of the search")
    parser.add_argument("--epochs", type=int, default=2, help="of each configuration; with --halving their mean")
    parser.add_argument("--halving", action="store_true", help="successive halving instead of random search")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--processes", type=int, default=8, help="of the pool, at most")
    parser.add_argument("--device", default="cpu:1", help="one device, as of shoal.tune; nothing is judged on a CPU")
    parser.add_argument("--quick", action="store_true", help="two tiny configurations, in this process on a CPU")
    options = parser.parse_args()
    options.epochs = 1 if options.quick else options.epochs
    if SECOND in options.ways and EMPTY not in options.ways:
        parser.error(f"--ways: {SECOND!r} goes on with the history of {EMPTY!r}; name that too")
    return options


def main() -> int:
    options = arguments()
    warnings.simplefilter("ignore")
    logging.getLogger("shoal").setLevel(logging.ERROR)
    # Nothing here may look for the GPU: a process that has opened its driver cannot be forked.
    on_gpu = not options.device.startswith("cpu")
    print(f"{options.device}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}; "
          f"{'halving' if options.halving else f'{options.epochs} epochs'}")  # fmt: skip
    print(f"{'':4} {'way':7} {'seconds':>8} {'of plain':>9} {'of pool':>9} {'best':>10}")
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for name in options.search:
        print(name, flush=True)
        sought = SEARCHES[name]
        if sought.imports:
            __import__(sought.imports)
        task, space = sought.task(options.quick), dict(sought.space)
        if isinstance(task, Pictures):
            space["model"] = "ResNet-8" if options.quick else "ResNet-18"
        for count in (2,) if options.quick else options.configurations or sought.configurations:
            setting = Setting(
                task, space, count, options.epochs, options.halving, options.device,
                options.processes, options.quick,
            )  # fmt: skip
            found = measured(setting, options.ways, forked=not options.quick or on_gpu)
            figures[f"{name}, {count}"] = {way: each.figures() for way, each in found.items()}
            if name == "resnet18" and on_gpu and not options.halving:
                missed += judged(count, found)
    missed = [] if options.quick else missed
    print(json.dumps({"searches": figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
