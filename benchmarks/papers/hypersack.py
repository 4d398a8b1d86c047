"""HyperSack (Alnaasan et al., 2024): jobs that share GPUs, placed as items of a multiple knapsack."""

from collections.abc import Callable

from papers.experiment import Experiment, Figures
from papers.measurement import CORE, Measurement

__all__ = ["EXPERIMENTS"]

SHOAL = tuple(f"src/shoal/{part}" for part in ("algorithms", "core", "host", "plan", "run", "study", "train", "fuse"))
DATA = ("benchmarks/search_tasks", "benchmarks/packs/pictures.py")
PLACED = ("benchmarks/placement.py", "benchmarks/placed", "benchmarks/models", *DATA, *SHOAL)
SIMULATED = (
    *("benchmarks/simulated.py", "benchmarks/makespan_bound.py", "scenarios"),
    *(f"src/shoal/{part}" for part in ("plan", "simulate", "study")),
)


def live(name: str, title: str, least: int, most: int) -> Measurement:
    command = ("benchmarks/placement.py", name, "--devices", "cpu:2")
    return Measurement(f"placement-{name}", title, least, most, command, (*command, "--quick"), PLACED, (*CORE, "PIL"))


def simulated(part: str, title: str, least: int, most: int) -> Measurement:
    command = ("benchmarks/simulated.py", part)
    return Measurement(
        f"simulated-{part}", title, least, most, command, (*command, "--quick"), SIMULATED, (*CORE, "scipy")
    )


SP1 = live("sp1", "Placement: SP1, vision models", 70, 330)
SP2 = live("sp2", "Placement: SP2, language models", 50, 240)
SP3 = live("sp3", "Placement: SP3, one vision model", 40, 180)
SP4 = live("sp4", "Placement: SP4, vision models, twice as many jobs", 65, 300)
MIXES = {
    "arithmetic": live("arithmetic", "Placement: trainings bound by arithmetic", 10, 60),
    "memory": live("memory", "Placement: trainings bound by memory", 15, 90),
    "input": live("input", "Placement: trainings bound by input", 20, 100),
    "mixed": live("mixed", "Placement: trainings bound by each of these", 20, 100),
}
MAKESPAN = simulated("makespan", "Simulated makespan of SP1 to SP4", 40, 240)
DECISIONS = simulated("decisions", "Decisions of the knapsack policies", 20, 120)
CLUSTER = simulated("cluster", "Gavel's models on 1,000 devices, simulated", 35, 200)

ONE_JOB, EVERYTHING, PLAIN = "one job per device", "fusion + packing", "plain processes"
FULL_CORE = (
    "On a CPU slot each of these jobs fills its core, where HyperSack's leave 50 to 78 % of an A100 idle: there is "
    "nothing to share. Jobs that wait for input show the gain."
)


def gain(name: str, row: str, over: str = ONE_JOB) -> Callable[[Figures], float]:
    return lambda found: found[name][over]["makespan"] / found[name][row]["makespan"]


def placed(
    measurement: Measurement, setting: str, place: str, gpus: str, published: dict[str, float]
) -> tuple[Experiment, ...]:
    """The rows of a search space on two CPU slots: HyperSack's policies, everything, and everything against a pool."""
    space = measurement.command[1]
    best = max(published.values())
    least = f"{published['ff']} (FF) to " if "ff" in published else ""
    reported = f"{least}{best} (WFD) times as fast on {gpus}"
    return (
        *(
            Experiment(
                f"{space.upper()} on CPU slots: {policy.upper()} over one job per slot", place, reported, setting,
                measurement, gain(space, policy), factor, published=factor, why=FULL_CORE,
            )
            for policy, factor in published.items()
        ),
        Experiment(
            f"{space.upper()} on CPU slots: fusion and packing over one job per slot", place,
            f"{reported}, without fusion", setting, measurement, gain(space, EVERYTHING),
            best, published=best, why=FULL_CORE,
        ),
        Experiment(
            f"{space.upper()} on CPU slots: fusion and packing over plain processes", place,
            "compares with no such pool", f"{setting}; start-up included", measurement, gain(space, EVERYTHING, PLAIN),
            1.0, why="Jobs of a second do not repay that Shoal inspects and measures each model before it trains.",
        ),
    )  # fmt: skip


