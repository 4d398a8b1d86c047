"""What workers prove of arrays is recorded, also while the study shuts down, and is no note."""

import pytest
from machine import JOB, Machine

from shoal.core.array import FusionKey
from shoal.core.event import Proven
from shoal.core.trial import Check
from shoal.study.checks import Checks
from shoal.study.event import Shutdown

KEY = FusionKey("net", "data", 32)

EVENTS = {
    "equal": Proven(JOB, KEY, {0: 1, 1: 1}, (Check(0, 1, 3, "step, eager", 1e-16),)),
    "refused": Proven(JOB, KEY, {0: 1, 1: 1}, (), "`weight` has norm 0 in the array, and 0.48 alone", step=7),
    "not compared": Proven(JOB, KEY, {0: 1, 1: 1}),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_an_event_gives_rows(event: Proven) -> None:
    assert Machine().step(event, 2.0) == (Checks().add(event), [])


@pytest.mark.parametrize("record", [True, False], ids=["recorded", "a full disk"])
def test_an_event_during_shutdown_is_recorded_if_anything_is(record: bool) -> None:
    machine = Machine()
    machine.step(Shutdown(record=record), 2.0)
    event = EVENTS["refused"]
    assert machine.step(event, 2.1) == (Checks().add(event) if record else [], [])
