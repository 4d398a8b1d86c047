"""The experiments of Fluid (Yu, Liu and Chowdhury, MLSys 2021), measured on their nodes of 4, 8 and 16 RTX 6000.

The paper gives most results as figures without numbers; `published` has those of its text.
"""

from typing import Any

from papers.experiment import Experiment
from papers.measurement import Measurement

__all__ = ["EXPERIMENTS"]

SIMULATED = Measurement(
    name="groups",
    title="Groups of trials on simulated devices",
    least=50,
    most=220,
    command=("benchmarks/groups.py",),
    quick=("benchmarks/groups.py", "--quick"),
    code=("src/shoal", "benchmarks/groups.py", "scenarios/fluid_toy.toml"),
)
LIVE = {
    task: Measurement(
        name=f"groups-{task}",
        title=f"Fluid's searches on two CPU slots: {task}",
        least=80,
        most=450,
        command=("benchmarks/groups_live.py", "--tasks", task),
        quick=("benchmarks/groups_live.py", "--tasks", task, "--quick"),
        code=("src/shoal", "benchmarks/groups_live.py", "benchmarks/search_tasks", "benchmarks/placed/sharing.py"),
    )
    for task in ("cifar", "wikitext", "dcgan", "stored")
}
TEAMS = Measurement(
    name="teams",
    title="One job on two CPU slots",
    least=50,
    most=220,
    command=("benchmarks/teams.py",),
    quick=("benchmarks/teams.py", "--quick"),
    code=("src/shoal", "benchmarks/teams.py"),
)

TASKS = {
    "cifar": "CIFAR-10, a CNN like AlexNet: 640 pictures, a quarter of the channels",
    "wikitext": "WikiText-2, recurrent networks of four kinds: 8,000 words of a vocabulary of 2,000",
    "dcgan": "MNIST, a DCGAN: 1,000 pictures of 16 x 16 pixels",
    "stored": "MNIST, a perceptron whose 500 samples come from slow storage, 1 ms each",
}
STAGES = "30-100 % for searches in synchronous stages"
REPORTED = {
    "random": "10-70 % over all searches",
    "SHA": STAGES,
    "Hyperband": STAGES,
    "SyncBOHB": "100 %",
    "BOHB": "30 %",
    "ASHA": "30 %",
    "PBT": "little, as the number of trials is constant",
}
EIGHT, FOUR = "over 8 trials on 8 devices", "over 4 trials on 4 devices"
PUBLISHED = {"SyncBOHB": 2.0, "BOHB": 1.3, "ASHA": 1.3, EIGHT: 1.0}
"""Case -> published speed-up."""
FIFO = "simulated: epochs of 10 s, 27 at most; over fifo, mean of three seeds; half the overheads Lemmas 4 and 6 allow"
WIDER = "no number; more for fewer trials and larger models"

ROWS = (
    *(("algorithms", (name,), "{} on 8 devices", "Figure 7", REPORTED[name]) for name in list(REPORTED)[1:]),
    ("workers of SyncBOHB", ("4", "16"), "SyncBOHB on {} devices", "Figure 9", "no number; scales better with Fluid"),
    ("overheads of SHA", ("high",), "SHA on 8 devices, {} overheads", "Figure 13", "no number; less with overheads"),
    ("sharing only", ("9", "27", "81"), "Sharing only, grid of {} trials", "Figure 11a", "more for more trials"),
    ("growing only", ("2", "3", "6"), "Growing only, grid of {} trials", "Figure 11b", WIDER),
    ("c", ("1", "2", "4", "8"), "At most {} jobs on a device, grid of 27 trials", "Section 4.2.2", "no number"),
    ("d", ("1", "2", "4", "8"), "At most {} devices of a job, grid of 3 trials", "Section 4.2.2", "no number"),
    ("alpha", ("10",), "Sharing takes {} times as long, grid of 27 trials", "Figure 13a", "sharing is given up: 1x"),
    ("beta, devices", ("1.06, 16", "2.00, 16"), "Growing, beta {} devices", "Figure 13b", WIDER),
    ("sigma", ("0", "1"), "Sigma {} of times, grid of 9 trials", "Figure 12", "no number; more with more variance"),
    ("concurrency", (EIGHT, FOUR), "ASHA, 8 trials on 4 devices {}", "Figure 10", "as fast as 8 GPUs"),
)
"""Part of the simulation, its cases, title, place in the paper and what it reports."""


def simulated(part: str, case: str, title: str, place: str, reported: str) -> Experiment:
    """Return the row of a simulated search."""
    return Experiment(
        title=title.format(case),
        place=place,
        reported=reported,
        setting=FIFO,
        measurement=SIMULATED,
        figure=lambda found: found[part][case],
        asked=1.1 if part in ("algorithms", "workers of SyncBOHB", "overheads of SHA") else 1.0,
        published=PUBLISHED.get(case),
        noise=0.01,
    )


def live(task: str, search: str) -> Experiment:
    """Return the row of a search on real processes."""
    return Experiment(
        title=f"{task}, {search}: water_filling against fifo",
        place="Figure 7",
        reported=f"{REPORTED[search]}; time to a target on 8 GPUs",
        setting=f"{TASKS[task]}; two CPU slots, time to the end of the search",
        measurement=LIVE[task],
        figure=lambda found: found[task][search]["water_filling"]["speed_up"],
        asked=1.1 if task == "stored" else 0.95,
        published=PUBLISHED.get(search),
        noise=0.2,
        why="a trial fills a core, so that only the ends of rungs leave a slot idle",
    )


def defaults(task: str) -> Experiment:
    """Return the row of Shoal's defaults, for all searches of a task."""
    return Experiment(
        title=f"{task}: Shoal's defaults against fifo, the least of five searches",
        place="Figure 7",
        reported="10-70 % over all searches by Fluid on 8 GPUs",
        setting=f"{TASKS[task]}; two CPU slots, trials fused, packed and placed by default",
        measurement=LIVE[task],
        figure=lambda found: min(each["defaults"]["speed_up"] for each in found[task].values()),
        asked=1.0,
        noise=0.2,
        why="fused models are traced and compared first, which a search of seconds does not earn back",
    )


def team(title: str, reported: str, figure: str, asked: float, **more: Any) -> Experiment:
    """Return a row about one job on two slots."""
    setting = "four CNNs as one array, batches of 128, two CPU slots, one thread each"
    return Experiment(
        title, "Section 5", reported, setting, TEAMS, lambda found: found[figure], asked, noise=0.2, **more
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        title="Toy case: trials of 4, 4, 12 and 30 s on 5 devices",
        place="Figure 5",
        reported="10 s, and 30 s first in, first out",
        setting="simulated, with a start of 0.1 s; first in, first out takes 30.1 s",
        measurement=SIMULATED,
        figure=lambda found: found["toy"]["water_filling"],
        asked=10.2,
        better="at most",
        unit="s",
        published=10.0,
        noise=0.01,
    ),
    *(simulated(part, case, *words) for part, cases, *words in ROWS for case in cases),
    *(live(task, search) for task in TASKS for search in ("random", "SHA", "SyncBOHB", "ASHA", "PBT")),
    *(defaults(task) for task in TASKS),
    team("A team of two slots against one slot", "no number; not linear", "gain", 1.5),
    team(
        *("A team of two slots against DistributedDataParallel", "elastic data-parallel training", "against_ddp", 1.0),
        why="plain steps of such a network are faster than fused ones on a CPU",
    ),
    team(
        "Growing a job into a second slot",
        "no number; less than a restart",
        "growing_steps",
        1.0,
        better="at most",
        unit="steps",
    ),
)
