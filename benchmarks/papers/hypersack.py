"""HyperSack (Alnaasan et al., 2024): jobs that share GPUs, placed as items of a multiple knapsack."""

from collections.abc import Callable, Iterator

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]


def live(name: str, title: str, least: int, most: int) -> Measurement:
    command, title = ("benchmarks/placement.py", name, "--devices", "cpu:2"), f"Placement: {title}"
    return Measurement(f"placement-{name}", title, least, most, command, (*command, "--quick"), needs=(*CORE, "PIL"))


def simulated(name: str, title: str, least: int, most: int) -> Measurement:
    command, needs = ("benchmarks/simulated.py", name), (*CORE, "scipy")
    return Measurement(f"simulated-{name}", title, least, most, command, (*command, "--quick"), needs=needs)


MAKESPAN = simulated("makespan", "Simulated makespan of SP1 to SP4", 40, 240)
DECISIONS = simulated("decisions", "Decisions of the knapsack policies", 20, 120)
CLUSTER = simulated("cluster", "Gavel's models on 1,000 devices, simulated", 35, 200)
SP1 = live("sp1", "SP1, vision models", 50, 330)
SP4 = live("sp4", "SP4, vision models, twice as many jobs", 65, 300)

ONE_JOB, EVERYTHING, PLAIN = "one job per device", "fusion + packing", "plain processes"
FULL_CORE = (
    "a job fills the core of its slot, where HyperSack's leave 50 to 78 % of an A100 idle; jobs that wait for input "
    "show the gain"
)
LARGER = "the jobs that stand for HyperSack's take more of a device; `bound` of the command is the most possible"
GAPS = "WFD and FF leave gaps that the MIP fills with the same jobs"
CURVES = "virtual time; demands and speed by share of A100 jobs as measured by MISO; oversubscription 3"
VISION = "{} jobs on two slots of one core: {}, 1,200 pictures of CIFAR-10 of 16 x 16, one epoch of about a second"
SIX, RESNET = "six models of 19,000 to 106,000 parameters", "one ResNet with four batch sizes and six learning rates"
FIGURES = {"sp1": "section V-C, figure 10", "sp2": "section V-C, figure 11", "sp3": "section V-C, figure 12",
           "sp4": "section V-E, figure 15"}  # fmt: skip
PUBLISHED = {
    "sp1": {"ff": 2.5, "wfd": 2.8}, "sp2": {"ff": 3.0, "wfd": 3.2}, "sp3": {"ff": 2.3, "wfd": 2.5}, "sp4": {"wfd": 2.7},
}  # fmt: skip
"""Search space -> policy -> times as fast as one job per GPU."""


def gain(name: str, row: str, over: str = ONE_JOB) -> Callable[[Figures], float]:
    return lambda found: found[name][over]["makespan"] / found[name][row]["makespan"]


def placed(space: str, measurement: Measurement, setting: str, gpus: str) -> Iterator[Experiment]:
    """The rows of a search space on two CPU slots: HyperSack's policies, everything, and everything against a pool."""
    best = PUBLISHED[space]["wfd"]
    for name, row, factor, words, why in (
        *((policy.upper(), policy, factor, "", FULL_CORE) for policy, factor in PUBLISHED[space].items()),
        ("fusion and packing", EVERYTHING, best, ", without fusion", f"no job was fused; {FULL_CORE}"),
    ):
        yield Experiment(
            f"{space.upper()} on CPU slots: {name} over one job per slot", FIGURES[space],
            f"{factor} times as fast on {gpus}{words}", setting, measurement, gain(space, row), factor,
            published=factor, noise=0.3, why=why,
        )  # fmt: skip
    yield Experiment(
        f"{space.upper()} on CPU slots: fusion and packing over plain processes", "", "",
        f"{setting}; start-up included", measurement, gain(space, EVERYTHING, PLAIN), 1.0, noise=0.3,
        why="jobs of a second do not repay that Shoal inspects, builds and measures each model before it trains",
    )  # fmt: skip


def ratio(space: str, policy: str, over: str = "fifo") -> Callable[[Figures], float]:
    return lambda found: found["makespan"][space][policy] / found["makespan"][space][over]


