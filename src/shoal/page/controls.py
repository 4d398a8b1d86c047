"""Requests of the page to a study: each calls the method of `shoal.Study` that the command line calls, too."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.results import Study

__all__ = ["STUDY_VERBS", "TRIAL_VERBS", "VERBS", "carry_out"]

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
_MAX_DEVICES = 1000
_MAX_EPOCHS = 10**9


def _add_trial(study: Study, asked: Mapping[str, Any]) -> object:
    config, epochs = asked.get("config"), _epochs(asked)
    if not isinstance(config, dict) or epochs is None:
        raise ShoalError('a trial to add has a "config", an object, and "epochs"')
    return study.add(config, epochs, outside=_flag(asked, "outside"))


def _clone(study: Study, asked: Mapping[str, Any]) -> object:
    trial, changes = asked.get("trial"), asked.get("changes", {})
    if type(trial) is not int or not isinstance(changes, dict):
        raise ShoalError('a clone has the number of a "trial", and "changes", an object')
    flags = {name: _flag(asked, name) for name in ("anew", "outside")}
    return study.clone(trial, changes, epochs=_epochs(asked), **flags)


def _policy(study: Study, asked: Mapping[str, Any]) -> object:
    name = asked.get("policy")
    if not isinstance(name, str):
        raise ShoalError('"policy" must be the name of a policy')
    study.policy(name)
    return None


def _devices(change: Callable[[Study, list[str], float], object]) -> Callable[[Study, Mapping[str, Any]], object]:
    """Return a handler that writes the request and does not wait for it: the page shows what comes of it."""

    def handle(study: Study, asked: Mapping[str, Any]) -> object:
        names = asked.get("devices")
        if not isinstance(names, list) or not 0 < len(names) <= _MAX_DEVICES or not all(map(_is_name, names)):
            raise ShoalError(f'"devices" must be a list of 1 to {_MAX_DEVICES} names of devices')
        return change(study, names, 0.0)

    return handle


_FORMS: Mapping[str, Callable[[Study, Mapping[str, Any]], object]] = {
    "add trial": _add_trial,
    "clone": _clone,
    "policy": _policy,
    "add devices": _devices(Study.add_devices),
    "remove devices": _devices(Study.remove_devices),
}
VERBS = (*TRIAL_VERBS, *STUDY_VERBS, *_FORMS)
"""All verbs of the page."""


def carry_out(directory: Path, asked: Any) -> None:
    """Write the request of a browser for the process that runs the study.

    Args:
        directory: Directory of the study.
        asked: JSON value: {"verb": "pause", "trials": [3]}, {"verb": "pause study"}, {"verb": "policy", "policy":
            "fifo"}, {"verb": "add devices", "devices": ["cpu:1"]}, {"verb": "add trial", "config": {"lr": 0.1},
            "epochs": 9}, or {"verb": "clone", "trial": 3, "changes": {"lr": 0.1}, "epochs": 9, "anew": true}. The last
            two may have "outside": true.

    Raises:
        ShoalError: the request is none of these, or the study refuses it.
    """
    try:
        json.dumps(asked, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ShoalError("a request must be text that UTF-8 can encode") from error
    if not isinstance(asked, dict) or not isinstance(verb := asked.get("verb"), str):
        raise ShoalError('a request is an object with a "verb"')
    if verb in STUDY_VERBS:
        STUDY_VERBS[verb](Study(directory))
    elif verb in TRIAL_VERBS:
        TRIAL_VERBS[verb](Study(directory), _trials(asked))
    elif verb in _FORMS:
        _FORMS[verb](Study(directory), asked)
    else:
        raise ShoalError(f"the page has no {verb[:40]!r}; it has {', '.join(VERBS)}")


def _trials(asked: Mapping[str, Any]) -> list[int]:
    trials = asked.get("trials")
    if not isinstance(trials, list) or not 0 < len(trials) <= _MAX_TRIALS or not all(type(x) is int for x in trials):
        raise ShoalError(f'"trials" must be a list of 1 to {_MAX_TRIALS} numbers of trials')
    return trials


def _epochs(asked: Mapping[str, Any]) -> int | None:
    epochs = asked.get("epochs")
    if epochs is not None and (type(epochs) is not int or not 0 < epochs <= _MAX_EPOCHS):
        raise ShoalError(f'"epochs" must be a whole number from 1 to {_MAX_EPOCHS}')
    return epochs


def _flag(asked: Mapping[str, Any], name: str) -> bool:
    value = asked.get(name, False)
    if not isinstance(value, bool):
        raise ShoalError(f'"{name}" must be true or false')
    return value


def _is_name(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.@:/+-]{1,200}", value) is not None
