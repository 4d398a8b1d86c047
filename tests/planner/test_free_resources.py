"""What is left of devices and nodes."""

import pytest

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.planner.admission import FreeResources

ONE, OTHER, LOST = Device("a:0", "a", 100), Device("a:1", "a", 100), Device("b:0", "b", 100, healthy=False)
CLUSTER = Cluster((Node("left", 4, (ONE, OTHER)), Node("right", 2, (LOST,))))


def held(memory, cores, device=ONE):
    return device, Demand(0.5, memory, cores, 1.0)


@pytest.mark.parametrize(
    ("jobs", "device", "memory", "cores", "fits"),
    [
        pytest.param([], "a:0", 100, 4.0, True, id="all that there is"),
        pytest.param([], "a:0", 101, 0.0, False, id="more memory"),
        pytest.param([], "a:0", 0, 4.1, False, id="more cores"),
        pytest.param([held(60, 1.0)], "a:0", 41, 1.0, False, id="memory is taken"),
        pytest.param([held(60, 1.0)], "a:1", 100, 3.0, True, id="of another device it is not"),
        pytest.param([held(60, 1.0)], "a:1", 100, 3.1, False, id="cores are those of the node"),
        pytest.param([held(60, 9.0, LOST)], "a:0", 100, 4.0, True, id="cores of another node"),
        pytest.param([held(10, 5.0)], "a:1", 0, 0.0, False, id="cores are overdrawn"),
        pytest.param([held(110, 1.0)], "a:0", 0, 0.0, False, id="memory is overdrawn"),
    ],
)
def test_fitting_amounts(jobs, device, memory, cores, fits):
    assert FreeResources(CLUSTER, jobs).holds(device, memory, cores) is fits


def test_taken_amounts_are_not_free():
    room = FreeResources(CLUSTER, [])
    room.take("a:0", 30, 2.0)
    assert (room.memory("a:0"), room.memory("a:1"), room.holds("a:1", 0, 2.1)) == (70, 100, False)
    room.take("a:0", 0, 2.5)
    assert (room.memory("a:0"), room.memory("a:1")) == (0, 0), "cores are overdrawn"


def test_an_unhealthy_device_has_no_free_memory():
    room = FreeResources(CLUSTER, [held(60, 1.0, LOST)])
    assert ("a:0" in room, "b:0" in room) == (True, False)