def replayed(
    scenario: str, gpus: str, why: str = "", published: dict[str, float] | None = None
) -> Iterator[Experiment]:
    """The rows of a search space in simulation; those of `published` are of Figure 16, on devices of another kind."""
    space = scenario[:3]
    for policy, factor in (published or PUBLISHED[space]).items():
        yield Experiment(
            f"{space.upper()} on {gpus}, simulated: {policy.upper()} over one job per GPU",
            "section V-F, figure 16" if published else FIGURES[space], f"{factor} times as fast on {gpus}",
            f"{CURVES}; {gpus}", MAKESPAN, ratio(scenario, policy), factor, published=factor, noise=0.01, why=why,
        )  # fmt: skip


def decided(space: str, jobs: str, published: dict[str, tuple[float, float | None]]) -> Iterator[Experiment]:
    """The rows of Table III: occupancy in percent, and milliseconds, of each policy; None for the MIP, which has a
    limit of 10 s where HyperSack's takes 181.6 and 212.8 s."""
    for policy, (percent, ms) in published.items():
        exact = policy == "exact"
        name = "the MIP" if exact else policy.upper()
        found_in = f"{space}, {policy}"
        yield Experiment(
            f"Occupancy of {space.upper()}, {name}", "table III", f"{percent:g} %",
            f"{jobs}, demands of A100 jobs as measured by MISO; the MIP has 10 s", DECISIONS,
            lambda found, key=found_in: 100 * found["decisions"][key]["occupancy"], percent, unit="%",
            published=percent, noise=0.02 if exact else 0.001,
            why="it stops after 10 s, HyperSack's after minutes" if exact else GAPS,
        )  # fmt: skip
        if ms is None:
            continue
        yield Experiment(
            f"Time of a decision for {space.upper()}, {name}", "table III", f"{ms:g} ms",
            f"{jobs}; CPU time, median of 101", DECISIONS,
            lambda found, key=found_in: found["decisions"][key]["ms"], ms, "at most", "ms", ms, 0.3,
            "every job has a demand object of its own, in Python",
        )  # fmt: skip


STORAGE = "; a sleep of 1 ms a sample is the storage"
MIXES = {
    "arithmetic": (10, 60, "", 0.97), "memory": (15, 90, "", 0.97), "input": (20, 100, STORAGE, 1.3),
    "mixed": (20, 100, STORAGE, 1.0),
}  # fmt: skip
"""Bound of the trainings -> least and most seconds of the measurement, a note on the setting, and what is asked."""


def mixed(name: str, least: int, most: int, storage: str, asked: float) -> Experiment:
    title = f"trainings bound by {'each of these' if name == 'mixed' else name}"
    return Experiment(
        f"{title.capitalize()}: sharing found by trial", "section I-A, figure 2",
        "jobs that wait for data leave bubbles, which other jobs fill",
        f"12 trainings of 10 epochs on two slots of one core, over one per slot{storage}",
        live(name, title, least, most), gain(name, "by trial"), asked, noise=0.3,
        why="both have the same schedule; the difference is noise",
    )  # fmt: skip


def of_bound(found: Figures) -> float:
    """Percent of the bound that `auto` reaches in the search space where it reaches least."""
    return 100 * min(each["auto"] / each["bound"] for each in found["makespan"].values() if "bound" in each)


def of_exact(space: str) -> Callable[[Figures], float]:
    """Percent of the compute in use under the MIP that is in use under WFD."""

    def figure(found: Figures) -> float:
        wfd, exact = (found["decisions"][f"{space}, {policy}"]["occupancy"] for policy in ("wfd", "exact"))
        return 100 * float(wfd / exact)

    return figure


def at_three(found: Figures) -> float:
    seconds = found["makespan"]["oversubscription"]
    return seconds["3.0"] / min(seconds.values())


