"""Pack (Liu et al., SIGMOD 2021, arXiv:2002.02885): several models in one process, and pack-aware Hyperband.

Section 4.6, processes that share a GPU, is measured where there is one: the rows of `placement.py` on the page of GPUs.
"""

from collections.abc import Callable

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]

P5000 = "Quadro P5000, TensorFlow"


def measurement(name: str, title: str, seconds: int, *arguments: str) -> Measurement:
    """Return a measurement of some seconds on two cores."""
    command = ("benchmarks/packing.py", "--parts", *arguments)
    quick = (*command, "--quick")
    return Measurement(f"pack-{name}", title, int(seconds / 1.5), 3 * seconds, command, quick, needs=(*CORE, "PIL"))


ABLATION = measurement("ablation", "packs of equal networks, and of members that differ in a factor", 270, "ablation")
MEMORY = measurement("memory", "memory of packs", 45, "memory")
SWITCHING = measurement("switching", "what another model adds to a search", 30, "switching")
SEARCHES = {
    search: measurement(name, f"pack-aware Hyperband, {search}", seconds, "hyperband", "--searches", search)
    for name, search, seconds in (
        ("mlp3", "MLP-3", 140), ("tensors", "MLP-3, tensors", 70), ("mobilenet", "MobileNet", 70),
        ("resnet", "ResNet", 45), ("densenet", "DenseNet", 60),
    )
}  # fmt: skip


def least(figure: str, *names: str) -> Callable[[Figures], float]:
    """The least of the cases whose titles contain one of these names."""
    return lambda found: min(
        each[figure] for title, each in found["ablation"].items() if any(name in title for name in names)
    )


def ratio(part: str, of: str, above: str, below: str) -> Callable[[Figures], float]:
    return lambda found: found[part][of][above] / found[part][of][below]


IN_MEMORY = "in memory, nothing is loaded that a pack could share"
NO_TIME_LEFT = "trials of unlike structure or batch size are no array, and two cores leave packs no idle time to share"
UNEQUAL = "what differs in data or batch size trains one after another; Shoal adds 0.1 ms to steps of one or two"
NEAR = "steps of about a millisecond: the few that are timed do not decide reliably whether they are faster together"
OWN_NUMBERS = "other pictures share nothing; seeding the random numbers of each picture takes time"
SLOWER = "packs can be slower than their parts"
SATURATED = "the gain grows until resources are saturated"
PACKS = (
    # title, the paper's, figure, asked, the paper's value, why
    ("A pack of 2 MLP-3", "up to 40 % less time", least("gain", "tensors, none, 2"), 1.67, 1.67, IN_MEMORY),
    ("A pack of 8 MLP-3", "up to 80 % less time for many MLPs", least("gain", "tensors, MLP-3, 8"), 5, 5, IN_MEMORY),
    ("A pack of 8 MobileNets", SATURATED, least("gain", "MobileNet, 8"), 1, None, ""),
    ("A pack of 8 ResNets", SATURATED, least("gain", "ResNet, 8"), 1, None, ""),
    ("A pack of 8 DenseNets", "gains up to three, four are out of memory", least("gain", "DenseNet, 8"), 1, None, ""),
    ("Batches of 32 and 100: the least gain", "positive, hardly changed", least("gain", "batches of"), 1, None, NEAR),
    ("The same data and batch size, from files", "up to 40 % less time", least("gain", "png, none, 2"), 1.67, 1.67, ""),
    ("The same data, all else varied: the least gain", "always gains",
     least("gain", "none, 2", "model, 2", "optimizer, 2", "batch size, 2"), 1, None, UNEQUAL),
    ("Different data, or all different", "up to 10 % slower", least("gain", "data, 2", "all, 2"), 1, 0.91, UNEQUAL),
    ("Tensors: the least speed over the better of both rivals", SLOWER, least("speed", "tensors"), 0.97, None, UNEQUAL),
    ("Files: the least speed over the better of both rivals", SLOWER, least("speed", "png"), 0.97, None, OWN_NUMBERS),
)  # fmt: skip
TABLE_1 = {"MLP-3": (61, 11), "ResNet": (130, 14)}
"""Network -> seconds of an epoch, and the overhead of two."""
TABLE_4 = {
    "MLP-3": {"original": 9236, "batch_size": 5260, "random": 3682, "knn": 3491, "cost": 3491},
    "MobileNet": {"original": 52092, "batch_size": 45787, "random": 36973, "knn": 30182, "cost": 30182},
    "ResNet": {"original": 98067, "batch_size": 89162, "random": 75436, "knn": 70047, "cost": 70047},
    "DenseNet": {"original": 131494, "batch_size": 126437, "random": 117405, "knn": 108673, "cost": 108673},
}
"""Seconds by network and packing; `cost`, which is Shoal's, is held against the paper's best."""
PACKINGS = {
    "batch_size": "packing by batch size", "random": "random packing", "knn": "kNN packing", "cost": "Shoal's packing",
}  # fmt: skip
SPACE = "configurations of the paper's 1056, R = {}, {} pictures of CIFAR-10, from call to result, over {}"
ORIGINAL = "one after another on all cores"
MLP, CONVOLUTIONAL = SPACE.format(27, 2500, ORIGINAL), SPACE.format(9, 400, ORIGINAL)

