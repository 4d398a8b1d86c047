"""Which devices a study has, as tables of what happens to them; no machine is looked at."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError, PolicyError
from shoal.host.fleet import Fleet
from shoal.host.monitor import Condition, DeviceProcess
from shoal.study.devices import DISCOVERY_SECONDS, DeviceWatch

GB = 10**9
LOST = Condition(healthy=False, reason="has fallen off the bus")


def gpus(*indices: int) -> Cluster:
    devices = tuple(Device(f"cuda:{index}", "H200", 80 * GB, cores=8 // len(indices)) for index in indices)
    return Cluster((Node("here", 8, devices),))


def find(devices: str | Sequence[str]) -> Cluster:
    """A machine with four GPUs."""
    names = [f"cuda:{index}" for index in range(4)] if devices == "auto" else list(devices)
    for name in names:
        if name not in ("cuda:0", "cuda:1", "cuda:2", "cuda:3"):
            raise DeviceError(f"device {name!r} is not there")
    return gpus(*(int(name.removeprefix("cuda:")) for name in names))


def held(*processes: DeviceProcess) -> Condition:
    return Condition(processes=processes)


@pytest.mark.parametrize(
    ("condition", "healthy", "memory", "note"),
    [
        pytest.param(Condition(), True, 80 * GB, "", id="well"),
        pytest.param(LOST, False, 80 * GB, "is lost: has fallen off the bus", id="lost"),
        pytest.param(
            held(DeviceProcess(4711, "python", 70 * GB)),
            True,
            10 * GB,
            "python (pid 4711) holds 70.0 GB",
            id="held by one",
        ),
        pytest.param(
            held(DeviceProcess(1, "a", GB), DeviceProcess(2, "b", 3 * GB), DeviceProcess(3, "c", 2 * GB)),
            True,
            74 * GB,
            "b (pid 2) holds 3.0 GB, c (pid 3) holds 2.0 GB, 1 more hold some",
            id="held by many",
        ),
        pytest.param(held(DeviceProcess(9, "X", None)), True, 80 * GB, "X (pid 9) holds some of it", id="nobody knows"),
        pytest.param(held(DeviceProcess(9, "X", 90 * GB)), True, 0, "X (pid 9) holds 90.0 GB", id="more than there is"),
    ],
)
def test_what_a_monitor_sees_is_how_the_device_is(condition: Condition, healthy: bool, memory: int, note: str) -> None:
    fleet = Fleet(gpus(0, 1))
    fleet.apply({"cuda:1": condition})
    untouched, seen = (device for _, device in fleet.cluster)
    assert untouched == gpus(0, 1).device("cuda:0")
    assert (seen.healthy, seen.memory, seen.note) == (healthy, memory, note)
    assert fleet.unusable == (frozenset() if healthy else {"cuda:1"})
    assert fleet.can_recover == (condition != Condition())
    assert fleet.best_case == gpus(0, 1)
    fleet.apply({"cuda:1": Condition()})
    assert fleet.cluster == gpus(0, 1), "it has returned"


def test_oversubscription_raises_the_capacity_of_all_devices_that_the_fleet_ever_has() -> None:
    fleet = Fleet(find(["cuda:0"]), ["cuda:0"], oversubscription=2.5)
    fleet.add(["cuda:1"], find)
    fleet.add_discovered(Cluster((replace(gpus(3).nodes[0], name="ash"),)))
    fleet.apply({"cuda:1": LOST})
    for cluster in (fleet.cluster, fleet.best_case, fleet.with_held_memory, fleet.found):
        assert [(x.name, x.capacity) for _, x in cluster] == [("cuda:0", 2.5), ("cuda:1", 2.5), ("cuda:3", 2.5)]
    assert fleet.can_recover
    fleet.apply({})
    assert not fleet.can_recover
    again = Fleet.from_record(fleet.record(), find, oversubscription=3)
    assert [device.capacity for _, device in again.cluster] == [3.0, 3.0], "another run may have another one"


def test_without_oversubscription_devices_keep_the_capacity_of_their_own() -> None:
    where = gpus(0).map(lambda device: replace(device, oversubscription=2.0))
    assert Fleet(where).found is where
    assert [device.capacity for _, device in Fleet(where, oversubscription=1.5).cluster] == [3.0]


@pytest.mark.parametrize("value", [0.99, 0, -1, float("nan"), float("inf"), True, "2", None, "auto"], ids=repr)
def test_an_oversubscription_is_a_number_of_at_least_1(value: Any) -> None:
    with pytest.raises(PolicyError, match=f"`oversubscription` must be a number of at least 1, got {value!r}"):
        Fleet(gpus(0), oversubscription=value)


@pytest.mark.parametrize(
    ("conditions", "removed", "can_recover", "all_removed"),
    [
        ({}, [], False, False),
        ({"cuda:0": LOST}, [], True, False),
        ({}, ["cuda:0"], False, False),
        ({"cuda:0": LOST}, ["cuda:0"], False, False),
        ({"cuda:1": LOST}, ["cuda:0"], True, False),
        ({}, ["cuda:0", "cuda:1"], True, True),
    ],
)
def test_who_may_come_back(
    conditions: Mapping[str, Condition], removed: Sequence[str], can_recover: bool, all_removed: bool
) -> None:
    fleet = Fleet(gpus(0, 1))
    fleet.apply(conditions)
    if removed:
        fleet.remove(removed)
    assert (fleet.can_recover, fleet.all_removed) == (can_recover, all_removed)


def test_a_device_that_was_found_unhealthy_is_not_hoped_for_until_it_is_seen_to_be_well() -> None:
    forbidden = Cluster((Node("here", 8, (Device("cuda:0", "H200", GB, healthy=False, note="is prohibited"),)),))
    fleet = Fleet(forbidden)
    assert fleet.unusable == {"cuda:0"}
    assert not any(device.healthy for _, device in fleet.best_case)
    fleet.apply({"cuda:0": Condition()})
    assert not fleet.unusable


def test_devices_are_removed_and_come_back_as_they_were() -> None:
    fleet = Fleet(gpus(0, 1), ["cuda:0", "cuda:1"])
    fleet.remove(["cuda:1"])
    assert fleet.unusable == {"cuda:1"}
    assert fleet.cluster.device("cuda:1").note == "was removed by request"
    assert fleet.used == ["cuda:0"]
    fleet.add(["cuda:1"], find)
    assert fleet.cluster == gpus(0, 1)


def test_new_devices_join_their_node_and_get_cores_as_if_all_had_been_named_at_once() -> None:
    fleet = Fleet(gpus(0), ["cuda:0"])
    fleet.add(["cuda:2", "cuda:3"], find)
    (node,) = fleet.cluster.nodes
    assert [(device.name, device.cores) for device in node.devices] == [("cuda:0", 8), ("cuda:2", 2), ("cuda:3", 2)]


@pytest.mark.parametrize(
    ("verb", "names", "message"),
    [
        ("remove", ["cuda:0", "cuda:0"], r"'cuda:0' is named twice: cuda:0, cuda:0; name each once"),
        ("remove", ["cuda:7"], r"'cuda:7' is not one of the study's; it has cuda:0, cuda:1"),
        ("remove", ["cuda:0", "cuda:2"], r"'cuda:2' was removed before; the study has cuda:0, cuda:1"),
        ("remove", [], r"no device is named"),
        ("add", ["cuda:1"], r"'cuda:1' is one of the study's already"),
        ("add", ["cuda:2", "cuda:2"], r"'cuda:2' is named twice"),
        ("add", ["cuda:2", "cuda:9"], r"'cuda:9' is not there"),
        ("add", ["cpu:5"], r"'cpu:5' cannot be added: CPU slots divide .*shoal resume"),
        ("add", ["auto"], r"'auto' cannot be added"),
    ],
)
def test_a_wrong_request_says_why_and_changes_nothing(verb: str, names: list[str], message: str) -> None:
    fleet = Fleet(gpus(0, 1, 2))
    fleet.remove(["cuda:2"])
    before = fleet.cluster, fleet.record()
    with pytest.raises(DeviceError, match=message):
        fleet.add(names, find) if verb == "add" else fleet.remove(names)
    assert (fleet.cluster, fleet.record()) == before


def test_a_record_brings_back_what_was_changed() -> None:
    fleet = Fleet(find(["cuda:0", "cuda:1"]), ["cuda:0", "cuda:1"])
    fleet.remove(["cuda:0"])
    fleet.add(["cuda:3"], find)
    again = Fleet.from_record(fleet.record(), find)
    assert again.cluster == fleet.cluster
    assert again.record() == fleet.record()
    again.remove(["cuda:3"])
    assert Fleet.from_record(again.record(), find).used == ["cuda:1"]


def machine(*uuids: str, **settings: bool) -> Cluster:
    """The GPUs of a machine, in order."""
    devices = (Device(f"cuda:{index}", "H200", 80 * GB, uuid=uuid, **settings) for index, uuid in enumerate(uuids))
    return Cluster((Node("here", 8, tuple(devices)),))


@pytest.mark.parametrize(
    ("setting", "there", "healthy", "new"),
    [
        pytest.param("auto", ("a", "b", "c"), True, ["cuda:2"], id="one more"),
        pytest.param("cuda", ("a", "b", "c", "d"), True, ["cuda:2", "cuda:3"], id="two more"),
        pytest.param("auto", ("a", "b"), True, [], id="the same"),
        pytest.param("auto", ("a", "b", "c"), False, [], id="it cannot be used"),
        pytest.param("auto", ("b", "c"), True, [], id="the first is missing, and the names of all others changed"),
        pytest.param("auto", ("a", "c"), True, [], id="another in the place of one"),
        pytest.param("auto", (), True, [], id="none is left"),
    ],
)
def test_gpus_that_are_new_on_the_machine_are_adopted(
    setting: str, there: Sequence[str], healthy: bool, new: Sequence[str]
) -> None:
    fleet = Fleet(machine("a", "b"), setting)
    discovered = machine(*there, healthy=healthy)
    assert fleet.grows
    assert fleet.new_in(discovered) == new
    assert [device.name for device in fleet.add_discovered(discovered)] == new
    assert fleet.used == ["cuda:0", "cuda:1", *new]
    assert fleet.record()["added"] == [], "a resumed study finds them itself"
    assert Fleet.from_record(fleet.record(), lambda setting: machine("a", "b")).used == ["cuda:0", "cuda:1"]
    assert fleet.new_in(discovered) == [], "they are no longer new"


def test_a_removed_gpu_is_not_new() -> None:
    fleet = Fleet(machine("a", "b"))
    fleet.remove(["cuda:1"])
    assert fleet.new_in(machine("a", "b")) == []


@pytest.mark.parametrize(
    ("cluster", "setting", "grows"),
    [
        pytest.param(machine("a"), "auto", True, id="all"),
        pytest.param(machine("a"), ["cuda"], True, id="all, as a list"),
        pytest.param(machine("a"), "cuda:0", False, id="one by its name"),
        pytest.param(Cluster((Node("here", 8, (Device("cpu:0", "cpu/1", GB),)),)), "auto", False, id="CPU slots"),
    ],
)
def test_which_studies_take_new_gpus(cluster: Cluster, setting: str | Sequence[str], grows: bool) -> None:
    assert Fleet(cluster, setting).grows is grows


class AllWell:
    """A monitor; it notes which devices it monitors."""

    def __init__(self, cluster: Cluster) -> None:
        self.watch(cluster)

    def watch(self, cluster: Cluster) -> None:
        self.watched = [device.name for _, device in cluster]

    def conditions(self, own: Collection[int]) -> Mapping[str, Condition]:
        return dict.fromkeys(self.watched, Condition())


def test_a_running_study_looks_for_new_gpus_now_and_then() -> None:
    now, there, fails = 0.0, machine("a"), False

    def look(devices: str | Sequence[str]) -> Cluster:
        assert devices == "auto"
        if fails:
            raise DeviceError("no device can be used")
        return there

    fleet = Fleet(there)
    watch = DeviceWatch(fleet, look, AllWell, lambda: now, pid=1)

    def poll() -> Cluster | None:
        seen = watch.poll()
        assert seen is not None
        return seen.discovered

    there = machine("a", "b")
    assert poll() is None, "it is not due yet"
    now, fails = DISCOVERY_SECONDS, True
    assert poll() is None, "all are lost for a while"
    now, fails = 2 * DISCOVERY_SECONDS, False
    discovered = poll()
    assert discovered == there
    fleet.add_discovered(there)
    seen = watch.poll()
    assert seen is not None
    assert list(seen.conditions) == ["cuda:0", "cuda:1"], "it is monitored at once"
    now = 3 * DISCOVERY_SECONDS
    assert poll() is None


def nodes(*names: str) -> Cluster:
    """A CPU slot and a GPU on each node."""
    return Cluster(
        tuple(
            Node(
                name,
                8,
                (Device(f"{name}/cpu:0", "cpu/1", GB), Device(f"{name}/cuda:0", "H200", GB, uuid=f"GPU-{name}")),
            )
            for name in names
        )
    )


@pytest.mark.parametrize(
    ("setting", "now", "new"),
    [
        pytest.param("auto", ("ash", "beech"), [], id="the same"),
        pytest.param("auto", ("ash", "beech", "cedar"), ["cedar/cpu:0", "cedar/cuda:0"], id="one more"),
        pytest.param("auto", ("ash", "cedar"), ["cedar/cpu:0", "cedar/cuda:0"], id="one more while another is lost"),
    ],
)
def test_all_devices_of_a_node_that_is_new_are_new(setting: str, now: tuple[str, ...], new: list[str]) -> None:
    fleet = Fleet(nodes("ash", "beech"), setting)
    assert fleet.grows
    assert [device.name for device in fleet.add_discovered(nodes(*now))] == new
    assert fleet.used == [device.name for _, device in nodes("ash", "beech")] + new


def test_a_node_with_slots_alone_is_not_new_in_a_study_of_gpus() -> None:
    slots = Cluster((Node("head", 8, (Device("head/cpu:0", "cpu/1", GB),)),))
    assert Fleet(nodes("ash")).new_in(slots) == []
    assert Fleet(slots).new_in(Cluster((Node("oak", 8, (Device("oak/cpu:0", "cpu/1", GB),)),))) == ["oak/cpu:0"]


def test_a_study_on_nodes_takes_back_what_was_removed() -> None:
    fleet = Fleet(nodes("ash"), ["ash/cpu:0", "ash/cuda:0"])
    fleet.remove(["ash/cuda:0"])
    fleet.add(["ash/cuda:0"], find)
    assert "ash/cuda:0" in fleet.used


def test_a_study_of_named_devices_of_nodes_takes_no_others() -> None:
    assert not Fleet(nodes("ash"), ["ash/cuda:0"]).grows
