"""The ledger of devices and nodes: what is free, and what jobs hold."""

import pytest
from schedule_samples import job

from shoal.core.device import Cluster, Device, Node
from shoal.core.resources import Ledger, Share

ONE, OTHER, LOST = Device("a:0", "A100", 100), Device("a:1", "A100", 100), Device("b:0", "A100", 100, healthy=False)
CLUSTER = Cluster((Node("left", 4, (ONE, OTHER)), Node("right", 2, (LOST,))))


def ledger(*held, exclusive=False):
    """With shares of so much compute, memory and cores."""
    made = Ledger(CLUSTER, exclusive=exclusive)
    for number, (name, *share) in enumerate(held):
        made.add(f"job-{number}", made[name], Share(*share))
    return made


@pytest.mark.parametrize(
    ("held", "device", "share", "fits"),
    [
        pytest.param([], "a:0", (1.0, 100, 4.0), True, id="all that there is"),
        pytest.param([], "a:0", (1.1, 0, 0.0), False, id="more compute"),
        pytest.param([], "a:0", (0.0, 101, 0.0), False, id="more memory"),
        pytest.param([], "a:0", (0.0, 0, 4.1), False, id="more cores"),
        pytest.param([("a:0", 0.5, 60, 1.0)], "a:0", (0.6, 40, 1.0), False, id="compute is taken"),
        pytest.param([("a:0", 0.5, 60, 1.0)], "a:0", (0.5, 41, 1.0), False, id="memory is taken"),
        pytest.param([("a:0", 0.5, 60, 1.0)], "a:1", (1.0, 100, 3.0), True, id="of another device it is not"),
        pytest.param([("a:0", 0.5, 60, 1.0)], "a:1", (0.0, 100, 3.1), False, id="cores are those of the node"),
        pytest.param([("b:0", 0.5, 60, 9.0)], "a:0", (1.0, 100, 4.0), True, id="cores of another node"),
        pytest.param([("a:0", 0.5, 10, 5.0)], "a:1", (0.0, 0, 0.0), False, id="cores are overdrawn"),
        pytest.param([("a:0", 0.5, 110, 1.0)], "a:0", (0.0, 0, 0.0), False, id="memory is overdrawn"),
        pytest.param([("a:0", 0.1, 0, 0.0)] * 9, "a:0", (0.1, 0, 0.0), True, id="tenths that sum to one"),
    ],
)
def test_room_for_a_share(held, device, share, fits):
    made = ledger(*held)
    assert made.has_room(made[device], Share(*share)) is fits


def test_what_is_released_is_free_again():
    made = ledger(("a:0", 0.5, 30, 2.0), ("a:1", 0.25, 10, 2.5))
    made.add("job-0", made["a:0"], Share(memory=20))
    one = made["a:0"]
    assert (one.compute, one.memory, list(one.holders)) == (0.5, 50, ["job-0"])
    assert (made.memory(one), made.cores("left")) == (0, -0.5), "cores are overdrawn"
    made.release("job-0")
    assert (one.compute, one.memory, made.memory(one), made.cores("left")) == (1.0, 100, 100, 1.5)
    made.release("job-0")
    assert (one.memory, one.holders) == (100, {})


def test_a_job_holds_the_devices_that_it_names_and_that_are_there():
    wide = job("wide", compute=0.5, memory=0, cores=1.0, on="a:0")
    wide = type(wide)(**{**vars(wide), "devices": ("a:0", "b:0", "gone")})
    made = Ledger(CLUSTER, [wide])
    assert [each.device.name for each in made.capacities] == ["a:0", "a:1"]
    assert (made["a:0"].compute, made["b:0"].compute) == (0.0, 0.0), "a job of several has each to itself"
    assert made["a:0"].holders == {"wide": 3}
    assert [made.cores("left"), made.cores("right")] == [3.0, 1.0]
    assert ("b:0" in made, "gone" in made) == (True, False)
    assert not made.has_room(made["a:0"], Share()), "it admits no other job, not even one that needs nothing"
    made.release("wide")
    assert made.has_room(made["a:0"], Share(1.0, 100, 4.0))


def test_an_exclusive_device_holds_one_job():
    made = ledger(("a:0", 0.1, 0, 0.0), exclusive=True)
    assert [made.has_room(each, Share(0.1)) for each in made.capacities] == [False, True]
