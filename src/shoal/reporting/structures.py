"""What tells the structures of a study apart: the parameters in which their trials differ."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.core.space import flatten
from shoal.journal.rows import JobRow, TrialRow
from shoal.reporting.text import key_text, leaf_text

__all__ = ["structure_names"]

_PARAMETERS = 3
"""Named of a structure, at most."""
_LACKING = object()


def structure_names(jobs: Iterable[JobRow], rows: Iterable[TrialRow]) -> dict[str, str]:
    """A name for each structure, by the parameters that its trials agree on and those of others have otherwise.

    A structure of which that is not known, or that is alone, has its digest or only its batch size; one whose
    parameters are those of another has both.

    Args:
        jobs: of a study.
        rows: its trials.

    Returns:
        `JobRow.keys` -> "width=64"; with the batch size where that differs, and is none of the parameters.
    """
    configs = {row.number: flatten(row.config) for row in rows}
    members: dict[str, dict[int, None]] = {}
    for job in jobs:
        for key, trials in _members(job).items():
            members.setdefault(key, {}).update(dict.fromkeys(trials))
    if len(members) == 1:
        return {key: f"batches of {_batch_size(key)}" for key in members}
    agreed = {key: _agreed([configs[trial] for trial in trials if trial in configs]) for key, trials in members.items()}
    differing = _differing([found for found in agreed.values() if found])
    same_size = len({_batch_size(key) for key in members}) == 1
    names = {}
    for key, found in agreed.items():
        mine = [name for name in differing if name in found]
        shown = [f"{name}={leaf_text(found[name])}" for name in mine[:_PARAMETERS]] + ["…"] * (len(mine) > _PARAMETERS)
        size = "" if same_size or "batch_size" in mine[:_PARAMETERS] else f", batches of {_batch_size(key)}"
        names[key] = f"{' '.join(shown)}{size}" if shown else key_text(key)
    count = Counter(names.values())
    return {key: name if count[name] == 1 else f"{name} ({key_text(key)})" for key, name in names.items()}


def _members(job: JobRow) -> Mapping[str, Sequence[int]]:
    """The trials of each structure of a job; a journal of an older version says so only of a job that has one."""
    if job.members:
        return job.members
    return dict.fromkeys(job.keys, job.trials if len(job.keys) == 1 else ())


def _agreed(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The parameters that all of these have with one value."""
    if not configs:
        return {}
    first, *others = configs
    return {
        name: value for name, value in first.items() if all(_same(value, other.get(name, _LACKING)) for other in others)
    }


def _differing(structures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The parameters that structures do not all have with one value; floats last, for they seldom make a structure."""
    names = dict.fromkeys(name for found in structures for name in found)
    apart = [
        name
        for name in names
        if not all(_same(structures[0].get(name, _LACKING), found.get(name, _LACKING)) for found in structures)
    ]
    return sorted(apart, key=lambda name: any(isinstance(found.get(name), float) for found in structures))


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _batch_size(key: str) -> str:
    return key.rpartition(" x ")[2]
