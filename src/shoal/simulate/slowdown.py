"""How much jobs slow each other down on a shared device: measured tables, measured demands, or not at all."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, final

from shoal.backend.simulated import SlowDown, Tenant
from shoal.core.device import Device
from shoal.core.errors import ScenarioError
from shoal.simulate.measured import reading

__all__ = ["SLOWDOWNS", "Curve", "Demands", "Pairs", "Scalings", "Shares", "allocate", "read_curves"]

SHARES_FILE = "a100_mig_slices.csv"
PAIRS_FILE = "gavel_oracle_throughputs.json"
_SEVENTHS = (1, 2, 3, 4, 7)


@dataclass(frozen=True)
class Curve:
    """A workload's speed by its share of an A100, measured on slices of it (MISO's measurements).

    Args:
        points: (share, seconds of an iteration) by rising share, those that were measured; the last share is 1.
        memory: peak bytes.
        utilisation: fraction of the time in which its kernels ran, alone on the whole device (SM utilisation).
    """

    points: tuple[tuple[float, float], ...]
    memory: int
    utilisation: float

    @property
    def seconds(self) -> float:
        """Of an iteration alone on the whole device."""
        return self.points[-1][1]

    @cached_property
    def speeds(self) -> tuple[tuple[float, float], ...]:
        """(share, speed as a fraction of that on the whole device), from (0, 0) on, never falling.

        Noise makes a few workloads a little faster on a slice than on the whole; that counts as the whole's speed.
        """
        rising = [(0.0, 0.0)]
        for share, seconds in self.points:
            rising.append((share, max(rising[-1][1], min(1.0, self.seconds / seconds))))
        return tuple(rising)

    def speed(self, share: float) -> float:
        """At any share: linear between what was measured, and down to 0 at none."""
        speeds = self.speeds
        for (low, below), (high, above) in pairwise(speeds):
            if share <= high:
                return below + (above - below) * (share - low) / (high - low)
        return 1.0

    @cached_property
    def useful(self) -> float:
        """The least share at which it runs at full speed."""
        return next(share for share, speed in self.speeds if speed >= 1.0)


def read_curves(data: Path) -> dict[str, Curve]:
    """The measured workloads by name and batch size, "resnet/64".

    Args:
        data: folder of `a100_mig_slices.csv`; a blank there did not fit into the slice's memory.

    Raises:
        ScenarioError: the file is not there.
    """
    path = data / SHARES_FILE
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
        return {f"{row['job']}/{row['batch_size']}": _curve(row) for row in rows}


def _curve(row: Mapping[str, str]) -> Curve:
    cells = ((seventh / 7, row[f"iteration_s_{seventh}g"]) for seventh in _SEVENTHS)
    points = tuple((share, float(cell)) for share, cell in cells if cell)
    return Curve(points, int(float(row["memory_mb"]) * 2**20), float(row["sm_utilisation_percent"]) / 100)


def allocate(weights: Sequence[float], bounds: Sequence[float], total: float) -> list[float]:
    """Divide `total` in proportion to weights, nobody getting more than its bound, and nothing left that one could use.

    Args:
        weights: not negative; where all are 0 they count as equal.
        bounds: most that each can use.
        total: to be divided.
    """
    if not any(weights):
        weights = [1.0] * len(weights)
    shares = [0.0] * len(weights)
    hungry = [index for index, weight in enumerate(weights) if weight > 0]
    while hungry:
        weight = sum(weights[index] for index in hungry)
        fair = {index: weights[index] / weight * total for index in hungry}
        full = [index for index in hungry if bounds[index] <= fair[index]]
        for index in full or hungry:
            shares[index] = bounds[index] if full else fair[index]
            total -= shares[index]
        hungry = [index for index in hungry if index not in full] if full else []
    return shares


@final
class Shares(SlowDown):
    """Measured share curves: a job with share s of a device runs at Curve.speed(s).

    Jobs on one device divide its compute in proportion to their demands. None gets more than it can use, nor more than
    the share that the policy gave it (of MPS: an upper bound). The curves are of an A100; on other devices they are
    taken to have the same shape.

    Args:
        data: folder of the table.
    """

    def __init__(self, data: Path) -> None:
        self._curves = read_curves(data)

    def speeds(self, device: Device, tenants: Sequence[Tenant]) -> Sequence[float]:
        """Fraction of the speed alone, for each tenant."""
        curves = [_row(self._curves, tenant, SHARES_FILE) for tenant in tenants]
        bounds = [
            curve.useful if tenant.share is None else min(curve.useful, tenant.share / device.compute)
            for curve, tenant in zip(curves, tenants, strict=True)
        ]
        weights = [tenant.job.demand[device.kind].compute for tenant in tenants]
        shares = allocate(weights, bounds, 1.0)
        return [curve.speed(share) for curve, share in zip(curves, shares, strict=True)]


@final
class Pairs(SlowDown):
    """Measured pairs (Gavel): two jobs on one device run at the speeds that they had together there.

    The table has pairs only: of three jobs on a device none makes progress, nor does a pair that did not fit or was
    not measured (0 in the table). It says nothing of shares, which are ignored.

    Args:
        data: folder of the table.
    """

    def __init__(self, data: Path) -> None:
        path = data / PAIRS_FILE
        with reading(path), path.open(encoding="utf-8", newline="") as file:
            self._tables: dict[str, dict[str, dict[str, Any]]] = dict(json.load(file))

    def speeds(self, device: Device, tenants: Sequence[Tenant]) -> Sequence[float]:
        """Fraction of the speed alone, for each tenant."""
        table = _row(self._tables, device.kind.lower(), PAIRS_FILE)
        rows = [_row(table, tenant, PAIRS_FILE) for tenant in tenants]
        if len(tenants) == 1:
            return [1.0]
        if len(tenants) > 2:
            return [0.0] * len(tenants)
        together = rows[0].get(tenants[1].job.workload, (0.0, 0.0))
        return [
            min(1.0, speed / row["null"]) if row.get("null") else 0.0 for speed, row in zip(together, rows, strict=True)
        ]


@final
class Demands(SlowDown):
    """Measured demands: at full speed while the compute asked for is there, in proportion to what is there beyond that.

    `Demand.compute` is the knee of a job's curve. A share that the policy gave is what the job asks for; below a whole
    device it costs what the job's `Scaling` says.
    """

    def speeds(self, device: Device, tenants: Sequence[Tenant]) -> Sequence[float]:
        """Fraction of the speed alone, for each tenant."""
        asked = sum(
            tenant.job.demand[device.kind].compute if tenant.share is None else tenant.share for tenant in tenants
        )
        pressure = min(1.0, device.compute / asked) if asked else 1.0
        return [pressure * speed for speed in Scalings().speeds(device, tenants)]


@final
class Scalings(SlowDown):
    """Nobody slows anybody down, but a share below a whole device costs what the job's `Scaling` says (Fluid: h)."""

    def speeds(self, device: Device, tenants: Sequence[Tenant]) -> Sequence[float]:
        """Fraction of the speed alone, for each tenant."""
        widths = [1.0 if tenant.share is None else min(1.0, tenant.share / device.compute) for tenant in tenants]
        return [1 / tenant.job.scaling.factor(width) for tenant, width in zip(tenants, widths, strict=True)]


SLOWDOWNS: Mapping[str, Callable[[Path], SlowDown]] = {
    "none": lambda data: Scalings(),
    "demands": lambda data: Demands(),
    "shares": Shares,
    "pairs": Pairs,
}
"""Every model by its name, made from the folder of the tables."""


def _row(table: Mapping[str, Any], key: str | Tenant, file: str) -> Any:
    name = key.job.workload if isinstance(key, Tenant) else key
    if name in table:
        return table[name]
    whose = f"job {key.job.id!r}: " if isinstance(key, Tenant) else ""
    if not name:
        raise ScenarioError(
            f"{whose}it names no `workload`, by which {file} is read; that has {', '.join(sorted(table))}"
        )
    raise ScenarioError(f"{whose}{file} has no {name!r}; it has {', '.join(sorted(table))}")
