"""Pack (Liu et al., SIGMOD 2021, arXiv:2002.02885): several models in one process, and pack-aware Hyperband.

Section 4.6, processes that share a GPU, is measured where there is one: the rows of `placement.py` on the page of GPUs.
"""

from collections.abc import Callable

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]

P5000 = "Quadro P5000, TensorFlow"
TABLE = {
    "MLP-3": (9236, 5260, 3682, 3491),
    "MobileNet": (52092, 45787, 36973, 30182),
    "ResNet": (98067, 89162, 75436, 70047),
    "DenseNet": (131494, 126437, 117405, 108673),
}
"""Table 4: network -> seconds of the original, and of the packings batch size, random and kNN."""
PACKINGS = ("batch_size", "random", "knn")
SWITCHING = {"MLP-3": (61, 11), "MobileNet": (107, 13), "ResNet": (130, 14), "DenseNet": (144, 17)}
"""Table 1: network -> seconds of an epoch, and the overhead of two."""
CODE = ("benchmarks/packing.py", "benchmarks/packs", "benchmarks/models/mobilenet.py", "src/shoal")


def measurement(name: str, title: str, seconds: int, *arguments: str) -> Measurement:
    """Of some seconds on two cores."""
    command = ("benchmarks/packing.py", "--parts", *arguments)
    return Measurement(
        f"pack_{name}", title, int(seconds / 1.5), 3 * seconds, command, (*command, "--quick"), CODE, (*CORE, "PIL")
    )


def hyperband(name: str, search: str, seconds: int) -> Measurement:
    return measurement(name, f"pack-aware Hyperband, {search}", seconds, "hyperband", "--searches", search)


IMPROVEMENT = measurement("improvement", "packs of equal networks", 260, "improvement")
ABLATION = measurement("ablation", "packs of members that differ in a factor", 300, "ablation")
MEMORY = measurement("memory", "memory of packs", 90, "memory")
SWITCHING_RUN = measurement("switching", "what another model adds to a search", 60, "switching")
TENSORS = hyperband("tensors", "MLP-3, tensors", 70)
CNN = hyperband("cnn", "CNN", 60)
SEARCHES = {
    "MLP-3": hyperband("mlp3", "MLP-3", 160),
    "MobileNet": hyperband("mobilenet", "MobileNet", 100),
    "ResNet": hyperband("resnet", "ResNet", 60),
    "DenseNet": hyperband("densenet", "DenseNet", 80),
}
SPACE = "configurations of the paper's 1056, R = {}, {} pictures of CIFAR-10, from call to result"
SCALES = {name: SPACE.format(27, 2500) if name == "MLP-3" else SPACE.format(9, 400) for name in TABLE}
EQUAL = "tensors of CIFAR-10, batch 50, over a plain loop; 1250 pictures for MLP-3, 300 for convolutional networks"


def gain(part: str, *names: str) -> Callable[[Figures], float]:
    """How many times as fast as one after another Shoal is: the least of the cells whose names contain one of these."""
    return lambda found: min(
        each["seq"] / each["shoal"] for cell, each in found[part].items() if any(name in cell for name in names)
    )


def speed(part: str, name: str) -> Callable[[Figures], float]:
    """The least speed relative to the better of both rivals, of the cells whose names contain this."""
    return lambda found: min(float(each["speed"]) for cell, each in found[part].items() if name in cell)


def times(search: str, packing: str, *rivals: str) -> Callable[[Figures], float]:
    """How many times as fast a packing is as the fastest of the rivals."""
    return lambda found: min(found["hyperband"][search][name] for name in rivals) / found["hyperband"][search][packing]


def memory_of(network: str) -> Callable[[Figures], float]:
    return lambda found: found["memory"][network]["shoal"] / found["memory"][network]["processes"]


def switching_of(network: str) -> Callable[[Figures], float]:
    return lambda found: 1 + found["switching"][network]["overhead"] / found["switching"][network]["epoch"]


def packs_of(network: str, members: int, reported: str, asked: float, published: float | None = None) -> Experiment:
    return Experiment(
        f"A pack of {members} {network}", "section 4.3, figure 4(a)", f"{reported}; {P5000}", EQUAL, IMPROVEMENT,
        gain("improvement", f"tensors, {network}, 50, {members}"), asked, published=published, noise=0.3,
        why="in memory, nothing is loaded that a pack could share, and two cores are busy with one member",
    )  # fmt: skip


def ablated(
    title: str, reported: str, figure: Callable[[Figures], float], asked: float,
    published: float | None = None, members: str = "two MLP-3", why: str = "",
) -> Experiment:  # fmt: skip
    setting = f"{members}, 1250 pictures of CIFAR-10 as tensors (preprocessing out) and as PNG files (in)"
    return Experiment(
        title, "section 4.7, figure 6", reported, setting, ABLATION, figure, asked, published=published,
        noise=0.3, why=why,
    )  # fmt: skip


