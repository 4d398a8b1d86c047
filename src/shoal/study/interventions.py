"""Interventions: handlers of users' requests to a running study."""

from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, replace

from shoal.core.command import CloseRequest, CopyCheckpoint, ReleaseDevice, StopJob, UpdateJob
from shoal.core.errors import AlgorithmError, DeviceError, PolicyError
from shoal.core.event import MembersLeft
from shoal.core.job import JobUpdate
from shoal.core.request import Request, requester
from shoal.core.rows import Extension, Intervention, StudyValue
from shoal.core.trial import Origin, TrialState
from shoal.study.job_events import dropped, end_study, stop, stop_jobs
from shoal.study.state import StudyState
from shoal.study.trials import TrialRecord

__all__ = ["PAUSED", "STOPPED", "handle_members_left", "hold_study", "intervene"]

PAUSED = "paused by a user"
STOPPED = "stopped by a user"
STUDY_PAUSED = "the study is paused by a user"
STUDY_ENDS = "the study is ending at a user's request"
STUDY_ENDED = "the study was ended by a user"


def intervene(state: StudyState, request: Request) -> None:
    """Carry out or refuse a request, unless that was recorded before a kill, and record the result."""
    if request.name not in state.requests:
        result = _HANDLERS.get(request.verb, _unknown)(state, request)
        state.step.write(replace(result, time=state.step.time, seq=state.next_seq()))
        state.requests.add(request.name)
    state.step.command(CloseRequest(request.name))


def _release(state: StudyState, numbers: Set[int]) -> None:
    state.trials.release(state.trials.paused & numbers)


def handle_members_left(state: StudyState, left: MembersLeft) -> None:
    """Handle members that have left a job on request; members that have not ended wait again."""
    numbers = state.trials.requeue(left.job, left.trials, failed=False)
    if numbers:
        state.running.note(left.job, dropped(numbers, PAUSED))


def hold_study(state: StudyState) -> None:
    """Hold a paused or ending study. Once no job runs, a paused study releases its devices and an ending one ends."""
    lifecycle = state.lifecycle
    why = lifecycle.ended_because or (STUDY_ENDS if lifecycle.end_requested else STUDY_PAUSED)
    waiting = (*state.trials.waiting(), *state.trials.paused_waiting())
    state.trials.explain({x.number: why for x in waiting})
    if state.running:
        return
    if lifecycle.end_requested:
        for record in [x for x in state.trials if not x.state.final]:
            state.trials.move(record, TrialState.STOPPED, lifecycle.ended_because or STUDY_ENDED)
        lifecycle.end()
    elif not lifecycle.devices_released:
        lifecycle.release_devices()
        state.step.command(*(ReleaseDevice(device.name) for _, device in state.fleet.cluster))


def _pause_study(state: StudyState, request: Request) -> Intervention:
    if state.lifecycle.paused or state.lifecycle.end_requested:
        return _refused(request, f"the study is {'ended' if state.lifecycle.end_requested else 'paused'} already")
    state.lifecycle.pause()
    stop_jobs(state)
    return Intervention(request.name, request.verb)


def _resume_study(state: StudyState, request: Request) -> Intervention:
    if not state.lifecycle.paused:
        return _refused(request, "the study is not paused")
    state.lifecycle.resume()
    state.last_plan = None
    return Intervention(request.name, request.verb)


def _end_study(state: StudyState, request: Request) -> Intervention:
    if state.lifecycle.end_requested or state.finished:
        return _refused(request, "the study has ended already")
    end_study(state)
    return Intervention(request.name, request.verb)


def _extend(state: StudyState, request: Request) -> Intervention:
    algorithm, lifecycle = state.config.algorithm, state.lifecycle
    if lifecycle.end_requested:
        return _refused(request, f"the study is over: {lifecycle.ended_because or STUDY_ENDED}")
    before = algorithm.totals
    try:
        algorithm.extend(request.arguments["trials"])
    except AlgorithmError as error:
        return _refused(request, str(error))
    extension = Extension(request.arguments["trials"], state.next_seq())
    after = algorithm.totals
    state.step.write(
        StudyValue("extensions", [*state.config.study.get("extensions", ()), asdict(extension)]),
        StudyValue("totals", after and asdict(after)),
    )
    counts = f"from {before.trials} to {after.trials}" if before and after else f"to {extension.trials}"
    return Intervention(request.name, request.verb, text=f"{counts} trials")


def _refused(request: Request, why: str) -> Intervention:
    return Intervention(request.name, request.verb, refused=(why,))


def _stop(state: StudyState, request: Request) -> Intervention:
    trials, refused = _split_valid(state, request, _final_state_text)
    stop(state, trials, STOPPED)
    return Intervention(request.name, request.verb, tuple(x.number for x in trials), refused=refused)


def _policy(state: StudyState, request: Request) -> Intervention:
    name = str(request.arguments.get("policy"))
    try:
        policy = state.config.find_policy(name)
    except PolicyError as error:
        return _refused(request, str(error))
    state.config.policy = policy
    state.last_plan = None
    state.step.write(StudyValue("policy", name))
    return Intervention(request.name, request.verb, text=name)


