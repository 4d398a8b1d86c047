"""Cores of CPU slots without a job, lent to the training jobs on other slots of their machine."""

from collections import defaultdict

from shoal.core.command import UpdateJob
from shoal.core.job import JobUpdate, Purpose
from shoal.study.state import StudyState

__all__ = ["lend_idle_cores"]


def lend_idle_cores(state: StudyState) -> None:
    """Divide the cores of CPU slots without a job among the training jobs on other slots of their machine.

    Call this after a plan, which has found nothing to start there. A slot gets its cores back with its next job. Epochs
    on lent cores do not count as those of a slot.
    """
    running = state.running
    before, running.lent = running.lent, _lent(state) if state.config.teams else {}
    for number in sorted(before.keys() | running.lent.keys()):
        if number not in running or running.lent.get(number) == before.get(number):
            continue
        job, device = running[number]
        state.step.command(UpdateJob(number, JobUpdate(cores=running.lent.get(number, device.cores))))
        if number in running.lent:
            state.crowding.end(number)
        else:
            state.crowding.begin(job, device)


def _lent(state: StudyState) -> dict[str, int]:
    """Return the cores that each job may use, of those that may use more than the cores of their slot."""
    idle: dict[str, int] = defaultdict(int)
    for device in state.idle():
        if device.is_cpu:
            idle[device.node] += device.cores
    if not idle:
        return {}
    jobs: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for job, device in state.running.values():
        if device.node in idle and device.is_cpu and job.purpose is Purpose.TRAIN:
            jobs[device.node].append((job.id, device.cores))
    return {
        job: cores + share
        for node, each in jobs.items()
        for place, (job, cores) in enumerate(each)
        if (share := (idle[node] + place) // len(each))
    }
