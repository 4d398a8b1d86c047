"""Hermes (Son et al., Electronics 2021): time-sharing of devices by how fast trials converge."""

from collections.abc import Callable
from statistics import fmean

from papers.experiment import Experiment, Figures
from papers.measurement import Measurement

__all__ = ["CURVES", "EXPERIMENTS", "TRAININGS"]

PROGRAM = "benchmarks/time_sharing.py"
CURVES = Measurement(
    "hermes-curves", "bins of trials on real loss curves, simulated", 60, 360, (PROGRAM,), (PROGRAM, "--quick")
)
TRAININGS = Measurement(
    "hermes-trainings", "bins of trainings of four CNNs on one slot", 300, 1800,
    (PROGRAM, "--live"), (PROGRAM, "--live", "--quick"),
)  # fmt: skip

PUBLISHED = {"GoogLeNet": 2.08, "VGG16": 1.92, "VGG19": 4.04, "ResNet50": 3.39}
"""Mean speed-up of Hermes, over bins of both types."""
TOP_4 = 2.68
GPUS = "four RTX 2080 Ti, ImageNet, bins of 16 jobs, 4 or 12 of them good"
REPORTED = f"2.08, 1.92, 4.04 and 3.39 times as fast on four CNNs, the mean of both types; {GPUS}"
REPORTED_TOP = f"{TOP_4} times as fast on average; {GPUS}"
FASTEST = f"Hermes was the fastest of four policies in all but two of eight cases; {GPUS}"
SIMULATED = "virtual time, loss curves of 8 tasks of TaskSet, 5 bins of 16 trials each on 4 devices; `auto` over `fifo`"
LIVE = "reduced CNNs on MNIST, bins of 16 trainings of about a second on one slot, quantum 0.2 s; `auto` over `fifo`"
ORDER = (
    "over `fifo`, Hermes does not say over what; a switch takes a tenth of a quantum, and 12 good of 16 need no order"
)
LATE = "all twelve good trials converge fast; which are the best shows late"


def speed_up(kind: str, policy: str = "auto") -> Callable[[Figures], float]:
    """The mean over tasks or CNNs."""
    return lambda found: fmean(each[kind][policy] for each in found["speed_up"].values())


def speed_up_on(name: str, policy: str = "auto") -> Callable[[Figures], float]:
    """The mean of both types, on a task or of a CNN."""
    return lambda found: fmean(found["speed_up"][name][kind][policy] for kind in ("type 1", "type 2"))


def over_rivals(found: Figures) -> float:
    """The mean over tasks or CNNs of the speed-up of `auto` relative to that of the fastest of the others."""
    ratios = []
    for name, kinds in found["speed_up"].items():
        rates = {policy: speed_up_on(name, policy)(found) for policy in kinds["type 1"]}
        ratios.append(rates.pop("auto") / max(rates.values()))
    return fmean(ratios)


EXPERIMENTS: tuple[Experiment, ...] = (
    *(
        Experiment(
            f"Until the good trials are good, {which}", "section 4.2, figure 5", REPORTED, SIMULATED, CURVES,
            speed_up(kind), asked, noise=0.01,
        )
        for which, kind, asked in (("4 of 16", "type 1", 2.4), ("12 of 16", "type 2", 1.18))
    ),
    Experiment(
        "Until the best four are good, 12 of 16 good", "section 4.2, figure 6", REPORTED_TOP, SIMULATED, CURVES,
        speed_up("top 4"), TOP_4, published=TOP_4, noise=0.01, why=LATE,
    ),
    Experiment(
        "The policy of Hermes itself, 4 of 16 good", "section 4.2, figure 5", REPORTED,
        SIMULATED.replace("auto", "convergence"), CURVES, speed_up("type 1", "convergence"), 1.0, noise=0.01,
        why="the slope of the loss favours trials that start badly",
    ),
    Experiment(
        "`auto` over the fastest of fifo, round robin, SLAQ and Hermes", "section 4.2, figure 5", FASTEST, SIMULATED,
        CURVES, over_rivals, 1.0, noise=0.01,
    ),
    *(
        Experiment(
            f"Until the good trainings are good, {cnn}", "section 4.2, figure 5", f"{asked} times as fast; {GPUS}",
            f"{LIVE}; mean of both types", TRAININGS, speed_up_on(cnn), asked, published=asked, noise=0.2, why=ORDER,
        )
        for cnn, asked in PUBLISHED.items()
    ),
    Experiment(
        "Until the best four trainings are good, 12 of 16 good", "section 4.2, figure 6", REPORTED_TOP,
        f"{LIVE}; mean of four CNNs", TRAININGS, speed_up("top 4"), TOP_4, published=TOP_4, noise=0.2, why=LATE,
    ),
    Experiment(
        "`auto` over the fastest of fifo, round robin, SLAQ and Hermes, trained", "section 4.2, figure 5", FASTEST,
        f"{LIVE}; mean of four CNNs", TRAININGS, over_rivals, 0.95, noise=0.2,
    ),
    *(
        Experiment(
            f"A suspension and the resumption, {cnn}", "section 4.3, figure 7",
            f"{seconds} s: a checkpoint is written and read; RTX 2080 Ti", "the reduced CNN, kept in memory", TRAININGS,
            lambda found, cnn=cnn: 1000 * found["switch_seconds"][cnn], 30, "at most", "ms", 1000 * seconds, 0.5,
            "counts all time of the slot outside training that `fifo` does not take: also decisions and the journal",
        )
        for cnn, seconds in (("GoogLeNet", 0.67), ("VGG19", 1.57))
    ),
    *(
        Experiment(
            f"A training in another process, {cnn}", "section 4.3, table 2",
            f"{percent} % longer than TensorFlow alone, for 1000 steps with batches of 16; RTX 2080 Ti",
            "the reduced CNN, as many steps: a search of one trial, with its start, over a plain loop", TRAININGS,
            lambda found, cnn=cnn: 100 * found["overhead"][cnn], percent, "at most", "%", percent, 0.5,
            "the start of a search is a larger part of a training of seconds than of one of minutes",
        )
        for cnn, percent in (("GoogLeNet", 8.7), ("VGG19", 2.1))
    ),
)  # fmt: skip