def _add(state: StudyState, request: Request) -> Intervention:
    given, problem = request.arguments, state.config.algorithm.problem
    origin = Origin(**given["origin"]) if given.get("origin") else None
    if origin is not None:
        state.retention.repeat(origin.trial)  # it was not deleted before this request was handled
    outside = state.config.spec.repetition.faults(problem.space, given["config"])
    refused = () if given.get("outside") else outside
    if origin is not None and state.trials.get(origin.trial) is None:
        refused = (*refused, f"there is no trial {origin.trial}")
    if refused:
        return Intervention(request.name, request.verb, refused=refused)
    trial = problem.trial(state.trials.next_added, given["config"], origin)
    state.trials.add(TrialRecord(trial, given["epochs"], trial.start))
    state.step.command(CopyCheckpoint(trial))
    text = [f"of trial {given['source']}"] if "source" in given else []
    text += [f"from its weights at epoch {origin.epoch}"] if origin is not None else []
    text += [f"outside the space: {'; '.join(outside)}"] if outside else []
    return Intervention(request.name, request.verb, (trial.number,), text=", ".join(text))


def _keep(state: StudyState, request: Request) -> Intervention:
    keep = request.arguments["keep"]
    state.retention.change(keep)
    state.step.write(StudyValue("keep", keep))
    return Intervention(request.name, request.verb, text=str(keep))


def _pin(state: StudyState, request: Request) -> Intervention:
    trials, refused = _split_valid(
        state, request, lambda x: "" if state.retention.has_weights(x.number) else "has no weights any more"
    )
    state.retention.pins.update(x.number for x in trials)
    state.step.write(StudyValue("pins", sorted(state.retention.pins)))
    return Intervention(request.name, request.verb, tuple(x.number for x in trials), refused=refused)


def _unknown(state: StudyState, request: Request) -> Intervention:
    why = (
        "the version of shoal that runs the study does not know this request; resume the study with a newer version "
        "and repeat it"
    )
    return _refused(request, why)


def _retry(state: StudyState, request: Request) -> Intervention:
    def fault(record: TrialRecord) -> str:
        if not record.has_failed:
            return f"has not failed, it is {record.state}"
        return f"is still in {record.job}; try again in a moment" if state.trials.has_member(record) else ""

    trials, refused = _split_valid(state, request, fault)
    numbers = tuple(x.number for x in trials)
    _release(state, set(numbers))
    for record in trials:
        state.trials.retry(record)
        state.step.command(CopyCheckpoint(record.trial))
    return Intervention(request.name, request.verb, numbers, refused=refused)


def _devices(state: StudyState, request: Request) -> Intervention:
    try:
        state.config.devices.change(request.devices, state.step, add=request.verb == "add devices")
    except DeviceError as error:
        return _refused(request, str(error))
    return Intervention(request.name, request.verb, devices=request.devices)


def _pause(state: StudyState, request: Request) -> Intervention:
    held = state.trials.paused
    trials, refused = _split_valid(
        state, request, lambda x: _final_state_text(x) or ("is paused already" if x.number in held else "")
    )
    if trials:
        state.trials.pause([x.number for x in trials], requester(request.name) or "a user")
    _leave(state, trials)
    return Intervention(request.name, request.verb, tuple(x.number for x in trials), refused=refused)


def _resume(state: StudyState, request: Request) -> Intervention:
    held = state.trials.paused
    trials, refused = _split_valid(
        state, request, lambda x: _final_state_text(x) or ("" if x.number in held else "is not paused")
    )
    _release(state, {x.number for x in trials})
    return Intervention(request.name, request.verb, tuple(x.number for x in trials), refused=refused)


def _split_valid(
    state: StudyState, request: Request, fault: Callable[[TrialRecord], str]
) -> tuple[list[TrialRecord], tuple[str, ...]]:
    """The trials for which a request can be carried out, and the reasons for refusing the others."""
    trials, refused = [], []
    for number in sorted(set(request.trials)):
        record = state.trials.get(number)
        if record is None:
            refused.append(f"there is no trial {number}")
        elif why := fault(record):
            refused.append(f"trial {number} {why}")
        else:
            trials.append(record)
    return trials, tuple(refused)


def _final_state_text(record: TrialRecord) -> str:
    return f"is over, {record.state}" if record.state.final else ""


def _leave(state: StudyState, trials: list[TrialRecord]) -> None:
    """Make trials leave their jobs after a checkpoint. A job with no other trials, or without elasticity, stops."""
    held = state.trials.paused
    leaving: dict[str, set[int]] = {}
    for record in trials:
        if record.state is TrialState.RUNNING:
            leaving.setdefault(record.job, set()).add(record.number)
    for job, numbers in leaving.items():
        if state.config.elastic and state.trials.running_in(job) - held:
            state.step.command(UpdateJob(job, JobUpdate(leave=frozenset(numbers))))
        else:
            state.step.command(StopJob(job))


_HANDLERS: Mapping[str, Callable[[StudyState, Request], Intervention]] = {
    "pause": _pause,
    "resume": _resume,
    "stop": _stop,
    "policy": _policy,
    "add trial": _add,
    "clone": _add,
    "retry": _retry,
    "add devices": _devices,
    "remove devices": _devices,
    "pause study": _pause_study,
    "resume study": _resume_study,
    "end study": _end_study,
    "extend": _extend,
    "keep": _keep,
    "pin": _pin,
}
