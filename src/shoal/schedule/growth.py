"""Growth of running jobs into devices that no job needs (Fluid's scaling up, one device at a time)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shoal.core.device import Cluster
from shoal.schedule.base import Action, JobState, JobView, Plan, Resize, Stop, Suspend
from shoal.schedule.device_strips import DeviceStrips, StripPlacement

__all__ = ["fill_up_idle", "give_back", "grow", "narrowed", "on_first_device"]


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
