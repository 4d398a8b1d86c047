"""Growth of running jobs into devices that no job needs, and the layout of jobs on devices as strips (Fluid)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shoal.core.device import Cluster, Device
from shoal.core.resources import ROUNDING, Ledger, Share
from shoal.plan.schedule.base import Action, JobState, JobView, Plan, Resize, Stop, Suspend

__all__ = ["DeviceStrips", "StripPlacement", "fill_up_idle", "give_back", "grow", "narrowed", "on_first_device"]


@dataclass(frozen=True)
class StripPlacement:
    """The devices of a job in order, and its width on them: their number, or its part of a single device."""

    devices: tuple[str, ...]
    width: float

    def is_close(self, other: "StripPlacement") -> bool:
        """Return whether both places are equal, except for rounding."""
        return self.devices == other.devices and abs(self.width - other.width) <= ROUNDING


class DeviceStrips:
    """Every healthy device as a strip of width 1 (Fluid, section 4.1), with its memory and cores.

    A job that runs without a share, or on several devices, fills each of its devices.

    Args:
        jobs: All jobs; running jobs are placed on their devices.
    """

    def __init__(self, cluster: Cluster, jobs: Iterable[JobView]) -> None:
        self.devices = {device.name: device for _, device in cluster if device.healthy}
        self.node = {device.name: node.name for node, device in cluster}
        self._kind = {device.name: device.kind for _, device in cluster}
        self._ledger = Ledger(cluster.map(lambda device: replace(device, compute=1.0, oversubscription=1.0)))
        self._jobs: dict[str, JobView] = {}
        self.places: dict[str, StripPlacement] = {}
        for job in jobs:
            if job.state is JobState.RUNNING:
                self.place(job, self._current_place(job))

    def _current_place(self, job: JobView) -> StripPlacement:
        device = self.devices.get(job.devices[0])
        if len(job.devices) > 1 or job.share is None or device is None or device.capacity <= 0:
            return StripPlacement(job.devices, float(len(job.devices)))
        return StripPlacement(job.devices, min(1.0, job.share / _full_width_compute(device)))

    def place(self, job: JobView, place: StripPlacement) -> None:
        """Place a job that has no place."""
        for name in place.devices:
            if name in self._ledger:
                demand = job.demand[self._kind[name]]
                share = Share(min(place.width, 1.0), demand.memory, demand.cores)
                self._ledger.add(job.id, self._ledger[name], share, len(place.devices))
        self._jobs[job.id] = job
        self.places[job.id] = place

    def remove(self, job: JobView) -> StripPlacement:
        """Remove a job from its place, and return the place."""
        self._ledger.release(job.id)
        return self.places.pop(job.id)

    def move(self, job: JobView, place: StripPlacement) -> None:
        """Move a job to another place."""
        self.remove(job)
        self.place(job, place)

    def free(self, name: str) -> float:
        """Return the free part of a device."""
        capacity = self._ledger[name]
        return max(0.0, capacity.compute) if capacity.holders else 1.0

    def jobs_on(self, name: str) -> Sequence[JobView]:
        """Return the jobs on a device."""
        return tuple(self._jobs[holder] for holder in self._ledger[name].holders)

    def idle_devices(self) -> list[str]:
        """Return the devices without a job."""
        return [name for name in self.devices if not self._ledger[name].holders]

    def fits(self, job: JobView, place: StripPlacement) -> bool:
        """Return whether a job without a place fits on a place."""
        cores: dict[str, float] = {}
        for name in place.devices:
            demand = job.demand.get(self._kind[name])
            if demand is None or not self._has_room(job, name, min(place.width, 1.0)):
                return False
            cores[self.node[name]] = cores.get(self.node[name], 0.0) + demand.cores
        return all(asked <= self._ledger.cores(node) + ROUNDING for node, asked in cores.items())

    def _has_room(self, job: JobView, name: str, width: float) -> bool:
        device, capacity = self.devices[name], self._ledger[name]
        demand = job.demand[device.kind]
        return (
            self._ledger.has_room(capacity, Share(width, demand.memory, demand.cores))
            and (width < 1 or not capacity.holders)
            and (device.capacity > 0 if job.scaling.may_share else demand.compute <= device.capacity + ROUNDING)
        )

    def seconds(self, job: JobView, place: StripPlacement) -> float:
        """Return h(i, w), the seconds left of the job on a place; of several kinds of devices, the slowest counts."""
        alone = max(job.demand[self._kind[name]].seconds for name in place.devices)
        return alone * job.scaling.factor(place.width)

    def whole_devices(self, job: JobView, max_devices: int, preferred: Sequence[str] = ()) -> StripPlacement | None:
        """Return at most `max_devices` idle devices of one kind on which the job ends soonest; None if it fits on none.

        Devices in `preferred` come first, in their order, then devices of the node with most idle ones, so that few
        nodes are used. So a running job keeps its first device where it can, and need not be moved.
        """
        rank = {name: position - len(preferred) for position, name in enumerate(preferred)}
        fitting: dict[str, dict[str, list[str]]] = {}
        for name in self.idle_devices():
            kind = self._kind[name]
            if kind in job.demand and self._has_room(job, name, 1.0):
                fitting.setdefault(kind, {}).setdefault(self.node[name], []).append(name)
        places: list[StripPlacement] = []
        for kind, nodes in fitting.items():
            cores = job.demand[kind].cores
            by_node: list[list[str]] = []
            for node, names in nodes.items():
                names.sort(key=lambda name: rank.get(name, 0))
                by_node.append(names[: int((self._ledger.cores(node) + ROUNDING) / cores)] if cores > 0 else names)
            by_node.sort(key=lambda names: (min((rank.get(name, 0) for name in names), default=0), -len(names)))
            chosen = [name for names in by_node for name in names][:max_devices]
            chosen.sort(key=lambda name: rank.get(name, self._ledger[name].position))
            places.append(StripPlacement(tuple(chosen), float(len(chosen))))
        return min(places, key=lambda place: self.seconds(job, place), default=None)

    def device_part(self, job: JobView, width: float) -> StripPlacement | None:
        """Return a part of the given width on the device with the largest free part; None if it fits on no device.

        The device with the least work, then the fastest device for the job, wins a tie.
        """
        fitting = [
            name
            for name, device in self.devices.items()
            if device.kind in job.demand and self._has_room(job, name, width)
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda name: (-self.free(name), self._work(name), job.demand[self._kind[name]].seconds))
        return StripPlacement((best,), width)

    def _work(self, name: str) -> float:
        return sum(job.demand[self._kind[name]].seconds for job in self.jobs_on(name))

    def share(self, job: JobView, place: StripPlacement) -> float | None:
        """Return the `share` of an action that gives a job this place; None if the job needs no share there."""
        if len(place.devices) > 1 or not job.scaling.may_share:
            return None
        device = self.devices[place.devices[0]]
        if place.width >= 1 and job.demand[device.kind].compute <= device.capacity:
            return None
        return place.width * _full_width_compute(device)


def _full_width_compute(device: Device) -> float:
    """Return the compute of width 1: without oversubscription, and at most the capacity of the device."""
    return min(device.compute, device.capacity)


def narrowed(job: JobView, devices: int, cluster: Cluster) -> JobView:
    """Return the view of a job on its first devices only, if it can give back the others."""
    if len(job.devices) <= devices or not job.preemptible or job.devices[0] not in cluster.places:
        return job
    home = cluster.device(job.devices[0])
    if not home.healthy or job.demand[home.kind].compute > home.capacity:
        return job
    return replace(job, devices=job.devices[:devices])


def on_first_device(job: JobView, cluster: Cluster) -> JobView:
    """Return the view of a running job that stays where it is, without the further devices that it can give back."""
    narrow = narrowed(job, 1, cluster)
    return job if narrow is job else replace(narrow, preemptible=False)


def give_back(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> Plan:
    """Return a plan that gives back the further devices that it needs, but keeps those on nodes where it places no job.

    Args:
        plan: Plan for the views of `on_first_device`.
    """
    placing = [action for action in plan.actions if not isinstance(action, (Suspend, Stop))]
    taken = {name for action in placing for name in action.devices}
    nodes = {cluster.places[name][0].name for name in taken}
    acting = {action.job for action in plan.actions}
    given_back: list[Action] = []
    for job in jobs:
        if job.id not in acting and on_first_device(job, cluster) is not job:
            home, *others = job.devices
            kept = [x for x in others if x in cluster.places and cluster.places[x][0].name not in nodes]
            kept = [] if home in taken else kept  # a job of several devices has each to itself
            if kept != others:
                given_back.append(Resize(job.id, (home, *kept)))
    return replace(plan, actions=(*given_back, *plan.actions)) if given_back else plan


def fill_up_idle(plan: Plan, jobs: Sequence[JobView], cluster: Cluster) -> Plan:
    """Return a plan that also lets running jobs grow into the devices that it leaves idle; see `grow`.

    A job grows into CPU slots only on nodes on which no job has its first device.
    """
    acting = {action.job for action in plan.actions}
    running = [job for job in jobs if job.state is JobState.RUNNING and job.preemptible and job.id not in acting]
    if not any(job.scaling.max_devices > 1 for job in running):
        return plan
    layout = DeviceStrips(cluster, _views_after(plan, jobs))
    homes = {layout.node.get(place.devices[0]) for place in layout.places.values()}

    def offered(name: str) -> bool:
        return not layout.devices[name].is_cpu or layout.node[name] not in homes

    grow(layout, [job for job in running if all(name in layout.devices for name in job.devices)], offered)
    places = {job.id: layout.places[job.id].devices for job in running}
    wider = [Resize(job.id, places[job.id]) for job in running if places[job.id] != job.devices]
    return replace(plan, actions=(*plan.actions, *wider)) if wider else plan


def _views_after(plan: Plan, jobs: Sequence[JobView]) -> list[JobView]:
    views = {job.id: job for job in jobs}
    for action in plan.actions:
        views[action.job] = views[action.job].after(action)
    return [job for job in views.values() if job.state is JobState.RUNNING]


def grow(
    layout: DeviceStrips,
    jobs: Sequence[JobView],
    offered: Callable[[str], bool] = lambda device: True,
) -> None:
    """Give devices that are idle in a layout to running jobs, which keep their own: next to the job that ends last.

    - A job gets a device more, up to d, if that saves more time than a resize costs.
    - Beyond d, where no measurement speaks against it, one more device is tried (`Scaling.grows`), as if it helped in
      full; one job at a time.
    """
    candidates = [job for job in jobs if job.state is JobState.RUNNING and _is_alone(layout, job)]
    trying = any(layout.places[job.id].width > job.scaling.devices for job in candidates)
    while candidates:
        last = max(candidates, key=lambda job: layout.seconds(job, layout.places[job.id]))
        place, wider = layout.places[last.id], _wider(layout, last, offered)
        tries = wider is not None and wider.width > last.scaling.devices
        if wider is None or (tries and trying) or not _pays(layout, last, place, wider):
            candidates.remove(last)
            continue
        layout.move(last, wider)
        trying = trying or tries


def _is_alone(layout: DeviceStrips, job: JobView) -> bool:
    """Return whether a job has all of its devices to itself."""
    place = layout.places.get(job.id)
    return place is not None and place.width >= 1 and all(len(layout.jobs_on(name)) == 1 for name in place.devices)


def _wider(layout: DeviceStrips, job: JobView, offered: Callable[[str], bool]) -> StripPlacement | None:
    """Return the place of a job with one idle device more of the same kind; None if it may have none."""
    place = layout.places[job.id]
    if place.width + 1 > job.scaling.max_devices:
        return None
    kind = layout.devices[place.devices[0]].kind
    idle = [name for name in layout.idle_devices() if layout.devices[name].kind == kind and offered(name)]
    home = layout.node[place.devices[0]]
    layout.remove(job)
    wider = (
        StripPlacement((*place.devices, name), place.width + 1)
        for name in sorted(idle, key=lambda name: layout.node[name] != home)
    )
    found = next((each for each in wider if layout.fits(job, each)), None)
    layout.place(job, place)
    return found


def _pays(layout: DeviceStrips, job: JobView, place: StripPlacement, wider: StripPlacement) -> bool:
    return layout.seconds(job, wider) + job.scaling.resize_seconds < layout.seconds(job, place)
