"""The experiments of Fluid (Yu, Liu and Chowdhury, MLSys 2021), measured on their nodes of 4, 8 and 16 RTX 6000.

The paper gives most results as figures without numbers; `published` has those of its text.
"""

from papers.experiment import Experiment
from papers.measurement import Measurement

__all__ = ["EIGHT", "EXPERIMENTS", "LIVE", "SIMULATED", "TEAMS"]


def measurement(name: str, title: str, least: int, most: int, *command: str) -> Measurement:
    return Measurement(name, title, least, most, command, (*command, "--quick"))


SIMULATED = measurement("groups", "Groups of trials on simulated devices", 50, 220, "benchmarks/groups.py")
TEAMS = measurement("teams", "One job on two CPU slots", 50, 220, "benchmarks/teams.py")

TASKS = {
    "cifar": "CIFAR-10, a CNN like AlexNet: 640 pictures, a quarter of the channels",
    "wikitext": "WikiText-2, recurrent networks of four kinds: 8,000 words of a vocabulary of 2,000",
    "dcgan": "MNIST, a DCGAN: 250 pictures of 64 x 64 pixels, a sixteenth of the channels",
    "stored": "MNIST, a perceptron whose 500 samples come from slow storage, 1 ms each",
}
LIVE = {
    task: measurement(
        f"groups-{task}", f"Fluid's searches on two CPU slots: {task}", 80, 450,
        "benchmarks/groups_live.py", "--tasks", task,
    )
    for task in TASKS
}  # fmt: skip
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
EIGHT = "over 8 trials on 8 devices"
PUBLISHED = {"SyncBOHB": 2.0, "BOHB": 1.3, "ASHA": 1.3, EIGHT: 1.0}
"""Case -> published speed-up."""
ASKED = {"SHA": 1.6, "Hyperband": 1.6, "SyncBOHB": 2.0, "BOHB": 1.3, "ASHA": 1.3, "PBT": 1.1}
FIFO = "simulated: epochs of 10 s, 27 at most; over fifo, mean of three seeds; half the overheads Lemmas 4 and 6 allow"
WIDER = "more for fewer trials and larger models"

ROWS = (
    *(("algorithms", (name,), "{} on 8 devices", "figure 7", REPORTED[name], asked) for name, asked in ASKED.items()),
    ("workers of SyncBOHB", ("4", "16"), "SyncBOHB on {} devices", "figure 9", "scales better with Fluid", 1.6),
    ("overheads of SHA", ("high",), "SHA on 8 devices, {} overheads", "", "", 1.1),
    ("sharing only", ("9", "27", "81"), "Sharing only, grid of {} trials", "figure 11a", "more for more trials"),
    ("growing only", ("2", "3", "6"), "Growing only, grid of {} trials", "figure 11b", WIDER),
    ("c", ("2",), "At most {} jobs on a device, grid of 27 trials", "section 4.2.2", "no number"),
    ("d", ("2", "4"), "At most {} devices of a job, grid of 3 trials", "section 4.2.2", "no number"),
    ("alpha", ("10",), "Sharing takes {} times as long, grid of 27 trials", "figure 13a", "sharing is given up: 1x"),
    ("beta, devices", ("1.06, 16", "2.00, 16"), "Growing, beta {} devices", "figure 13b", WIDER),
    ("sigma", ("0", "1"), "Sigma {} of times, grid of 9 trials", "figure 12", "more with more variance"),
    ("concurrency", (EIGHT,), "ASHA, 8 trials on 4 devices {}", "figure 10", "as fast as 8 GPUs"),
)
"""Part of the simulation, its cases, title, place in the paper, what it reports, and what is asked if it is not 1."""


def simulated(part: str, case: str, title: str, place: str, reported: str, asked: float = 1.0) -> Experiment:
    """Return the row of a simulated search."""
    return Experiment(
        title.format(case), place, reported, FIFO, SIMULATED, lambda found: found[part][case], asked,
        published=PUBLISHED.get(case), noise=0.01,
    )  # fmt: skip


def live(task: str, search: str) -> Experiment:
    """Return the row of a search on real processes."""
    return Experiment(
        f"{task}, {search}: water_filling against fifo", "figure 7",
        f"{REPORTED[search]}; time to a target on 8 GPUs",
        f"{TASKS[task]}; two CPU slots, time to the end of the search", LIVE[task],
        lambda found: found[task][search]["water_filling"], 1.1 if task == "stored" else 0.95,
        published=PUBLISHED.get(search), noise=0.2,
        why="a trial fills a core, so sharing gains nothing; where rounding promotes other trials, the work differs",
    )  # fmt: skip


def defaults(task: str) -> Experiment:
    """Return the row of Shoal's defaults, for all searches of a task."""
    return Experiment(
        f"{task}: Shoal's defaults against fifo, the least of five searches", "figure 7",
        "10-70 % over all searches by Fluid on 8 GPUs",
        f"{TASKS[task]}; two CPU slots, trials fused, packed and placed by default", LIVE[task],
        lambda found: min(each["defaults"] for each in found[task].values()), 1.0, noise=0.2,
        why="fused models are traced and compared first, which a search of seconds does not earn back",
    )  # fmt: skip


ARRAY = "four CNNs as one array, batches of 128, two CPU slots, one thread each"
EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        "Toy case: trials of 4, 4, 12 and 30 s on 5 devices", "figure 5", "10 s, and 30 s first in, first out",
        "simulated, with a start of 0.1 s; first in, first out takes 30.1 s", SIMULATED,
        lambda found: found["toy"]["water_filling"], 10.2, "at most", "s", 10.0, 0.01,
    ),
    *(simulated(part, case, *words) for part, cases, *words in ROWS for case in cases),
    *(live(task, search) for task in TASKS for search in ("random", "SHA", "SyncBOHB", "ASHA", "PBT")),
    *(defaults(task) for task in TASKS),
    Experiment(
        "A team of two slots against one slot", "section 5", "no number; not linear", ARRAY, TEAMS,
        lambda found: found["gain"], 1.5, noise=0.2,
        why="half of a batch takes more than half of its time on a core, and gradients are exchanged after it",
    ),
    Experiment(
        "A team of two slots against DistributedDataParallel", "section 5", "elastic data-parallel training", ARRAY,
        TEAMS, lambda found: found["against_ddp"], 1.0, noise=0.2,
        why="it exchanges gradients during the backward pass, a team after it",
    ),
    Experiment(
        "Growing a job into a second slot", "section 5", "no number; less than a restart", ARRAY, TEAMS,
        lambda found: found["growing_steps"], 1.0, "at most", "steps", noise=0.2,
        why="weights are sent, and the first common step is computed alone as well, to compare both",
    ),
)  # fmt: skip
