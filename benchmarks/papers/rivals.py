"""The rivals of Shoal in the same search, and the costs of Shoal itself: starts, repeats, the engine."""

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["DEMO", "ENGINE", "EXPERIMENTS", "OVER_RAY", "PEERS", "RAPIDFIRE", "START"]

PEERS = Measurement(
    "rivals", "Shoal and its rivals in the same search", 300, 1400,
    ("benchmarks/search_vs_peers.py",), ("benchmarks/search_vs_peers.py", "--quick"),
    needs=(*CORE, "sklearn", "optuna", "ray", "syne_tune"),
)  # fmt: skip
DEMO = Measurement(
    "demo", "make demo", 120, 540, ("benchmarks/demo.py", "--check"), ("benchmarks/demo.py", "--quick", "--check"),
    needs=(*CORE, "sklearn"),
)  # fmt: skip
START = Measurement(
    "start", "From the command to the first step", 25, 120, ("benchmarks/start.py",), ("benchmarks/start.py", "--quick")
)
ONE_SEED, WITH_FIVE = "32 perceptrons", "32 perceptrons, five seeds"
FIVE_SEEDS = ("benchmarks/searches.py", "--rounds", "1", "--ways", "pool", "empty", "full", "--searches", ONE_SEED,
              WITH_FIVE)  # fmt: skip
REPEATS = Measurement(
    "repeats", "Five seeds beside one", 50, 240, FIVE_SEEDS, (*FIVE_SEEDS, "--quick"), needs=(*CORE, "sklearn")
)
ENGINE = Measurement(
    "engine", "The engine for each trial", 20, 90, ("benchmarks/engine_overhead.py",),
    ("benchmarks/engine_overhead.py", "--quick"),
)  # fmt: skip

SEARCH = "32 learning rates of an MLP on handwritten digits, 10 epochs, two cores, from the call to the result: "
BY_HAND = (
    "the ensemble is code for this one model, optimizer and grid: no process starts, nothing is measured or compared "
    "with plain copies, and neither checkpoints nor a journal are written"
)
SHORT = "so short a search is largely starts, measurements, validation and checkpoints"
IMPORTS = "a process of the node imports torch and scikit-learn, which a local search has by a fork of its caller"
OVER_RAY = "Shoal over Ray, known model"
RAPIDFIRE = "0.16.2 needs Python 3.12 or newer, an NVIDIA GPU and a trainer of Hugging Face"
CNNS = "the CNNs take most of the time, and gain little from fusion on a CPU"
TWO_KINDS = "64 MLPs and CNNs on handwritten digits, 10 epochs, each way twice"
TABLE = "32 perceptrons on a table of 4000 rows, 4 epochs"
TRIALS = "ASHA, 10,000 trials that report at once, with the journal"


def against(rival: str, setting: str, asked: float = 1.0, noise: float = 0.2, why: str = "") -> Experiment:
    """The time of a rival in times of Shoal's, which has an empty history."""
    return Experiment(
        f"{rival} against Shoal", "", "", SEARCH + setting, PEERS,
        lambda found: found["times"][rival], asked, noise=noise, why=why,
    )  # fmt: skip


def of_demo(found: Figures, way: str) -> float:
    """The time of a way in times of Shoal's."""
    return found["seconds"][way] / found["seconds"]["Shoal on 2 slots"]


def of_search(found: Figures, name: str) -> Figures:
    """The figures of one of several searches."""
    figures: Figures = found["searches"][name]
    return figures


EXPERIMENTS: tuple[Experiment, ...] = (
    against("plain loop", "PyTorch's tutorial loop, with a DataLoader, one run", 5.0, noise=0.3, why=SHORT),
    against("plain loop, tensors indexed", "the loop without a DataLoader"),
    against("forked pool", "two processes forked with torch loaded, one thread each"),
    against("forked pool, tensors indexed", "the same pool without a DataLoader"),
    against("spawned pool", "two processes that start anew"),
    against("torch.func by hand", "`vmap` over `stack_module_state`, with an Adam of 32 rates by hand", why=BY_HAND),
    against("Optuna", "5.0, `GridSampler`, in one process, one run", noise=0.3),
    against("Ray Tune", "2.60, a process for each trial, on a cluster that is up, one run", 20.0, noise=0.3),
    against("Ray Tune, reuse_actors", "2.60, processes reused, on a cluster that is up, one run", noise=0.3),
    against("Syne Tune", "0.16, local back end, a process for each trial, one run", noise=0.3),
    Experiment(
        "Ray Tune against Shoal over Ray", "", "", SEARCH + "both on a cluster that is up", PEERS,
        lambda found: found["seconds"]["Ray Tune"] / found["seconds"][OVER_RAY], 15.0, noise=0.3, why=IMPORTS,
    ),
    Experiment(
        "Shoal over Ray, beyond a local search", "", "", SEARCH + "the first of a program", PEERS,
        lambda found: found["seconds"][OVER_RAY] - found["seconds"]["Shoal, known model"], 2.0, "at most", "s",
        noise=0.3, why=IMPORTS,
    ),
    Experiment(
        "forked pool against Shoal, two kinds of models", "", "", TWO_KINDS, DEMO,
        lambda found: of_demo(found, "a pool of 2 forked processes"), 1.3, why=CNNS,
    ),
    Experiment(
        "plain loop against Shoal, two kinds of models", "", "", TWO_KINDS, DEMO,
        lambda found: of_demo(found, "a loop"), 4.0, why=f"{CNNS}; two slots alone give at most twice the speed",
    ),
    Experiment(
        "From `shoal run FILE` to the first step", "", "", "an MLP, empty history, median of 5 processes", START,
        lambda found: found["seconds"]["run"], 2.5, "at most", "s",
    ),
    Experiment(
        "Plain script against `shoal run FILE`, to the first step", "", "", "median of 5 processes", START,
        lambda found: found["seconds"]["plain"] / found["seconds"]["run"], 1.0,
    ),
    Experiment(
        "Five seeds of each configuration against one", "", "", TABLE, REPEATS,
        lambda found: of_search(found, WITH_FIVE)["seconds"]["full"] / of_search(found, ONE_SEED)["seconds"]["full"],
        1.8, "at most",
        why="one seed already trains several models at once, whose matrix products fill a core",
    ),
    Experiment(
        "Five seeds in Shoal against a forked pool", "", "", TABLE, REPEATS,
        lambda found: of_search(found, WITH_FIVE)["compared"]["full of pool"], 1.0, "at most",
    ),
    Experiment(
        "CPU time of the engine for a trial", "", "", TRIALS, ENGINE, lambda found: found["ms_a_trial"], 0.3,
        "at most", "ms", why="most of it is planning and the journal",
    ),
)  # fmt: skip
