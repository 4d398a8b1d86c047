"""Cores of CPU slots without a job, lent to the training jobs on other slots of their machine."""

from collections import defaultdict

from shoal.core.command import UpdateJob
from shoal.core.job import JobUpdate, Purpose
from shoal.study.state import StudyState

__all__ = ["lend_idle_cores"]


def lend_idle_cores(state: StudyState) -> None:
    """Divide the cores of CPU slots without a job among the training jobs that are alone on other slots of the machine.

    Call this after each plan. Cores are lent once a plan has found nothing to start, and a slot gets its own back with
    its next job. Epochs on lent cores do not count as those of a slot.
    """
    running = state.running
    idle: dict[str, int] = defaultdict(int)
    lent: dict[str, int] = defaultdict(int)
    for device in state.idle():
        if device.is_cpu:
            idle[device.node] += device.cores
    for name, cores in running.cores.items():
        if name in running:
            device = running[name][1]
            lent[device.node] += cores - device.cores
    if state.last_plan is None and all(cores <= idle[node] for node, cores in lent.items()):
        return  # the next plan may use the slots that are idle now
    before, running.cores = running.cores, _shares(state, idle)
    for name in sorted(before.keys() | running.cores.keys()):
        if name not in running or running.cores.get(name) == before.get(name):
            continue
        job, device = running[name]
        state.step.command(UpdateJob(name, JobUpdate(cores=running.cores.get(name, device.cores))))
        if name in running.cores:
            state.crowding.end(name)
        else:
            state.crowding.begin(job, device)


def _shares(state: StudyState, idle: dict[str, int]) -> dict[str, int]:
    """Return the cores of each job that may use more than those of its slot, given the idle cores by node."""
    jobs: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for job, device in state.running.values() if idle else ():
        alone = state.running.on(device.name) == 1 and not state.running.helpers.get(job.id)
        if device.is_cpu and alone and job.purpose is Purpose.TRAIN:
            jobs[device.node].append((job.id, device.cores))
    shares = {
        name: (cores, min(cores + (idle[node] + index) // len(takers), state.config.most_threads))
        for node, takers in jobs.items()
        for index, (name, cores) in enumerate(takers)
    }
    return {name: share for name, (own, share) in shares.items() if share > own}