def ratio(space: str, policy: str, part: str = "fifo") -> Callable[[Figures], float]:
    return lambda found: found["makespan"][space][policy] / found["makespan"][space][part]


def at_three(found: Figures) -> float:
    seconds = found["makespan"]["oversubscription"]
    return seconds["3.0"] / min(seconds.values())


NO_TABLE = "The bound of the measured share curves is {}: the jobs that stand for HyperSack's take more of a device."
CURVES = "virtual time; demands and speed by share of A100 jobs as measured by MISO; oversubscription 3"
VISION = (
    "{} on two slots of one core: models of 19,000 to 106,000 parameters, 1,200 pictures of CIFAR-10 of 16 x 16, one "
    "epoch of about a second"
)


def replayed(
    space: str, name: str, place: str, gpus: str, published: dict[str, float], why: str
) -> tuple[Experiment, ...]:
    """The rows of a search space in simulation."""
    return tuple(
        Experiment(
            f"{name} on {gpus}, simulated: {policy.upper()} over one job per GPU", place,
            f"{factor} times as fast on {gpus}", f"{CURVES}; {gpus}", MAKESPAN,
            ratio(space, policy), factor, published=factor, noise=0.01, why=why,
        )
        for policy, factor in published.items()
    )  # fmt: skip


def decided(space: str, jobs: str, occupancy: dict[str, float], ms: dict[str, float]) -> tuple[Experiment, ...]:
    """The rows of Table III: occupancy and time of each policy."""
    titled = {"exact": "the MIP"}
    return (
        *(
            Experiment(
                f"Occupancy of {space.upper()}, {titled.get(policy, policy.upper())}", "Table III",
                f"{percent:g} %", f"{jobs}, demands of A100 jobs as measured by MISO; the MIP has 10 s", DECISIONS,
                lambda found, policy=policy: 100 * found["decisions"][f"{space}, {policy}"]["occupancy"], percent,
                unit="%", published=percent, noise=0.02 if policy == "exact" else 0.001,
                why="These jobs use 38 to 72 % of an A100, HyperSack's 22 to 50 %: they pack worse.",
            )
            for policy, percent in occupancy.items()
        ),
        *(
            Experiment(
                f"Time of a decision for {space.upper()}, {titled.get(policy, policy.upper())}", "Table III",
                f"{each:g} ms", f"{jobs}; CPU time, median of 101; of the MIP one with a limit of 10 s", DECISIONS,
                lambda found, policy=policy: found["decisions"][f"{space}, {policy}"]["ms"], each, "at most", "ms",
                each, 0.3, "Every job has a demand object of its own, in Python.",
            )
            for policy, each in ms.items()
        ),
    )  # fmt: skip