EXPERIMENTS: tuple[Experiment, ...] = (
    *(
        Experiment(
            title, "sections 4.3 and 4.7, figures 4 and 6", f"{reported}; {P5000}",
            "two MLP-3 if nothing else is said, 1250 (MLP-3) or 300 pictures of CIFAR-10 as tensors (preprocessing "
            "out) or PNG files (in), batch 50; gains over a plain loop, speeds over that or the paper's pack",
            ABLATION, figure, asked, published=published, noise=0.3, why=why,
        )
        for title, reported, figure, asked, published, why in PACKS
    ),
    *(
        Experiment(
            f"Memory of a pack of two {network} relative to two processes", "section 4.4, figure 5",
            f"the sum of both; {P5000}", "growth of a process in two epochs, with profiles and the choice of a "
            "step's form", MEMORY, ratio("memory", network, "shoal", "processes"), 1, "at most", published=1,
        )
        for network in TABLE_1
    ),
    *(
        Experiment(
            f"Training of another {network} in a search, relative to its epoch alone", "section 4.5, table 1",
            f"two epochs of {epoch} s and {overhead} s more; {P5000}",
            "a search of 10 models over one of 2, unpacked on one core, one epoch of 5000 pictures, or 1200 for "
            "convolutional networks",
            SWITCHING, ratio("switching", network, "model", "epoch"), round(1 + overhead / (2 * epoch), 2), "at most",
            published=round(1 + overhead / (2 * epoch), 2), noise=0.3,
            why="epochs are hundreds of times as short as the paper's",
        )
        for network, (epoch, overhead) in TABLE_1.items()
    ),
    *(
        Experiment(
            f"Hyperband, {network}: {PACKINGS[packing]}", "section 5.3, table 4",
            f"{seconds['original']} s, {'best packing' if packing == 'cost' else packing} {taken} s; R = 81, {P5000}",
            MLP if network == "MLP-3" else CONVOLUTIONAL, SEARCHES[network],
            ratio("hyperband", network, "original", packing),
            round(seconds["original"] / taken, 2), published=round(seconds["original"] / taken, 2), noise=0.3,
            why=NO_TIME_LEFT,
        )
        for network, seconds in TABLE_4.items() for packing, taken in seconds.items() if packing != "original"
    ),
    *(
        Experiment(
            f"Hyperband, MLP-3 in memory: Shoal's packing against {name}", "section 5.3, table 4",
            f"2.65 times as fast as one after another; {P5000}", SPACE.format(27, 2500, scale),
            SEARCHES["MLP-3, tensors"], ratio("hyperband", "MLP-3, tensors", name, "cost"), asked, published=published,
            noise=0.3, why="30 structures of 49 trials: most train alone, and measuring, checks and choices are on top",
        )
        for name, scale, asked, published in (
            ("original", ORIGINAL, 2, 2.65), ("pool", "a forked process for each core", 1, None),
        )
    ),
    Experiment(
        "Hyperband, MLP-3: measured distances, relative to kNN", "section 5.2", "up to 18 % slower",
        MLP, SEARCHES["MLP-3"], ratio("hyperband", "MLP-3", "knn", "knn, measured"), 0.82, published=0.82,
        noise=0.3,
    ),
)  # fmt: skip
