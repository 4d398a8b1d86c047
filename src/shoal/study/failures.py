"""How jobs end, and what becomes of the trials of those that failed."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.core.array import Array, Member, remove_members
from shoal.core.command import ArrayLeft, JobEnded, StoppedOnCommonFailure
from shoal.core.errors import ShoalError, StorageFullError, TaskError, UnusableTaskError
from shoal.core.event import BLAMELESS, ArrayFailed, Ended, Outcome
from shoal.core.job import Job, Purpose
from shoal.cost.store import OutOfMemorySeen
from shoal.remedy import after_mending, command
from shoal.study.reports import observe
from shoal.study.retries import FailureContext
from shoal.study.state import StudyState
from shoal.study.trials import TrialTable

__all__ = ["drop", "end", "fatal_failure"]


def end(state: StudyState, ended: Ended, now: float) -> None:
    """A job is over; its trials that have not reached their targets wait again."""
    job, device = state.running.end(ended.job)
    state.interference.end(job.id)
    error = _fatal(state, ended, job.purpose, job.members)
    failed = ended.outcome not in BLAMELESS and error is None
    state.signatures.end(job, device.kind, failed=failed)
    arrays = state.trials.present(job).arrays if job.purpose is Purpose.TRAIN else job.arrays
    outcome = state.tracker.outcome(ended)
    state.step.record(JobEnded(job.id, outcome, ended.message, failed))
    left = state.trials.wait_again(job.id, None, failed=failed)
    state.tracker.end(job, outcome, left, now)
    if error is not None:
        raise error
    if failed:
        if job.purpose is Purpose.PROFILE and ended.outcome is Outcome.RAISED:
            for member in job.members[:1]:  # the code would raise in its training, too
                state.retries.first.note(member.trial.number, ended.message)
        _judge(state, ended, job, FailureContext(arrays, device, company=len(job.members) > 1), left)
    state.profiles.end(job.id)


def drop(state: StudyState, dropped: ArrayFailed) -> None:
    """An array of a job has failed; its trials wait again."""
    job, device = state.running[dropped.job]
    present = state.trials.present(job).arrays
    members = [member for member in job.members if member.trial.number in dropped.trials]
    others = remove_members(job.arrays, dropped.trials)
    error = _fatal(state, dropped, job.purpose, members)
    message = f"{dropped.outcome}: {dropped.message}"
    state.step.record(ArrayLeft(job.id, dropped.trials, message, error is None))
    left = state.trials.wait_again(job.id, dropped.trials, failed=error is None)
    if error is not None:
        raise error
    job = replace(job, arrays=others)
    state.running.change(job)
    state.interference.change(job)
    gone = remove_members(present, {member.trial.number for array in others for member in array.members})
    _judge(state, dropped, job, FailureContext(gone, device, company=len(members) > 1), left)


def _judge(
    state: StudyState, failed: Ended | ArrayFailed, job: Job, scene: FailureContext, left: Collection[int]
) -> None:
    """Decide how trials that failed go on, and correct what was believed of the memory that they take."""
    device = state.fleet.cluster.device(scene.device.name)
    if failed.outcome is Outcome.OUT_OF_MEMORY:
        state.profiles.observe(OutOfMemorySeen(tuple(scene.arrays)), job, device)
    shared = state.running.on(device.name) > 0
    scene = replace(scene, device=device, shared=shared, largest=_largest(state, scene.arrays))
    spent = state.retries.judge(failed, scene, left)
    observe(state, "", [state.trials[number].failed(why) for number, why in spent.items()])
    if (cause := state.retries.first.alike()) is not None:
        state.step.record(StoppedOnCommonFailure(cause))
        state.stopped = cause


def _largest(state: StudyState, arrays: Collection[Array]) -> int:
    """Bytes of the largest device on which arrays may be tried: of a kind on which they are known, or may yet be.

    Nothing is measured for the sake of trials that failed in company.
    """
    healthy = [device for _, device in state.fleet.cluster if device.healthy]
    known = {x.kind for x in healthy if all(state.profiles.estimate(array.key, x.kind) for array in arrays)}
    never = {kind for key, kind in state.signatures.unmeasurable if any(key == array.key for array in arrays)}
    if any(member.trial.number in state.trials.alone for array in arrays for member in array.members):
        never |= {x.kind for x in healthy}
    return max((x.memory for x in healthy if not known or x.kind in known or x.kind not in never), default=0)


def _fatal(
    state: StudyState, failed: Ended | ArrayFailed, purpose: Purpose, members: Sequence[Member]
) -> ShoalError | None:
    kept = state.given.study.get("kept", False)
    return fatal_failure(failed, purpose, members, state.trials, state.given.directory, kept=kept)


def fatal_failure(
    failed: Ended | ArrayFailed,
    purpose: Purpose,
    members: Sequence[Member],
    trials: TrialTable,
    directory: Path,
    *,
    kept: bool,
) -> ShoalError | None:
    """The error that ends the study, if there is to be one.

    A task that breaks its contract does so for all trials, unless one has got past it. What trials that users have
    added meet with, whose configs may be unlike all others, is no matter of the others.

    Args:
        failed: what was said of a job, or of some of its arrays.
        purpose: of the job.
        members: of what failed.
        trials: of the study.
        directory: of the study.
        kept: see `after_mending`.
    """
    if failed.outcome is Outcome.STORAGE_FULL:
        return StorageFullError(
            f"{failed.message}\nEverything recorded is intact; free some space, then: {command('resume', directory)}"
        )
    added = [member.trial for member in members if member.trial.is_added]
    if failed.outcome is Outcome.UNUSABLE and not any(trial.origin for trial in added):
        return UnusableTaskError(f"{failed.message}\nNothing is lost. {after_mending(directory, kept=kept)}")
    for_all = purpose is Purpose.SURVEY or not any(x.epoch for x in trials)
    if failed.outcome is Outcome.REJECTED and for_all and members and not added:
        first, *others = members
        company = f" and {len(others)} more" if others else ""
        config = dict(first.trial.config)
        return TaskError(f"{failed.message}\nIt was met with trial {first.trial.number}{company}: {config}")
    return None