EXPERIMENTS: tuple[Experiment, ...] = (
    *placed(
        SP1, VISION.format("24 of 96 jobs"), "section V-C, Figure 10", "4 A100",
        {"ff": 2.5, "ffd": 2.5, "wf": 2.5, "wfd": 2.8},
    ),
    *placed(
        SP2, "24 of 96 jobs on two slots of one core: token models of 2 and 3 layers, 800 reviews of IMDB of 32 words",
        "section V-C, Figure 11", "6 A100", {"ff": 3.0, "wfd": 3.2},
    ),
    *placed(SP3, VISION.format("24 of 96 jobs"), "section V-C, Figure 12", "4 A100", {"ff": 2.3, "wfd": 2.5}),
    *placed(SP4, VISION.format("48 of 384 jobs"), "section V-E, Figure 15", "4, 8 and 16 A100", {"wfd": 2.7}),
    Experiment(
        "The sampler's share of device time", "section IV-C", "negligible: ten iterations of jobs of many epochs",
        f"{VISION.format('24 jobs')}; ten iterations for each of 12 models and batch sizes", SP1,
        lambda found: 100 * found["sp1"]["wfd"]["sampling"], 5.0, "at most", "%", noise=0.3,
        why="A job trains for one epoch of a second, the paper's for tens of epochs of minutes.",
    ),
    *(
        Experiment(
            f"Trainings bound by {'each of these' if name == 'mixed' else name}: sharing found by trial",
            "section I-A, Figure 2", "jobs that wait for data leave bubbles, which other jobs fill",
            f"12 trainings of 10 epochs on two slots of one core, over one per slot{storage}", measurement,
            gain(name, "by trial"), asked, noise=0.1, why="Both have the same schedule; the difference is noise.",
        )
        for (name, measurement), asked, storage in zip(
            MIXES.items(), (0.97, 0.97, 1.3, 1.0), ("", "", *["; a sleep of 1 ms a sample is the storage"] * 2),
            strict=True,
        )
    ),
    *replayed(
        "sp1", "SP1", "section V-C, Figure 10", "4 A100", {"ff": 2.5, "wfd": 2.8}, NO_TABLE.format("2.88")
    ),
    *replayed("sp2", "SP2", "section V-C, Figure 11", "6 A100", {"ff": 3.0, "wfd": 3.2}, NO_TABLE.format("2.21")),
    *replayed("sp3", "SP3", "section V-C, Figure 12", "4 A100", {"ff": 2.3, "wfd": 2.5}, ""),
    *replayed("sp4_4", "SP4", "section V-E, Figure 15", "4 A100", {"wfd": 2.7}, ""),
    *replayed("sp4_8", "SP4", "section V-E, Figure 15", "8 A100", {"wfd": 2.7}, ""),
    *replayed("sp4", "SP4", "section V-E, Figure 15", "16 A100", {"wfd": 2.7}, ""),
    *replayed("sp4_h100", "SP4", "section V-F, Figure 16", "4 H100", {"wfd": 4.0}, NO_TABLE.format("2.88")),
    *replayed(
        "sp4_mixed", "SP4", "section V-F, Figure 16", "4 H100 and 12 A100", {"wfd": 3.9}, NO_TABLE.format("2.91")
    ),
    Experiment(
        "Oversubscription 3 of an A100: makespan relative to the best ratio", "section V-D, Figure 13",
        "3 is the best of all ratios, for SP1 on 4 A100", f"{CURVES.split(';')[0]}; SP1 under WFD, ratios from 1 to 4",
        MAKESPAN, at_three, 1.0, "at most", published=1.0, noise=0.01,
        why="In the curves more jobs never crowd out the loading of data: the makespan still falls a little at 4.",
    ),
    *(
        Experiment(
            f"{space.upper()}, simulated: `auto` relative to {words}", "section V-C", "has no such policy", CURVES,
            MAKESPAN, figure, asked, noise=0.01, why="Large jobs leave gaps that no order fills.",
        )
        for space in ("sp1", "sp4_mixed")
        for words, figure, asked in (
            ("the best makespan that shares allow", ratio(space, "auto", "bound"), 0.95),
            ("WFD", ratio(space, "auto", "wfd"), 0.98),
        )
    ),
    *decided(
        "sp3", "96 jobs on 4 devices", {"exact": 99, "ff": 88, "ffd": 97, "wf": 91, "wfd": 98},
        {"exact": 181_600, "ff": 0.129, "ffd": 0.163, "wf": 0.135, "wfd": 0.171},
    ),
    *decided(
        "sp4", "384 jobs on 16 devices", {"exact": 100, "ff": 97, "ffd": 98, "wf": 97, "wfd": 100},
        {"ff": 0.264, "ffd": 0.298, "wf": 0.319, "wfd": 0.332},
    ),
    Experiment(
        "Time of a decision for 100,000 jobs on 10,000 devices, WFD", "section IV-B", "O(jobs times GPUs)",
        "`scenarios/large.toml`, hardly two jobs alike; CPU time", DECISIONS,
        lambda found: found["decisions"]["large, wfd"]["seconds"], 2.0, "at most", "s", noise=0.3,
    ),
    Experiment(
        "Time between two jobs of a slot", "section IV-C", "names no time",
        "SP4 on CPU slots under WFD: median time from the end of a job to the start of the next one", SP4,
        lambda found: found["sp4"]["wfd"]["gap"], 50.0, "at most", "ms", noise=0.5,
    ),
    Experiment(
        "1,000 devices of three kinds, simulated: `auto` over WFD", "section V-F",
        "WFD alone, on two kinds", "Gavel's models on V100, P100 and K80, 63 studies of 64 trials", CLUSTER,
        lambda found: found["cluster"]["wfd"]["makespan"] / found["cluster"]["auto"]["makespan"], 2.0, noise=0.01,
    ),
)  # fmt: skip
