"""Requests of the page to a study: each calls the method of `shoal.Study` that the command line calls, too."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.results import Study

__all__ = ["STUDY_VERBS", "TRIAL_VERBS", "carry_out"]

TRIAL_VERBS: Mapping[str, Callable[[Study, list[int]], object]] = {
    "pause": Study.pause,
    "resume": Study.resume,
    "stop": Study.stop,
    "retry": Study.retry,
}
STUDY_VERBS: Mapping[str, Callable[[Study], object]] = {
    "pause study": Study.pause_study,
    "resume study": Study.resume_study,
    "end study": Study.end_study,
}
_MAX_TRIALS = 10_000


def carry_out(directory: Path, asked: Any) -> None:
    """Write the request of a browser for the process that runs the study.

    Args:
        directory: Directory of the study.
        asked: JSON value: {"verb": "pause", "trials": [3]}, or {"verb": "pause study"}.

    Raises:
        ShoalError: the request is none of these, or the study refuses it.
    """
    if not isinstance(asked, dict) or not isinstance(verb := asked.get("verb"), str):
        raise ShoalError('a request is an object with a "verb"')
    if verb in STUDY_VERBS:
        STUDY_VERBS[verb](Study(directory))
        return
    if verb not in TRIAL_VERBS:
        raise ShoalError(f"the page has no {verb[:40]!r}; it has {', '.join([*TRIAL_VERBS, *STUDY_VERBS])}")
    trials = asked.get("trials")
    if not isinstance(trials, list) or not 0 < len(trials) <= _MAX_TRIALS or not all(type(x) is int for x in trials):
        raise ShoalError(f'"trials" must be a list of 1 to {_MAX_TRIALS} numbers of trials')
    TRIAL_VERBS[verb](Study(directory), trials)