EXPERIMENTS: tuple[Experiment, ...] = (
    *placed("sp1", SP1, VISION.format("24 of 96", SIX), "4 A100"),
    *placed(
        "sp2", live("sp2", "SP2, language models", 50, 240),
        "24 of 96 jobs on two slots of one core: token models of 2 and 3 layers, 800 reviews of IMDB of 32 words",
        "6 A100",
    ),
    *placed("sp3", live("sp3", "SP3, one vision model", 40, 180), VISION.format("24 of 96", RESNET), "4 A100"),
    *placed("sp4", SP4, VISION.format("48 of 384", SIX), "4, 8 and 16 A100"),
    Experiment(
        "The sampler's share of device time", "section IV-C", "negligible: ten iterations of jobs of many epochs",
        f"{VISION.format('24', SIX)}; ten iterations for each of 12 models and batch sizes", SP1,
        lambda found: 100 * found["sp1"]["wfd"]["sampling"], 5.0, "at most", "%", noise=0.3,
        why="a job trains for one epoch of a second, the paper's for tens of epochs of minutes",
    ),
    Experiment(
        "Time between two jobs of a slot", "", "",
        "SP4 on CPU slots under WFD: median time from the end of a job to the start of the next one", SP4,
        lambda found: found["sp4"]["wfd"]["gap"], 50.0, "at most", "ms", noise=0.5,
    ),
    *(mixed(name, *words) for name, words in MIXES.items()),
    *replayed("sp1", "4 A100", LARGER),
    *replayed("sp2", "6 A100", LARGER),
    *replayed("sp3", "4 A100"),
    *replayed("sp4_4", "4 A100"),
    *replayed("sp4_8", "8 A100"),
    *replayed("sp4", "16 A100"),
    *replayed("sp4_h100", "4 H100", LARGER, {"wfd": 4.0}),
    *replayed("sp4_mixed", "4 H100 and 12 A100", LARGER, {"wfd": 3.9}),
    Experiment(
        "Oversubscription 3 of an A100: makespan relative to the best ratio", "section V-D, figure 13",
        "3 is the best of all ratios, for SP1 on 4 A100", f"{CURVES.split(';')[0]}; SP1 under WFD, ratios from 1 to 4",
        MAKESPAN, at_three, 1.0, "at most", published=1.0, noise=0.01,
        why="in the curves more jobs never crowd out the loading of data: the makespan still falls a little at 4",
    ),
    Experiment(
        "SP1 to SP4, simulated: `auto` relative to the best makespan that shares allow, the least of all", "", "",
        CURVES, MAKESPAN, of_bound, 95, unit="%", noise=0.01, why="large jobs come last and leave gaps",
    ),
    *(
        Experiment(
            f"{words}, simulated: `auto` relative to WFD", "", "", CURVES, MAKESPAN,
            ratio(space, "auto", "wfd"), 0.98, noise=0.01,
        )
        for space, words in (("sp1", "SP1"), ("sp4_mixed", "SP4 on H100 and A100"))
    ),
    *decided("sp3", "96 jobs on 4 devices", {"exact": (99, None), "ff": (88, 0.129), "wfd": (98, 0.171)}),
    *decided("sp4", "384 jobs on 16 devices", {"exact": (100, None), "ff": (97, 0.264), "wfd": (100, 0.332)}),
    *(
        Experiment(
            f"Occupancy of {space.upper()}: WFD relative to the MIP", "table III", reported,
            "demands of A100 jobs as measured by MISO; the MIP has 10 s", DECISIONS, of_exact(space), 98, unit="%",
            published=published, noise=0.02, why=GAPS,
        )
        for space, reported, published in (("sp3", "98 % of 99 %", 99), ("sp4", "100 % of 100 %", 100))
    ),
    Experiment(
        "Time of a decision for 100,000 jobs on 10,000 devices, WFD", "section IV-B", "O(jobs times GPUs)",
        "`scenarios/large.toml`, hardly two jobs alike; CPU time", DECISIONS,
        lambda found: found["decisions"]["large, wfd"]["seconds"], 2.0, "at most", "s", noise=0.3,
    ),
    Experiment(
        "1,000 devices of three kinds, simulated: `auto` over WFD", "section V-F",
        "WFD alone, on two kinds", "Gavel's models on V100, P100 and K80, 63 studies of 64 trials", CLUSTER,
        lambda found: found["cluster"]["wfd"]["makespan"] / found["cluster"]["auto"]["makespan"], 2.0, noise=0.01,
    ),
)  # fmt: skip