def searched(network: str, packing: str) -> Experiment:
    """A row of table 4; `cost` is held against the paper's best."""
    original, *seconds = TABLE[network]
    paper = dict(zip(PACKINGS, seconds, strict=True)).get(packing, seconds[-1])
    speed_up = round(original / paper, 2)
    name = "Shoal's packing" if packing == "cost" else f"the paper's packing {packing}"
    return Experiment(
        f"Hyperband, {network}: {name}", "section 5.3, table 4",
        f"{original} s, {'best packing' if packing == 'cost' else packing} {paper} s; R = 81, {P5000}",
        f"{SCALES[network]}, over one after another on all cores", SEARCHES[network],
        times(network, packing, "original"), speed_up, published=speed_up,
        why="packs without fused arrays take their steps one after another: two cores have no time left that the "
        "members could share" if packing != "cost" else "the search is short, and its start counts",
    )  # fmt: skip


EXPERIMENTS: tuple[Experiment, ...] = (
    packs_of("MLP-3", 2, "up to 40 % less time for two models", 1.67, 1.67),
    packs_of("MLP-3", 8, "up to 80 % less time for many MLPs", 5.0, 5.0),
    packs_of("MobileNet", 8, "the gain grows until resources are saturated", 1.0),
    packs_of("ResNet", 8, "the gain grows until resources are saturated", 1.0),
    packs_of("DenseNet", 2, "gains up to three models", 1.0),
    packs_of("DenseNet", 8, "four are out of memory", 1.0),
    Experiment(
        "Two MLP-3, two ResNets at batches of 32 and 100: the least gain", "section 4.3, figure 4(b)",
        f"positive at all batch sizes, hardly changed by them; {P5000}", EQUAL, IMPROVEMENT,
        gain("improvement", ", 32,", ", 100,"), 1.0, noise=0.3,
    ),
    Experiment(
        "Packs against the faster of a loop and the paper's pack: the least speed", "section 4.3, figure 4",
        "packs can be slower than their parts", EQUAL, IMPROVEMENT,
        speed("improvement", "tensors"), 0.97,
    ),
    ablated(
        "The same data and batch size, preprocessing out", "the best case, up to 40 % less time",
        gain("ablation", "tensors, none, 2"), 1.67, 1.67, why="a pack of tensors in memory has little to share",
    ),
    ablated(
        "The same data and batch size, preprocessing in", "the best case, up to 40 % less time",
        gain("ablation", "png, none, 2"), 1.67, 1.67,
    ),
    ablated(
        "The same data, all else varied: the least gain", "always gains",
        gain("ablation", "none, 2", "model, 2", "optimizer, 2", "batch size, 2"), 1.0,
    ),
    ablated(
        "Different data, or all different: the least gain", "up to 10 % slower",
        gain("ablation", "data, 2", "all, 2"), 1.0, 0.91,
    ),
    *(
        ablated(
            f"Against the faster of a loop and the paper's pack, {name}: the least speed",
            "packs can be slower than their parts", speed("ablation", pipeline), 0.97,
            members="two and eight MLP-3",
        )
        for pipeline, name in (("tensors", "preprocessing out"), ("png", "preprocessing in"))
    ),
    ablated(
        "The paper's pack decodes more files than Shoal if batch sizes differ", "shared preprocessing runs once",
        lambda found: (lambda each: each["pack"] / each["shoal"])(found["ablation"]["png, batch size, 8"]["decoded"]),
        1.0, members="eight MLP-3",
    ),
    *(
        Experiment(
            f"Memory of a pack of two {network} relative to two processes", "section 4.4, figure 5",
            f"the sum of both; {P5000}", f"peak of all tensors in training; {EQUAL}", MEMORY, memory_of(network), 1.0,
            "at most", published=1.0, why="profiles and the choice of a step's form are measured with more members",
        )
        for network in TABLE
    ),
    *(
        Experiment(
            f"Training of another {network} in a search, relative to its epoch alone", "section 4.5, table 1",
            f"two epochs of {epoch} s and {overhead} s more; {P5000}",
            "a search of 10 models over one of 2, unpacked on one core, one epoch of 5000 pictures, or 1200 for "
            "convolutional networks",
            SWITCHING_RUN, switching_of(network), round(1 + overhead / (2 * epoch), 2), "at most",
            published=round(1 + overhead / (2 * epoch), 2), why="epochs are a hundred times as short as the paper's",
        )
        for network, (epoch, overhead) in SWITCHING.items()
    ),
    *(searched(network, packing) for network in TABLE for packing in ("cost", *PACKINGS)),
    Experiment(
        "Hyperband, CNN: Shoal's packing", "section 5.3, table 4", "1.2 to 1.7 times as fast on convolutional networks",
        f"{SPACE.format(9, 2500)}, over one after another on all cores", CNN, times("CNN", "cost", "original"), 1.7,
    ),
    Experiment(
        "Hyperband, MLP-3 in memory: Shoal's packing", "section 5.3, table 4", "2.7 times as fast",
        f"{SPACE.format(27, 2500)}, over one after another, or a forked process for each core", TENSORS,
        times("MLP-3, tensors", "cost", "original", "pool"), 1.0,
    ),
    Experiment(
        "Hyperband, MLP-3: measured distances, relative to kNN", "section 5.2", "up to 18 % slower",
        SCALES["MLP-3"], SEARCHES["MLP-3"], times("MLP-3", "knn, measured", "knn"), 0.82, published=0.82,
    ),
)  # fmt: skip
