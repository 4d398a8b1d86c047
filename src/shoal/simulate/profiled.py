"""Models that studies have measured on this machine: the job history as a source of demands."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.core.demand import Profile
from shoal.cost.estimate import step_seconds
from shoal.cost.history import History, environment
from shoal.simulate.reader import Table
from shoal.simulate.search import Structure

__all__ = ["read_profiled"]

_SHORT = 8
"""Digits of a digest that are shown."""

_Name = tuple[str, str]
"""Digests of structure and data."""

_Measured = dict[_Name, dict[int, dict[str, Profile]]]
"""Name of a profile -> batch size -> kind of device -> what was measured."""


def read_profiled(table: Table, name: str, kinds: Sequence[str]) -> list[Structure]:
    """[[models]] with a `profile`: what studies have measured of a structure, alone and fused.

    Kinds of devices that were not measured are as fast as `kinds` says, in units of the kind that was
    measured, the first by name if there are several.

    Args:
        table: of the scenario file. Its `profile` is the beginning of the digest of a structure, and after a slash that
            of the digest of its data; an error lists those that there are.
        name: of the model.
        kinds: of the cluster.

    Raises:
        ScenarioError: there is no such profile, or several, or nothing says how fast the devices are.
    """
    asked = table.take("profile", (str,))
    speeds = table.table("kinds")
    speed = {} if speeds is None else {kind: speeds.number(kind, above=True) for kind in speeds.rest()}
    measured = _measured()
    structure, _, data = asked.partition("/")
    found = [known for known in measured if known[0].startswith(structure) and known[1].startswith(data)]
    if len(found) != 1:
        fault = f"{len(found)} profiles begin with {asked!r}" if found else f"there is no profile {asked!r}"
        listed = "".join(f"\n  {line}" for known in found or measured for line in _lines(known, measured[known]))
        table.fail("profile", f"{fault}; the job history of this environment has {listed or 'none'}")
    by_size = measured[found[0]]
    known_kinds = sorted({kind for by_kind in by_size.values() for kind in by_kind})
    if not {*known_kinds, *speed} & {*kinds}:
        fault = f"it was measured on {', '.join(known_kinds)}, the devices are {', '.join(kinds)}"
        table.fail("profile", f'{fault}; say how fast they are: kinds = {{ "{kinds[0]}" = 2.0 }}')
    table.done()
    return [
        Structure(f"{name} x {batch_size}", _profiles(by_kind, kinds, speed))
        for batch_size, by_kind in sorted(by_size.items())
    ]


def _measured() -> _Measured:
    measured: _Measured = {}
    for (structure, data, batch_size, kind), profile in sorted(History(environment=environment()).all().items()):
        measured.setdefault((structure, data), {}).setdefault(batch_size, {})[kind] = profile
    return measured


def _lines(name: _Name, sizes: Mapping[int, Mapping[str, Profile]]) -> list[str]:
    structure, data = name
    return [
        f"{structure[:_SHORT]}/{data[:_SHORT]}: batch size {batch_size} on {kind}, "
        f"{1000 * step_seconds(profile, 1):.3g} ms a step, {profile.epoch_steps} steps an epoch"
        for batch_size, by_kind in sizes.items()
        for kind, profile in by_kind.items()
    ]


def _profiles(by_kind: Mapping[str, Profile], kinds: Sequence[str], speed: Mapping[str, float]) -> dict[str, Profile]:
    first = by_kind[min(by_kind)]
    faster = {kind: _faster(first, speed[kind]) for kind in kinds if kind in speed}
    return faster | {kind: by_kind[kind] for kind in kinds if kind in by_kind}


def _faster(profile: Profile, factor: float) -> Profile:
    """On a device so many times as fast."""
    return replace(profile, step_seconds={size: seconds / factor for size, seconds in profile.step_seconds.items()})
