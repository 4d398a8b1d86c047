"""A search on three nodes of a Ray cluster, to which everything happens that can, ends as if nothing had.

The nodes are those of `ray.cluster_utils.Cluster`, all on this machine, with a CPU slot each. While a search goes on,
at moments and places drawn by chance,

- a worker process is killed,
- the agent of a node is killed,
- a node is killed, and another one of its name comes a moment later,
- the engine is frozen for longer than the lease of the agents, which then end their jobs,
- the engine is killed, and the study is resumed.

Its trials (config, state, epochs, every metric at every epoch) are then held against those of a local run that was left
alone, every epoch has to be there, and no process may be left that has a file of the study open.

    python benchmarks/nodes_chaos.py [--faults 30] [--trials 200] [--quick] [--seed 0]
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from chaos import Run, differences, missing, outcome
from invented import task
from invented.faults import left_behind
from ray.cluster_utils import Cluster

import shoal
from shoal.backends.nodes.link import LEASE_SECONDS
from shoal.core.errors import JournalError

NAMES = ("ash", "beech", "cedar")
SOON = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""Ray notices a dead node within seconds."""
PATIENCE_SECONDS = 600.0
"""For one study."""


def engine(directory: Path) -> None:
    """Begin the study or go on with it."""
    over_ray = {"backend": "ray", "ray_address": os.environ["NODES_ADDRESS"], "devices": "cpu:1"}
    try:
        shoal.resume(directory, show_progress=False)
    except JournalError:
        shoal.tune(
            task.Spirals(),
            task.SPACE,
            metric="valid_loss",
            mode="min",
            algorithm=shoal.SuccessiveHalving(int(os.environ["NODES_TRIALS"]), max_epochs=27, eta=3),
            directory=directory,
            retries=50,
            checkpoint_seconds=0.5,
            show_progress=False,
            **({"devices": "cpu:2"} if directory.name == "undisturbed" else over_ray),
        )


class Faults:
    """Does faults to a study on a cluster.

    Args:
        cluster: Cluster of the study.
        draw: Decides whom they strike.
    """

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self._cluster = cluster
        self._draw = draw

    def worker_killed(self, run: Run) -> bool:
        return self._kill(
            [each for each in psutil.process_iter() if _log(each).startswith(f"{run.directory}/logs/job-")]
        )

    def agent_killed(self, run: Run) -> bool:
        return self._kill([each for each in psutil.process_iter() if "ray::RayAgent" in _line(each)])

    def node_killed(self, run: Run) -> bool:
        node = self._draw.choice(sorted(self._cluster.worker_nodes, key=lambda node: node.node_id))
        name = node._ray_params.node_name
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(num_cpus=1, node_name=name)
        return True

    def engine_frozen(self, run: Run) -> bool:
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_SECONDS + 5.0)
        run.process.send_signal(signal.SIGCONT)
        return True

    def engine_killed(self, run: Run) -> bool:
        return run.kill("engine")

    def _kill(self, processes: list[psutil.Process]) -> bool:
        if not processes:
            return False
        with suppress(psutil.NoSuchProcess):
            self._draw.choice(processes).kill()
            return True
        return False


KINDS: dict[str, Callable[[Faults, Run], bool]] = {
    "worker killed": Faults.worker_killed,
    "agent killed": Faults.agent_killed,
    "node killed": Faults.node_killed,
    "engine frozen": Faults.engine_frozen,
    "engine killed": Faults.engine_killed,
}


def _log(process: psutil.Process) -> str:
    """The file to which a process writes its output; of a worker, the log of its job."""
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def disturbed(directory: Path, left: list[str], faults: Faults, draw: random.Random) -> list[str]:
    """Run a study to its end with as many of these faults as come to pass; return those that did not."""
    run = Run(directory, Path(__file__))
    began = time.monotonic()
    left = list(left)
    while left:
        run.until_training()
        time.sleep(draw.uniform(0.5, 4.0))
        if run.ended():
            return left
        trains = len(run.training())
        if KINDS[left[0]](faults, run):
            print(f"{time.monotonic() - began:>7.1f}  {left[0]:14} {trains:>4} trials in training", flush=True)
            if left.pop(0) == "engine killed":
                run = Run(directory, Path(__file__))
    while not run.ended():
        time.sleep(0.1)
        if time.monotonic() > began + PATIENCE_SECONDS:
            raise SystemExit(f"the study goes on for more than {PATIENCE_SECONDS:g} s; its log is {run.log}")
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="40 trials, 5 faults")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places")
    parser.add_argument("--study", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.study is not None:
        engine(options.study)
        return 0
    trials, count = (40, len(KINDS)) if options.quick else (options.trials, options.faults)
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
    os.environ |= {
        "SHOAL_CACHE": str(folder / "cache"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "NODES_TRIALS": str(trials),
        task.SHORTAGE: str(folder / "shortage"),
    }
    draw = random.Random(options.seed)
    began = time.monotonic()
    left = [list(KINDS)[number % len(KINDS)] for number in range(count)]
    draw.shuffle(left)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "node_name": NAMES[0], "_system_config": SOON}
    )
    for name in NAMES[1:]:
        cluster.add_node(num_cpus=1, node_name=name)
    os.environ["NODES_ADDRESS"] = cluster.address
    assert disturbed(folder / "undisturbed", [], Faults(cluster, draw), draw) == []
    wanted = outcome(folder / "undisturbed")
    print(
        f"{trials} trials take {time.monotonic() - began:.0f} s undisturbed, with the start of the cluster", flush=True
    )
    happened: Counter[str] = Counter()
    studies: list[Path] = []
    orphans: list[str] = []
    while left:
        studies.append(folder / f"study-{len(studies) + 1}")
        due, left = left, disturbed(studies[-1], left, Faults(cluster, draw), draw)
        happened.update((Counter(due) - Counter(left)).elements())
        orphans += left_behind(folder, 20.0)
    cluster.shutdown()
    figures = {
        "trials": trials,
        "faults": dict(happened),
        "studies": len(studies),
        "differences": [text for study in studies for text in differences(wanted, outcome(study))],
        "missing": [text for study in studies for text in missing(study)],
        "left_behind": orphans,
        "seconds": round(time.monotonic() - began, 1),
    }
    missed = [name for name in ("differences", "missing", "left_behind") if figures[name]]
    if not missed:
        shutil.rmtree(folder)
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
