"""Arrays with invented measurements."""

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.trial import Trial
from shoal.dry_run.result import Company, Measured

DEVICE = Device("cpu:0", "cpu/1", memory=4_200_000_000)


def profile(step=0.01, fused=None, steps=10, fetch=0.0, sharing="resident", base=100, member=10):
    """Steps of `step` seconds alone, of `fused` for two, no validation."""
    sizes = {1: step} if fused is None else {1: step, 2: fused}
    return Profile(sizes, steps, 0, base, member, 1.0, 1.0, fetch_seconds=fetch, sharing=sharing)


def measured(numbers, known, structure="mlp", data="data", switching=0.0, **config):
    """An array of the trials of these numbers."""
    key = FusionKey(structure, data, config.get("batch_size", 32))
    trials = [Trial(number, {"lr": 0.1 * (1 + number), **config}, seed=number, data_seed=0) for number in numbers]
    array = Array(key, tuple(Member(trial, 0, 1) for trial in trials), known)
    return Measured(array, known, switching, switching)


def company(*arrays, **found):
    """What was measured of some arrays together."""
    return Company(tuple(each.array for each in arrays), **found)
