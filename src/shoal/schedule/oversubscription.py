"""Tuner of oversubscription: the ratio of committed to available compute of each kind of device (HyperSack: r)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import fmean
from types import MappingProxyType

from shoal.core.device import Cluster, Device
from shoal.core.errors import PolicyError

__all__ = ["OversubscriptionTuner", "check_oversubscription"]

WINDOW = 10
"""Observations per decision; more tolerate more noise."""

FIRST_STEP, FINEST_STEP = 0.5, 0.25
"""First and least change of a ratio."""

MAX_RATIO = 8.0

WORTH, MARGIN = 0.25, 0.1
"""Part of the additional committed compute that must be delivered, as small parts are lost in noise; and the difference
to it from which the ratio moves (hysteresis)."""

REST = 4
"""Windows for which a settled ratio stays."""


def check_oversubscription(value: object, *, processes: bool) -> None:
    """Check the `oversubscription` of a study before the study begins."""
    if value == "auto":
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value < 1:  # type: ignore[arg-type, operator]
        raise PolicyError(f'`oversubscription` must be "auto" or a number of at least 1, got {value!r}')
    if value != 1 and not processes:
        raise PolicyError(
            f"oversubscription={value!r} needs a process for each job; use backend='local', or leave it out"
        )


@dataclass(frozen=True)
class _RatioMeasurement:
    """Measurement at one ratio: mean committed compute, and mean delivered compute."""

    ratio: float
    committed: float
    delivered: float


@dataclass
class _HillClimb:
    """State of the search for the ratio of one kind."""

    ratio: float
    step: float
    best: _RatioMeasurement | None = None
    rose: bool = False
    settled: bool = False
    observations: list[tuple[float, float]] = field(default_factory=list)


class OversubscriptionTuner:
    """Finds the ratio of each kind of device by hill climbing, while jobs run.

    A kind begins with the ratio that earlier studies found, else at 1. Above 1 the speed of a job can be observed only
    if its time alone is known, which is measured while no more is reserved than the device has. So a kind that began
    above 1 begins again at 1, by `forget`, with the first job whose time alone is unknown, or is not what the history
    says; else a ratio that is too large for the jobs of this study would stay.

    A job of demand c that runs at a fraction v of its speed alone receives c · v of compute. Committed compute that the
    device has is delivered; beyond it, one more job slows the others, gradually on real devices, until the delivered
    compute stays or falls. While jobs wait, all additional delivered compute is a gain. So a ratio is widened
    while more than a quarter (`WORTH`) of the additional committed compute is delivered, and narrowed if that loses
    less than a quarter of the removed committed compute. If neither holds, the step is halved. Below `FINEST_STEP` the
    ratio is kept for `REST` windows. Then both directions are tried again with the first step, since the workload may
    have changed.

    The tuner compares speed alone with speed together. A utilisation counter is not sufficient: NVML's is the part of
    the time in which any kernel ran, however small, and may be near 100 % for each of three jobs that do not slow each
    other down. Demands from such counters are too large, and the ratio compensates for that.

    Equal observations in equal order give equal ratios. With devices that can deliver up to 4 times the compute
    committed at a ratio of 1, a ratio is settled after at most 120 observations of a kind, as long as waiting jobs fill
    the committed compute.

    Args:
        kinds: Kinds of devices to tune; observations of other kinds are ignored; None: all kinds.
        known: Ratio of each kind to begin with, such as those that earlier studies found; 1 for other kinds.
        fixed: Ratio of all devices, which no observation changes; None: ratios are tuned.
    """

    def __init__(
        self,
        *,
        kinds: Collection[str] | None = None,
        known: Mapping[str, float] = MappingProxyType({}),
        fixed: float | None = None,
    ) -> None:
        self._kinds = kinds if fixed is None else ()
        self._known = {kind: min(max(1.0, ratio), MAX_RATIO) for kind, ratio in known.items()}
        self._known_before = frozenset(self._known)
        self._fixed = fixed
        self._climbs: dict[str, _HillClimb] = {}

    @property
    def ratios(self) -> Mapping[str, float]:
        """Device kind -> current ratio, for the observed kinds."""
        return {kind: climb.ratio for kind, climb in self._climbs.items()}

    @property
    def best_ratios(self) -> Mapping[str, float]:
        """Device kind -> best ratio so far, for the kinds with a full window of observations.

        In contrast to `ratios`, no ratio is among them that is only being tried. A kind with a ratio of earlier studies
        is among them once its own is settled, so that a short study of other jobs does not replace it.
        """
        return {
            kind: climb.best.ratio
            for kind, climb in self._climbs.items()
            if climb.best is not None and (climb.settled or kind not in self._known_before)
        }

    def ratio(self, kind: str) -> float:
        """Return the current ratio of a kind; without observations the known one, or 1."""
        if self._fixed is not None:
            return self._fixed
        return self._climbs[kind].ratio if kind in self._climbs else self._known.get(kind, 1.0)

    def settled(self, kind: str) -> bool:
        """Return whether the ratio of a kind is settled."""
        return kind in self._climbs and self._climbs[kind].settled

    def tunes(self, kind: str) -> bool:
        """Return whether the ratio of a kind is tuned."""
        return self._kinds is None or kind in self._kinds

    def forget(self, kind: str) -> None:
        """Begin again at 1 for a kind that began with the ratio of earlier studies."""
        if self._known.pop(kind, None) is not None:
            self._climbs.pop(kind, None)

    def apply(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the current ratio on every device of a tuned kind."""
        if self._fixed is None and not any(self.tunes(device.kind) for _, device in cluster):
            return cluster
        return cluster.map(self._tuned)

    def observe(self, kind: str, jobs: Iterable[tuple[float, float]]) -> None:
        """Record the demands and speeds of the jobs on one device under the current ratio.

        Observations of devices that are not full, for lack of waiting jobs, do not change the result.

        Args:
            jobs: Demand of each job, and its measured throughput as a fraction of its throughput alone.

        Raises:
            PolicyError: A demand or a speed is negative or not finite.
        """
        pairs = list(jobs)
        for demand, speed in pairs:
            if not (0 <= demand < float("inf") and 0 <= speed < float("inf")):
                raise PolicyError(
                    f"a job on {kind} has demand {demand!r} and speed {speed!r}; both must be finite and not negative"
                )
        if not self.tunes(kind):
            return
        climb = self._climbs.setdefault(kind, _HillClimb(self.ratio(kind), FIRST_STEP))
        climb.observations.append((sum(demand for demand, _ in pairs), sum(demand * speed for demand, speed in pairs)))
        if len(climb.observations) == WINDOW * (REST if climb.settled else 1):
            self._evaluate(climb)

    def _tuned(self, device: Device) -> Device:
        if self._fixed is None and not self.tunes(device.kind):
            return device
        return replace(device, oversubscription=self.ratio(device.kind))

    def _evaluate(self, climb: _HillClimb) -> None:
        newest = climb.observations[-WINDOW:]
        measurement = _RatioMeasurement(climb.ratio, fmean(p for p, _ in newest), fmean(d for _, d in newest))
        climb.observations.clear()
        if climb.best is None or climb.settled:
            climb.step, climb.settled, climb.rose = FIRST_STEP, False, False
            self._widen(climb, measurement)
        elif climb.ratio > climb.best.ratio:
            self._evaluate_wider(climb, climb.best, measurement)
        else:
            self._evaluate_narrower(climb, climb.best, measurement)

    def _evaluate_wider(self, climb: _HillClimb, best: _RatioMeasurement, measurement: _RatioMeasurement) -> None:
        extra = measurement.committed - best.committed
        if extra < FINEST_STEP / 2 and measurement.ratio + climb.step <= min(best.ratio + 1, MAX_RATIO):
            climb.ratio += climb.step  # no further job fitted; a job of a whole device fits at a ratio larger by 1
        elif extra >= FINEST_STEP / 2 and measurement.delivered - best.delivered > (WORTH + MARGIN) * extra:
            climb.rose = True
            self._widen(climb, measurement)
        else:
            self._narrow(climb, best)

    def _evaluate_narrower(self, climb: _HillClimb, best: _RatioMeasurement, measurement: _RatioMeasurement) -> None:
        removed = best.committed - measurement.committed
        if removed > 0 and best.delivered - measurement.delivered < (WORTH - MARGIN) * removed:
            self._narrow(climb, measurement)
        else:
            self._refine(climb, best)

    def _widen(self, climb: _HillClimb, best: _RatioMeasurement) -> None:
        climb.best = best
        if best.ratio + climb.step <= MAX_RATIO:
            climb.ratio = best.ratio + climb.step
        else:
            self._narrow(climb, best)

    def _narrow(self, climb: _HillClimb, best: _RatioMeasurement) -> None:
        """Try a smaller ratio, unless it is known to be worse."""
        climb.best = best
        if not climb.rose and best.ratio - climb.step >= 1:
            climb.ratio = best.ratio - climb.step
        else:
            self._refine(climb, best)

    def _refine(self, climb: _HillClimb, best: _RatioMeasurement) -> None:
        """Halve the step, or settle the ratio if the step is at its least. Called if neither direction is better."""
        climb.best, climb.rose = best, False
        if climb.step / 2 >= FINEST_STEP:
            climb.step /= 2
            self._widen(climb, best)
        else:
            climb.ratio, climb.settled = best.ratio, True
