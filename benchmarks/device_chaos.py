"""A search on invented devices, or on nodes, to which everything happens that can, ends as if nothing had.

`--backend local`: eight GPUs of two kinds on three nodes, which do not exist: NVML and the control program of MPS are
fakes, and jobs train on the CPU. All else is real: the engine, its workers, what kills them. While a search of 200
trials goes on, at moments and places drawn by chance, workers are killed or stopped, arrays run out of memory, devices
are lost and come back, MPS servers die, and the engine itself is killed and begun again.

`--backend ray`: three nodes of `ray.cluster_utils.Cluster`, all on this machine, with a CPU slot each. Workers, agents
and nodes are killed (another node of that name comes at once), and the engine is killed, or frozen for longer than the
lease of the agents, which then end their jobs.

Its trials (config, state, epochs, every metric at every epoch) are then held against those of an undisturbed run, which
is a local one, every epoch has to be there, and no process may be left that has a file of the study open. On the
invented GPUs all that the journal says was reserved for jobs is held against what there was.

    python benchmarks/device_chaos.py [--backend ray] [--faults 30] [--trials 200] [--quick] [--seed 0]
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos import differences, missing, outcome
from invented import machine, task
from invented.faults import Fault, Faults, LiveRun, left_behind

import shoal
from shoal.core.device import Cluster
from shoal.core.errors import JournalError
from shoal.journal.statistics import StudyStatistics
from shoal.journal.view import JournalView
from shoal.run.registry import BACKENDS

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.audit import overcommitments

TURN_SECONDS = 0.05
UNDISTURBED = "undisturbed"
"""Name of the directory of the study that is left alone."""
PATIENCE_SECONDS = {"local": 240.0, "ray": 600.0}
"""For one study."""
LEFT_SECONDS = {"local": 10.0, "ray": 20.0}
"""For processes to end after a study."""
STUDIES_IN_VAIN = 5
"""With so many in a row in which none of the faults that are left finds anything to strike, none will."""
LAST = 0.85
"""Part of a study after which no fault is due; what is left of it may be too short."""
TIGHT = 0.75
"""With this part of the memory and cores too much would have been reserved; else the devices were never full."""


def engine(directory: Path, backend: str, trials: int) -> None:
    """Begin the study or go on with it, whatever was done before the last kill."""
    where: dict[str, Any] = {"hang_seconds": 3.0}
    if backend == "local":
        sys.modules["pynvml"] = machine.InventedNvml()
        BACKENDS["local"] = machine.InventedLocal
    elif directory.name == UNDISTURBED:
        where = {"devices": "cpu:2"}
    else:
        from invented.nodes import ADDRESS

        where = {"devices": "cpu:1", "backend": "ray", "ray_address": os.environ[ADDRESS]}
    try:
        shoal.resume(directory, show_progress=False)
    except JournalError:
        shoal.tune(
            task.Spirals(),
            task.SPACE,
            metric="valid_loss",
            mode="min",
            algorithm=shoal.SuccessiveHalving(trials, max_epochs=27, eta=3),
            directory=directory,
            retries=50,
            checkpoint_seconds=0.5,
            show_progress=False,
            **where,
        )


@contextmanager
def faults_of(backend: str, folder: Path, draw: random.Random) -> Iterator[Faults]:
    """What does faults to the studies of a back end, while its devices or nodes are there."""
    if backend == "local":
        machine.install(folder)
        yield Faults(draw)
        return
    from invented.nodes import NodeFaults, three_nodes

    with three_nodes() as cluster:
        yield NodeFaults(draw, cluster)


def undisturbed(directory: Path) -> int:
    """Run a study to its end; how many epochs it reports."""
    run = LiveRun(directory, Path(__file__))
    while not run.ended():
        time.sleep(TURN_SECONDS)
    return run.reports()


def disturbed(
    directory: Path, kinds: Sequence[str], epochs: int, faults: Faults, draw: random.Random, patience: float
) -> list[str]:
    """Run a study to its end with as many of these faults as come to pass; those that did not.

    Args:
        directory: of the study.
        kinds: of faults, in order.
        epochs: that the study reports in all; faults are due when it has reported so many.
        faults: does them.
        draw: decides when.
        patience: seconds for the study.
    """
    due = sorted(draw.uniform(0.0, LAST * epochs) for _ in kinds)
    left = list(kinds)
    run = LiveRun(directory, Path(__file__))
    began = time.monotonic()
    while not run.ended():
        faults.turn()
        time.sleep(TURN_SECONDS)
        if time.monotonic() > began + patience:
            raise SystemExit(f"the study goes on for more than {patience:g} s:\n{_waiting(directory)}")
        if not left or run.reports() < due[len(kinds) - len(left)]:
            continue
        if faults.strike(left[0], run):
            happened = faults.happened[-1]
            print(f"{time.monotonic() - began:>7.1f}  {left[0]:16} {len(happened.trials):>4}", flush=True)
            del left[0]
        else:  # another first
            left.append(left.pop(0))
        if run.process.poll() is not None and run.process.returncode < 0:
            run = LiveRun(directory, Path(__file__))
    return left


def _waiting(directory: Path) -> str:
    with JournalView.read(directory) as journal:
        running = [f"{job.id} on {job.device} since {job.started}" for job in journal.jobs(running=True)]
        return "\n".join(
            [*running, *(f"{reason}: {numbers}" for reason, numbers in StudyStatistics(journal).waiting().items())]
        )


def reserved_too_much(directory: Path, part: float = 1.0) -> list[str]:
    """All moments at which it had been too much, had there been this part of what there is."""
    nodes = (
        replace(
            node,
            cores=part * node.cores,
            devices=tuple(replace(device, memory=int(part * device.memory)) for device in node.devices),
        )
        for node in machine.CLUSTER.nodes
    )
    with JournalView.read(directory) as journal:
        return list(map(str, overcommitments(journal, Cluster(tuple(nodes)))))


def table(kinds: Sequence[str], happened: Sequence[Fault], wrong: Mapping[Path, set[int]]) -> None:
    """Print what happened, to how many trials, how many of them recovered, and how the jobs that it struck ended."""
    print(f"\n{'fault':16} {'times':>6} {'trials':>7} {'recovered':>10}  jobs ended as")
    for kind in kinds:
        mine = [fault for fault in happened if fault.kind == kind]
        affected = [(fault.study, trial) for fault in mine for trial in fault.trials]
        recovered = [trial for study, trial in affected if trial not in wrong[study]]
        ends: Counter[str] = Counter()
        for fault in mine:
            with JournalView.read(fault.study) as journal:
                ends.update(job.outcome for job in journal.jobs() if job.id in fault.jobs)
        told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
        print(f"{kind:16} {len(mine):>6} {len(affected):>7} {len(recovered):>10}  {told}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=sorted(PATIENCE_SECONDS), default="local")
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="40 trials, one fault of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places")
    parser.add_argument("--keep", action="store_true", help="leave the studies where they are")
    parser.add_argument("--study", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.study is not None:
        engine(options.study, os.environ["INVENTED_BACKEND"], int(os.environ["INVENTED_TRIALS"]))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    trials = 40 if options.quick else options.trials
    os.environ |= {
        "SHOAL_CACHE": str(folder / "cache"),
        "INVENTED_BACKEND": options.backend,
        "INVENTED_TRIALS": str(trials),
        task.SHORTAGE: str(folder / "shortage"),
    }
    draw = random.Random(options.seed)
    began = time.monotonic()
    with faults_of(options.backend, folder, draw) as faults:
        epochs = undisturbed(folder / UNDISTURBED)
        wanted = outcome(folder / UNDISTURBED)
        print(
            f"{trials} trials of {epochs} epochs in all take {time.monotonic() - began:.0f} s undisturbed", flush=True
        )
        print(f"{'seconds':>7}  {'fault':16} trials")
        kinds = list(faults.kinds)
        left = [kinds[number % len(kinds)] for number in range(len(kinds) if options.quick else options.faults)]
        draw.shuffle(left)
        studies, orphans = struck(folder, options.backend, left, epochs, faults, draw)
    wrong = {study: differences(wanted, outcome(study)) for study in studies}
    wrong_trials = {study: {int(text.split()[1].rstrip(":")) for text in wrong[study]} for study in studies}
    table(kinds, faults.happened, wrong_trials)
    figures: dict[str, Any] = {
        "backend": options.backend,
        "trials": trials,
        "faults": dict(Counter(fault.kind for fault in faults.happened)),
        "studies": len(studies),
        "differences": [text for study in studies for text in wrong[study]],
        "missing": [text for study in studies for text in missing(study)],
        "left_behind": orphans,
        "seconds": round(time.monotonic() - began, 1),
    }
    missed = [name for name in ("differences", "missing", "left_behind") if figures[name]]
    if options.backend == "local":
        figures["reserved_too_much"] = [text for study in studies for text in reserved_too_much(study)]
        figures["reserved_tightly"] = any(reserved_too_much(study, TIGHT) for study in studies)
        missed += ["reserved_too_much"] if figures["reserved_too_much"] else []
        missed += [] if figures["reserved_tightly"] else ["reserved_tightly"]
    if options.keep:
        print(folder)
    else:
        shutil.rmtree(folder)
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


def struck(
    folder: Path, backend: str, left: list[str], epochs: int, faults: Faults, draw: random.Random
) -> tuple[list[Path], list[str]]:
    """Do these faults to as many studies as that takes; the studies, and the processes that they have left behind."""
    studies: list[Path] = []
    orphans: list[str] = []
    in_vain = 0
    while left:
        studies.append(folder / f"study-{len(studies) + 1}")
        due, left = left, disturbed(studies[-1], left, epochs, faults, draw, PATIENCE_SECONDS[backend])
        in_vain = in_vain + 1 if len(left) == len(due) else 0
        if in_vain == STUDIES_IN_VAIN:
            raise SystemExit(
                f"in {in_vain} studies on end there was nothing for {', '.join(sorted(set(left)))} to strike"
            )
        orphans += left_behind(folder, LEFT_SECONDS[backend])
    return studies, orphans


if __name__ == "__main__":
    sys.exit(main())
