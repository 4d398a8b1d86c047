"""Comparisons of trials of arrays with plain PyTorch, and what follows from them for each structure."""

from collections.abc import Iterable
from functools import reduce

from shoal.core.event import Proven
from shoal.core.rows import REFUSED, CheckRow, Verdict

__all__ = ["Checks"]


class Checks:
    """The verdict on each structure, and the trials that have a row of checks."""

    def __init__(self) -> None:
        self._verdicts: dict[str, Verdict] = {}
        self._known: set[tuple[str, int]] = set()

    def restore(self, verdicts: Iterable[Verdict], known: Iterable[tuple[str, int]]) -> None:
        """Go on from earlier verdicts, and from the keys and numbers of the trials that have rows."""
        self._verdicts = {verdict.key: verdict for verdict in verdicts}
        self._known = set(known)

    def add(self, found: Proven) -> list[CheckRow | Verdict]:
        """The rows of a comparison: one for each check, or for each trial that trains in plain PyTorch from now on; of
        trials without a row one that says that they were in an array; and the new verdict.
        """
        key, members = found.key.steps, len(found.trials)
        rows = [CheckRow(found.job, key, x.trial, members, x.epoch, x.step, x.what, x.difference) for x in found.checks]
        if found.refusal:
            rows += [
                CheckRow(found.job, key, trial, members, epoch, found.step, REFUSED, None, found.refusal)
                for trial, epoch in found.trials.items()
            ]
        new = [x for x in sorted(found.trials.keys() - {row.trial for row in rows}) if (key, x) not in self._known]
        rows += [CheckRow(found.job, key, trial, members, found.trials[trial], 0, "") for trial in new]
        self._known.update((key, row.trial) for row in rows)
        verdict = self._verdicts[key] = reduce(Verdict.followed_by, rows, self._verdicts.get(key, Verdict(key)))
        return [*rows, verdict]
