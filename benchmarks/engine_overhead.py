"""CPU time of the engine for each trial: 10,000 trials through ASHA, with the journal on.

The trials are made up: in place of a training epoch a job reports a number. Jobs run in the engine's own process (the
inline back end), so the CPU time is the engine's: the algorithm, the planner, the policy, the journal.

    python benchmarks/engine_overhead.py [--quick]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from papers.experiment import missed_of
from papers.rivals import ENGINE, EXPERIMENTS
from report import machine, report

from shoal.algorithms.asha import ASHA
from shoal.core.array import FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.space import Space, uniform
from shoal.core.trial import Report, TrialState, derive_seed
from shoal.host.fleet import Fleet
from shoal.journal.statistics import StudyStatistics
from shoal.journal.writer import Journal
from shoal.plan.cost.history import History
from shoal.plan.schedule.registry import make_policy
from shoal.run.base import Event, JobControl, Profiled, Reported, SignaturesFound
from shoal.run.inline import Inline
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig
from shoal.study.engine import Engine

SECONDS = 1e-3
"""Of an epoch of one trial."""

KEY = FusionKey("made up", "data", 32)
PROFILE = Profile({1: SECONDS, 16: 16 * SECONDS}, 1, 0, 0, 1, compute=1.0, cores=1.0, mixing=1.0)


def train(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """A runner of made-up trials."""
    match job.purpose:
        case Purpose.SIGNATURE:
            yield SignaturesFound(job.id, {member.trial.number: KEY for member in job.members})
        case Purpose.PROFILE:
            yield Profiled(job.id, job.arrays[0].key, PROFILE)
        case Purpose.TRAIN:
            members = {member.trial.number: member for member in job.members}
            epochs = {number: member.start for number, member in members.items()}
            while members:
                yield Reported(job.id, tuple(epoch_of(member, epochs) for member in members.values()))
                members = {number: member for number, member in members.items() if epochs[number] < member.target}
                for change in control.changes():
                    for member in (member for array in change.join for member in array.members):
                        members[member.trial.number], epochs[member.trial.number] = member, member.start
                    if change.find_signatures:
                        yield SignaturesFound(job.id, {trial.number: KEY for trial in change.find_signatures})


def epoch_of(member: Member, epochs: dict[int, int]) -> Report:
    number = member.trial.number
    epochs[number] += 1
    noise = derive_seed("noise", number, epochs[number]) / 2**63
    state = TrialState.PAUSED if epochs[number] == member.target else TrialState.RUNNING
    return Report(number, epochs[number], {"loss": member.trial.config["x"] + noise / epochs[number]}, SECONDS, state)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="500 trials; checks no figure")
    quick = parser.parse_args().quick
    trials = 500 if quick else 10_000
    algorithm = ASHA(trials, max_epochs=9, eta=3)
    algorithm.bind(Space({"x": uniform(0.0, 1.0)}), metric="loss", mode="min", seed=0, data_seed=0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "study"
        study = StudySpec(metric="loss", mode="min")
        cluster = Cluster((Node("here", 1, (Device("cpu:0", "cpu", 2**40),)),))
        worker_context = WorkerContext(directory, b"", runner="__main__:train")
        history = History(Path(folder) / "history.sqlite")
        began = time.process_time()
        with closing(Journal.create(directory, study, task=b"", algorithm=b"")) as journal:
            with closing(Inline(worker_context)) as backend:
                config = EngineConfig(Fleet(cluster), make_policy("auto"), history)
                engine = Engine(journal, algorithm, backend, config)
                engine.begin()
                engine.run()
            took = time.process_time() - began
            states = {str(state): count for state, count in StudyStatistics(journal).states().items() if count}
    figures = {"ms_a_trial": round(took / trials * 1e3, 4)}
    print(f"{machine()}; {trials} trials: {states}; {figures['ms_a_trial']} ms of a core a trial")
    return report(figures, [] if quick else missed_of(EXPERIMENTS, ENGINE, figures))


if __name__ == "__main__":
    sys.exit(main())
