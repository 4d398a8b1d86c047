"""Slow-down models of jobs on a shared device: by measured curves, by demands, or none."""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from shoal.core.device import Device
from shoal.core.errors import ScenarioError
from shoal.host.toml_file import unknown_name_text
from shoal.plan.cost.scaling import Scaling
from shoal.run.virtual import SlowDown
from shoal.run.virtual_job import VirtualJob
from shoal.simulate.reader import reading
from shoal.simulate.workload import SimulatedModel

__all__ = ["SLOWDOWNS", "Curve", "divide_in_proportion", "read_curves"]

SHARES_FILE = "a100_mig_slices.csv"


@dataclass(frozen=True)
class Curve:
    """A workload's speed by its share of an A100, measured on MIG slices (MISO's measurements).

    Args:
        points: Measured (share, seconds of an iteration) by rising share; the last share is 1.
        memory: Peak memory, in bytes.
        utilisation: Fraction of the time with running kernels, alone on the whole device (SM utilisation).
    """

    points: tuple[tuple[float, float], ...]
    memory: int
    utilisation: float

    @property
    def seconds(self) -> float:
        """Seconds of an iteration alone on the whole device."""
        return self.points[-1][1]

    @cached_property
    def speeds(self) -> tuple[tuple[float, float], ...]:
        """(share, speed as a fraction of that on the whole device), from (0, 0) on, non-decreasing.

        Because of noise a few workloads are slightly faster on a slice than on the whole device; their speeds are 1.
        """
        rising = [(0.0, 0.0)]
        for share, seconds in self.points:
            rising.append((share, max(rising[-1][1], min(1.0, self.seconds / seconds))))
        return tuple(rising)

    def speed(self, share: float) -> float:
        """Return the speed at a share: linear between the measured shares, and down to 0 at share 0."""
        for (low, below), (high, above) in pairwise(self.speeds):
            if share <= high:
                return below + (above - below) * (share - low) / (high - low)
        return 1.0

    @cached_property
    def saturation(self) -> float:
        """Smallest share with full speed."""
        return next(share for share, speed in self.speeds if speed >= 1.0)


def read_curves(data: Path) -> dict[str, Curve]:
    """Read the measured workloads of `a100_mig_slices.csv` by name and batch size, "resnet/64"."""
    path = data / SHARES_FILE
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        return {f"{row['job']}/{row['batch_size']}": _curve(row) for row in csv.DictReader(file)}


def _curve(row: Mapping[str, str]) -> Curve:
    # A cell is blank if the workload did not fit on the slice.
    cells = {seventh / 7: row[f"iteration_s_{seventh}g"] for seventh in (1, 2, 3, 4, 7)}
    points = tuple((share, float(cell)) for share, cell in cells.items() if cell)
    return Curve(points, int(float(row["memory_mb"]) * 2**20), float(row["sm_utilisation_percent"]) / 100)


def divide_in_proportion(weights: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """Divide 1 in proportion to weights. A share above its bound is reduced to it; the other shares divide the rest.

    Weights are not negative; if all are 0, they count as equal.
    """
    weights = weights if any(weights) else [1.0] * len(weights)
    order = [index for index, weight in enumerate(weights) if weight > 0]
    order.sort(key=lambda index: bounds[index] / weights[index])  # the first to reach its bound
    shares, left = [0.0] * len(weights), 1.0
    for position, index in enumerate(order):
        fraction = weights[index] / sum(weights[other] for other in order[position:])
        shares[index] = min(bounds[index], fraction * left)
        left -= shares[index]
    return shares


def shares(structures: Mapping[str, SimulatedModel], data: Path) -> SlowDown:
    """Return the model of measured curves: a job with share s of a device runs at Curve.speed(s).

    Jobs on one device divide its compute in proportion to their demands. Each gets at most what it can use, and at most
    the share that the policy gave it (with MPS: an upper bound). The curves are of an A100; on other devices the same
    shape is assumed. They are of lone trials: an array of several slows down in proportion below its demand.
    """
    curves = read_curves(data)
    curve_of = {name: _curve_of(curves, structure) for name, structure in structures.items()}

    def speeds(device: Device, jobs: Sequence[VirtualJob]) -> Sequence[float]:
        curves_of_jobs = [
            _proportional(job.compute_demand) if len(job.job.members) > 1 else curve_of[_structure(job)] for job in jobs
        ]
        given_shares = [1.0 if job.share is None else job.share / device.compute for job in jobs]
        bounds = [min(curve.saturation, share) for curve, share in zip(curves_of_jobs, given_shares, strict=True)]
        parts = divide_in_proportion([job.compute_demand for job in jobs], bounds)
        return [curve.speed(fraction) for curve, fraction in zip(curves_of_jobs, parts, strict=True)]

    return speeds


def _proportional(demand: float) -> Curve:
    """Return the curve of a job that loses speed in proportion to what its share lacks of its demand."""
    return Curve(((max(demand, 1e-6), 1.0), (1.0, 1.0)), memory=0, utilisation=demand)


def demands(structures: Mapping[str, SimulatedModel], data: Path) -> SlowDown:
    """Return the model of demands: full speed while the demands fit the device, else speeds in proportion to it.

    A job is assumed to reach full speed with its demand. A share from the policy replaces the demand; on less than a
    whole device the job is slower according to its alpha (`Scaling.factor`).
    """
    fraction = none(structures, data)

    def speeds(device: Device, jobs: Sequence[VirtualJob]) -> Sequence[float]:
        requested = sum(job.compute_demand if job.share is None else job.share for job in jobs)
        pressure = min(1.0, device.compute / requested) if requested else 1.0
        return [pressure * speed for speed in fraction(device, jobs)]

    return speeds


def none(structures: Mapping[str, SimulatedModel], data: Path) -> SlowDown:
    """Return the model in which a job is slower only on less than a whole device, by its alpha (Fluid: h).

    If every job on a device has a share, the rest of the device is divided in proportion.
    """

    def speeds(device: Device, jobs: Sequence[VirtualJob]) -> Sequence[float]:
        given_shares = [device.compute if job.share is None else job.share for job in jobs]
        scale = max(1.0, device.compute / (sum(given_shares) or 1.0))
        alphas = [structures[_structure(job)].alpha for job in jobs]
        return [
            1.0 if job.share is None else _partial_speed(job, alpha, share * scale / device.compute)
            for job, alpha, share in zip(jobs, alphas, given_shares, strict=True)
        ]

    return speeds


SLOWDOWNS: Mapping[str, Callable[[Mapping[str, SimulatedModel], Path], SlowDown]]
SLOWDOWNS = {"none": none, "demands": demands, "shares": shares}
"""Name of a model -> function that makes it from the structures of a scenario by name and the folder of tables."""


def _partial_speed(job: VirtualJob, alpha: float | None, width: float) -> float:
    if alpha is None:
        return min(1.0, width / job.compute_demand) if job.compute_demand else 1.0
    return 1 / Scaling(alpha).factor(min(1.0, width))


def _structure(job: VirtualJob) -> str:
    """Return the structure of the first array of a job, as its arrays take turns on the device."""
    return job.job.arrays[0].key.structure


def _curve_of(curves: Mapping[str, Curve], structure: SimulatedModel) -> Curve:
    if structure.workload in curves:
        return curves[structure.workload]
    if structure.workload:
        raise ScenarioError(f"{structure.name}: {unknown_name_text('workload', structure.workload, curves)}")
    raise ScenarioError(f"{structure.name} names no `workload` in {SHARES_FILE}; there are {', '.join(curves)}")
