"""Views of jobs for policies: from their histories, their demands and the profiles of their arrays."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from shoal.core.array import Array
from shoal.core.demand import Demand
from shoal.core.device import Device
from shoal.core.job import Job, Purpose
from shoal.plan.cache import PlanCache
from shoal.plan.cost.scaling import Scaling
from shoal.plan.job_history import JobHistory, MemberSummary
from shoal.plan.job_tracker import JobTracker
from shoal.plan.plan_input import PlanInput
from shoal.plan.schedule.base import JobState, JobView

__all__ = ["JobViews"]

TRIAL_EPOCHS = 5
"""Epochs that a job must have left to be tried beside another one, or on one device more. Its start, and the epochs
that are measured, must fit."""


class JobViews:
    """Builds the views of jobs for one plan; they show the history as it is when each is built."""

    def __init__(self, given: PlanInput, history: JobTracker, cache: PlanCache) -> None:
        self._history = history
        self._costs = given.costs
        self._trial_groups = given.trial_groups
        self._arrived = given.arrived
        self._now = given.now
        self._teams = given.teams
        self._scalings: dict[object, Scaling] = cache.table("scalings")  # one per kind of job

    def arrived(self, arrays: Sequence[Array]) -> float:
        """Return the time at which the first member of some arrays began to wait."""
        arrived, now = self._arrived, self._now
        return min([arrived.get(member.trial.number, now) for array in arrays for member in array.members], default=now)

    def running(self, job: Job, device: Device, demand: Demand, further: Sequence[str] = ()) -> JobView:
        """The view of a running job, with its further devices.

        Preemptible are training jobs that have reported since their start, so that they make progress between two
        suspensions.
        """
        history, demands = self._history.running[job.id], {device.kind: demand}
        view = JobView(
            job.id,
            demands,
            JobState.RUNNING,
            (device.name, *further),
            share=history.share,
            turn_since=history.turn_since,
            ran=history.ran + self._now - history.since,
            preemptible=job.purpose is Purpose.TRAIN and history.has_reported and job.id not in self._history.leaving,
            **history.view_fields,
            **self._fields(demands, job.arrays, on_several=bool(further)),
        )
        if not history.may_grow:
            scaling = replace(view.scaling, devices=min(view.scaling.devices, len(view.devices)), grows=False)
            view = replace(view, scaling=scaling)
        return view

    def suspended(self, job: Job, demand: Mapping[str, Demand]) -> JobView:
        """The view of a suspended job."""
        _, history = self._history.suspended[job.id]
        fields = history.view_fields | self._fields(demand, job.arrays)
        return JobView(job.id, demand, JobState.SUSPENDED, ran=history.ran, **fields)

    def waiting(self, name: str, demand: Mapping[str, Demand], arrays: Sequence[Array]) -> JobView:
        """The view of a job that no engine has begun, or that ran under an earlier engine."""
        fields: dict[str, Any] = {"since": self.arrived(arrays)}
        if interrupted := self._history.interrupted:
            trials = frozenset(member.trial.number for array in arrays for member in array.members)
            if earlier := interrupted.get(trials):
                fields |= JobHistory.restored(earlier, self._now).view_fields | {"ran": earlier.ran} | fields
        return JobView(name, demand, **fields, **self._fields(demand, arrays))

    def by_arrival(self, views: Sequence[JobView]) -> list[JobView]:
        """Return the views by arrival of their jobs; ties keep the given order."""
        known = self._history
        histories = {**known.running, **{name: history for name, (_, history) in known.suspended.items()}}
        return sorted(views, key=lambda view: histories[view.id].arrived if view.id in histories else view.since)

    def _fields(
        self, demand: Mapping[str, Demand], arrays: Sequence[Array], *, on_several: bool = False
    ) -> dict[str, Any]:
        """The fields of a view that depend on its arrays and on the study."""
        summary = MemberSummary.of(arrays, self._trial_groups)
        return {
            "trial_group": summary.trial_group,
            "critical_path": self._critical_path(summary.with_follow_up, demand, arrays),
            "budget": summary.budget,
            "epoch": summary.epoch,
            "scaling": self._scaling(demand, arrays, on_several),
            "switch_seconds": self._history.switch_seconds,
            "best": self._history.best,
        }

    def _critical_path(
        self,
        with_follow_up: Sequence[tuple[Array, AbstractSet[tuple[int, int]]]],
        demand: Mapping[str, Demand],
        arrays: Sequence[Array],
    ) -> float:
        """Seconds until the last training that may follow a member ends, on the kind of device that is fastest for the
        job; 0 if nothing follows or was measured. All epochs of the job are taken as equally long.
        """
        if not with_follow_up or not demand:
            return 0.0
        kind = min(demand, key=lambda kind: demand[kind].seconds)
        epoch = demand[kind].seconds / max(1, *(epochs for array in arrays for epochs in array.epochs))
        ends = [0.0]
        for array, follow_ups in with_follow_up:
            if (cost := self._costs.of(array.key, kind)) is not None:
                ends += (
                    epoch * epochs_left + cost.seconds([more]) + cost.fetching([more])
                    for epochs_left, more in follow_ups
                )
        return max(ends)

    def _scaling(self, demand: Mapping[str, Demand], arrays: Sequence[Array], on_several: bool) -> Scaling:
        """Return the scaling of a job, measured or by its demand, on the kind of device that scales worst."""
        lasts = len(arrays) == 1 and min(arrays[0].epochs, default=0) >= TRIAL_EPOCHS
        cache_key = (
            arrays[0].key if len(arrays) == 1 else None,
            tuple([(kind, d.compute) for kind, d in demand.items()]),
            self._teams and tuple([len(arrays) == 1 and self._may_have_team(arrays[0], kind) for kind in demand]),
            lasts,
            on_several,
        )
        if cache_key not in self._scalings:
            self._scalings[cache_key] = self._found_scaling(demand, arrays, lasts, on_several)
        return self._scalings[cache_key]

    def _found_scaling(
        self, demand: Mapping[str, Demand], arrays: Sequence[Array], lasts: bool, on_several: bool
    ) -> Scaling:
        found: list[Scaling] = []
        for kind, each in demand.items():
            expected = _max_jobs(each)
            cost = self._costs.of(arrays[0].key, kind) if len(arrays) == 1 else None
            if cost is None:
                found.append(Scaling(1.0, max_jobs=expected))
            else:
                scaling = cost.scaling(expected, lasts=lasts, team=self._may_have_team(arrays[0], kind))
                found.append(replace(scaling, grows=scaling.grows and (lasts or on_several)))
        worst = min(found, key=lambda scaling: (scaling.max_jobs, -scaling.alpha), default=Scaling(1.0))
        return replace(worst, resize_seconds=self._history.switch_seconds)

    def _may_have_team(self, array: Array, kind: str) -> bool:
        return self._teams and not array.key.opaque and self._history.may_have_team(array.key, kind)


def _max_jobs(demand: Demand) -> int:
    """Return the largest number of such jobs on one device without slow-down, by the compute demand of one job."""
    return max(1, int(1 / demand.compute + 1e-9)) if demand.compute > 0 else 1
