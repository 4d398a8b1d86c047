"""People who intervene in a made-up study while it runs."""

from collections.abc import Collection
from typing import Any

from shoal.core.request import Verb
from shoal.core.trial import FIRST_ADDED
from shoal.journal.requests import leave
from shoal.journal.writer import Journal
from shoal.reporting.progress import SilentProgress
from shoal.study.engine import Engine
from shoal.testing.faults import Faults
from shoal.testing.random_studies import POLICY_NAMES

__all__ = ["RandomInterventions"]

_TRIALS = [*range(12), FIRST_ADDED, FIRST_ADDED + 1]
"""Numbers of trials that are asked for: some are over then, or unknown."""


class RandomInterventions(SilentProgress):
    """Who asks for things while a study runs; the engine lets it look in every turn.

    Args:
        faults: says when.
        journal: of the study.
        devices: all that there are.
        asked: names of all requests; it grows.
    """

    def __init__(self, faults: Faults, journal: Journal, devices: Collection[str], asked: list[str]) -> None:
        self.engine: Engine | None = None
        self._faults = faults
        self._journal = journal
        self._devices = devices
        self._asked = asked

    def update(self) -> None:
        """Ask for something; what was taken away is given back after a while."""
        faults, rng = self._faults, self._faults.random
        if self.engine is None:
            return
        used = self.engine.fleet.used
        removed = [name for name in self._devices if name not in used]
        held = self._journal.study.get("held", [])
        if faults.strikes("interrupt"):
            self.engine.interrupt()
        if used and faults.strikes("devices changed"):
            self._ask("remove devices", devices=rng.sample(used, rng.randint(1, len(used))))
        elif removed and rng.random() < 0.1:
            self._ask("add devices", devices=removed[:1])
        if faults.strikes("devices unknown"):
            verb: Verb = rng.choice(["add devices", "remove devices"])
            self._ask(verb, devices=rng.choice([["none such"], [], used[:1] * 2, removed[:1] * 2]))
        if faults.strikes("retry"):
            self._ask("retry", trials=_TRIALS)
        verbs: tuple[Verb, ...] = ("pause", "stop")
        for each in verbs:
            if faults.strikes(each):
                self._ask(each, trials=rng.sample(_TRIALS, 3))
        if held and rng.random() < 0.1:
            self._ask("resume", trials=held)
        if faults.strikes("policy"):
            self._ask("policy", given={"policy": rng.choice([*POLICY_NAMES, "none such"])})
        if faults.strikes("add trial"):
            x, outside = rng.choice([0.5, 2.0]), rng.random() < 0.5  # the space has no 2
            given = {"config": {"x": x, "width": 1}, "epochs": rng.randint(1, 3), "outside": outside}
            self._ask("add trial", given=given)
        rows = [row for row in self._journal.trials() if row.epoch] if faults.strikes("clone") else []
        if rows:
            row = rng.choice(rows)
            origin = {"trial": row.number, "epoch": row.epoch}
            given = {"config": dict(row.config), "epochs": row.epoch + rng.randint(1, 3), "outside": True}
            self._ask("clone", given={**given, "source": row.number, "origin": origin})
        if faults.strikes("pause study"):
            self._ask("pause study")
        elif self._journal.study.get("paused") and rng.random() < 0.1:
            self._ask("resume study")
        if faults.strikes("end study"):
            self._ask("end study")

    def _ask(self, verb: Verb, **what: Any) -> None:
        self._asked.append(leave(self._journal.directory, verb, **what))
