"""The tables of a scenario file: machines, models, studies, jobs, events."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from shoal.algorithms.registry import ALGORITHMS
from shoal.backend.virtual import START_SECONDS
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import AlgorithmError, ScenarioError
from shoal.core.trial import derive_seed
from shoal.cost.scaling import Scaling
from shoal.simulate.curves import Curves, Decay, RealCurves, read_task
from shoal.simulate.profiled import read_profiled
from shoal.simulate.reader import MOST, Table
from shoal.simulate.run import ClusterEvent
from shoal.simulate.search import Listed, Search, Structure
from shoal.simulate.slowdown import Curve, read_curves

__all__ = ["read_events", "read_jobs", "read_models", "read_nodes", "read_studies"]

GB = 10**9
MANY = 10**6
"""Most devices, jobs or epochs that one table may ask for."""
_AMOUNTS = {"seconds": ..., "compute": 1.0, "memory_gb": 0.0, "cores": 1.0, "arrival": 0.0}
"""What is drawn for each of [[jobs]], and what it is where the file does not say."""
_ANY: tuple[type, ...] = (float, list)


def read_nodes(tables: Iterable[Table], tuned: dict[str, bool], taken: set[str]) -> tuple[Node, ...]:
    """[[nodes]]: machines, `count` equal ones each, called as they are named or node0, node1, ...

    Args:
        tables: each a [[nodes]].
        tuned: device kind -> whether its oversubscription is to be found, of the kinds of which a file has said so, or
            has given a number; added to.
        taken: names of nodes and devices so far; added to.
    """
    nodes: list[Node] = []
    for table in tables:
        name = table.take("name", (str,), None)
        count = table.whole("count", 1, least=1, most=MANY)
        kind = table.take("kind", (str,))
        devices = table.whole("devices", most=MANY // count)
        memory = int(table.number("memory_gb") * GB)
        cores = table.number("cores", 64.0)
        ratio = _oversubscription(table, kind, tuned)
        compute = table.number("compute", 1.0, above=True)
        table.done()
        for index in range(count):
            if name is None:
                called = next(free for number in itertools.count() if (free := f"node{number}") not in taken)
            else:
                called = name if count == 1 else f"{name}{index}"
            slots = tuple(
                Device(f"{called}/{i}", kind, memory, compute=compute, oversubscription=ratio) for i in range(devices)
            )
            for each in (called, *(slot.name for slot in slots)):
                if each in taken:
                    fault = f"there is or was a node or device {each!r} already; each needs a name of its own"
                    table.fail("name", fault)
                taken.add(each)
            nodes.append(Node(called, cores, slots))
    return tuple(nodes)


def _oversubscription(table: Table, kind: str, tuned: dict[str, bool]) -> float:
    """A number, or where a ratio that is to be found begins."""
    key = "oversubscription"
    is_tuned = isinstance(table.take(key, (float, str), 1.0), str)
    if key in table and tuned.setdefault(kind, is_tuned) != is_tuned:
        table.fail(key, f'`{key}` must be "tuned" for all nodes with {kind} or for none: a ratio is found for a kind')
    return 1.0 if is_tuned and table.one_of(key, ("tuned",), "") else table.number(key, 1.0, above=True)


def read_models(tables: Iterable[Table], kinds: Sequence[str], data: Path) -> dict[str, list[Structure]]:
    """[[models]]: what a trial of a model takes, for each batch size; by the model's name.

    Either `workloads` names a row of `a100_mig_slices.csv` for each batch size, and `samples` the length of an epoch:
    its compute is the measured SM utilisation alone, what HyperSack's sampler records. Or `epoch_seconds`, `compute`
    and `memory_gb` say it, each as one number or as one for each batch size. `kinds` gives the speed of other devices,
    `fused` what an array of several takes. Or `profile` names what studies have measured, see `read_profiled`.
    """
    models: dict[str, list[Structure]] = {}
    for table in tables:
        name = table.take("name", (str,))
        if name in models:
            table.fail("name", f"there is a model {name!r} already; each needs a name of its own")
        if "profile" in table:
            models[name] = read_profiled(table, name, kinds)
            continue
        sizes = table.take("batch_sizes", (list,), [1])
        if not sizes or not all(
            isinstance(size, int) and not isinstance(size, bool) and 0 < size <= 10**9 for size in sizes
        ):
            table.fail("batch_sizes", f"`batch_sizes` must be a list of integers from 1 to 10^9, got {sizes!r}")
        workloads = table.names("workloads")
        if workloads and len(workloads) != len(sizes):
            table.fail("workloads", f"`workloads` must be {len(sizes)}, one for each batch size, got {len(workloads)}")
        speeds = table.table("kinds")
        speed = dict.fromkeys(kinds, 1.0)
        if speeds is not None:
            speed = {kind: speeds.number(kind, least=1e-6) for kind in speeds.rest()}
            if not speed:
                table.fail("kinds", "`kinds` names no kind of device; leave it out, or say how fast each is")
        if workloads and "epoch_seconds" not in table:
            samples = table.whole("samples", least=1)
            rows = [_row(table, workload, data) for workload in workloads]
            seconds = [samples / size * row.seconds for size, row in zip(sizes, rows, strict=True)]
            compute = _per_size(table, "compute", sizes, [row.utilisation for row in rows])
            memory = _per_size(table, "memory_gb", sizes, [row.memory / GB for row in rows])
        else:
            seconds = _per_size(table, "epoch_seconds", sizes)
            compute = _per_size(table, "compute", sizes)
            memory = _per_size(table, "memory_gb", sizes)
        cores = _per_size(table, "cores", sizes, [1.0] * len(sizes))
        fused = _fused(table)
        table.done()
        models[name] = [
            Structure(
                f"{name} x {size}",
                {
                    kind: profile(seconds[i] / factor, compute[i], int(memory[i] * GB), cores[i], fused)
                    for kind, factor in speed.items()
                },
                workloads[i] if workloads else "",
            )
            for i, size in enumerate(sizes)
        ]
    return models


def profile(seconds: float, compute: float, memory: int, cores: float, fused: Mapping[int, float]) -> Profile:
    """Of a structure, by what one trial takes.

    Args:
        seconds: of an epoch.
        compute: fraction of a device.
        memory: bytes.
        cores: CPU cores.
        fused: members of an array -> how many times as long an epoch of all of them takes.
    """
    step_seconds = {1: seconds, **{members: seconds * factor for members, factor in fused.items()}}
    return Profile(
        step_seconds, 1, 0, base_memory=0, member_memory=memory, compute=compute, cores=cores, mixing=1.0, sample=MANY
    )


def _fused(table: Table) -> dict[int, float]:
    """`fused`: members of an array -> how many times as long its epoch takes as that of one."""
    given = table.table("fused")
    if given is None:
        return {}
    factors: dict[int, float] = {}
    for key in given.rest():
        if not (key.isdecimal() and 2 <= int(key) <= MANY):
            given.fail(key, f"`fused` must name numbers of members from 2 to {MANY:,}, got {key!r}")
        factors[int(key)] = given.number(key, above=True)
    return factors


def _row(table: Table, workload: str, data: Path) -> Curve:
    curves = read_curves(data)
    if workload not in curves:
        table.fail("workloads", f"there is no workload {workload!r}; there are {', '.join(curves)}")
    return curves[workload]


def _per_size(table: Table, key: str, sizes: Sequence[int], default: Any = ...) -> list[float]:
    value = table.take(key, _ANY, default)
    values = value if isinstance(value, list) else [value] * len(sizes)
    if len(values) != len(sizes) or not all(_amount(each) for each in values):
        table.fail(key, f"`{key}` must be one number, or {len(sizes)}, not negative, got {value!r}")
    return [float(each) for each in values]


def _amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST


def read_studies(
    tables: Iterable[Table], models: Mapping[str, Sequence[Structure]], data: Path, seed: int, dilation: float
) -> tuple[Search, ...]:
    """[[studies]]: searches; without an `algorithm`, every model, batch size and learning rate for `epochs` epochs."""
    searches: list[Search] = []
    for index, table in enumerate(tables):
        name = table.take("name", (str,), f"study{index}")
        if any(name == search.name for search in searches):
            table.fail("name", f"there is a study {name!r} already; each needs a name of its own")
        chosen = table.names("models")
        for model in chosen:
            if model not in models:
                table.fail("models", f"there is no model {model!r} under [[models]], only {', '.join(models)}")
            if chosen.count(model) > 1:
                table.fail("models", f"model {model!r} is named twice")
        structures = tuple(structure for model in chosen or models for structure in models[model])
        rates = table.whole("learning_rates", 1, least=1, most=MANY)
        own_seed = derive_seed(seed, "study", name)
        algorithm = _algorithm(table)
        curves = _curves(table, data, own_seed, algorithm[1].get("n"))
        if not structures:
            table.fail("models", "a study needs a model; describe it under [[models]]")
        trials, epochs = algorithm[1].get("n", len(structures) * rates), algorithm[1].get("epochs", 1)
        if trials * epochs > 10 * MANY:
            in_all = f"{trials:,} trials of {epochs:,} epochs are {trials * epochs:,} epochs in all"
            table.fail("learning_rates", f"{in_all}; at most {10 * MANY:,} can be simulated")
        arrivals = (table.number("arrival", 0.0),)
        with_costs = _costs(table, dilation)
        table.done()
        mine = [with_costs(structure, f"{name}: {structure.name}") for structure in structures]
        searches.append(Search(name, mine, rates, algorithm, arrivals, curves, own_seed))
    return tuple(searches)


def _algorithm(table: Table) -> tuple[str, dict[str, Any]]:
    given = table.table("algorithm")
    if given is None:
        return "grid", {"epochs": table.whole("epochs", least=1, most=MANY)}
    name = given.one_of("name", ALGORITHMS, ...)
    settings = given.rest()
    for key, value in settings.items():
        if isinstance(value, int) and value > MANY:
            given.fail(key, f"`{key}` must be at most {MANY:,}, got {value!r}")
    try:
        ALGORITHMS[name](**settings)
    except (AlgorithmError, TypeError) as error:
        table.fail("algorithm", f"algorithm {name!r} cannot be made: {error}")
    return name, settings


def _curves(table: Table, data: Path, seed: int, trials: int | None) -> Curves:
    given = table.table("curves")
    if given is None:
        return Decay()
    if "task" not in given:
        decay = Decay(given.number("start", 2.3, above=True))
        given.done()
        return decay
    number = given.whole("task")
    try:
        task = read_task(data, number)
    except ScenarioError as error:
        table.fail("curves", str(error))
    good = given.whole("good", None) if "good" in given else None
    given.done()
    if good is not None and (trials is None or good > trials):
        most = "which this is not" if trials is None else f"at most {trials}"
        table.fail("curves", f"`good` is of the trials of a random search, {most}; got {good}")
    able = sum(min(curve) <= task.target for curve in task.curves)
    if good is not None and trials is not None and (good > able or trials - good > len(task.curves) - able):
        table.fail(
            "curves",
            f"of task {number}, {able} curves reach the target and {len(task.curves) - able} do not; `good` asks for "
            f"{good} and {trials - good}",
        )
    return RealCurves(task, seed, trials, good)


def _costs(table: Table, dilation: float) -> Callable[[Structure, str], Structure]:
    """What jobs of a study, or of one [[jobs]], have in common: gives a structure of a name those costs."""
    alpha = table.number("alpha", least=1.0) if "alpha" in table else None
    beta = table.number("beta", 1.0, least=1.0)
    sharing, devices = table.whole("sharing", 1, least=1, most=1000), table.whole("max_devices", 1, least=1, most=1000)
    start = table.number("start_seconds", START_SECONDS)
    switch = table.number("switch_seconds", start)
    scaling = Scaling(Scaling.alpha if alpha is None else alpha, beta)
    crowding = {jobs: scaling.factor(1 / jobs) for jobs in range(2, sharing + 1)}
    spreading = {width: scaling.factor(width) for width in range(2, devices + 1)}

    def with_costs(structure: Structure, name: str) -> Structure:
        profiles = {
            kind: replace(
                each,
                step_seconds={size: seconds * dilation for size, seconds in each.step_seconds.items()},
                crowding=crowding or each.crowding,
                spreading=spreading or each.spreading,
            )
            for kind, each in structure.profiles.items()
        }
        return Structure(name, profiles, structure.workload, alpha, start, switch)

    return with_costs


def read_jobs(tables: Iterable[Table], kinds: Sequence[str], seed: int, dilation: float) -> list[Listed]:
    """[[jobs]]: jobs without a search, `count` each.

    Of their amounts (`seconds`, `compute`, `memory_gb`, `cores`, `arrival`) each is a number, a list of which one is
    drawn for each job, or a table of `low` and `high` between which it is drawn, every value as likely. The seconds are
    those of all `epochs` together.
    """
    jobs: list[Listed] = []
    names: set[str] = set()
    for index, table in enumerate(tables):
        name = table.take("name", (str,), f"job{index}")
        if name in names:
            table.fail("name", f"there are jobs {name!r} already; each [[jobs]] needs a name of its own")
        names.add(name)
        count = table.whole("count", 1, least=1, most=MANY)
        rng = Random(derive_seed(seed, "jobs", name))
        amounts = {key: _drawn(table, key, default) for key, default in _AMOUNTS.items()}
        epochs = table.whole("epochs", 1, least=1, most=MANY)
        on = table.names("kinds") or tuple(kinds)
        group = table.take("group", (str,), "")
        workload = table.take("workload", (str,), "")
        with_costs = _costs(table, dilation)
        table.done()
        structures: list[Structure] = []
        arrivals: list[float] = []
        for number in range(count):
            drawn = {key: draw(rng) for key, draw in amounts.items()}
            takes = profile(
                drawn["seconds"] / epochs, drawn["compute"], int(drawn["memory_gb"] * GB), drawn["cores"], {}
            )
            structures.append(with_costs(Structure("", dict.fromkeys(on, takes), workload), f"{name}/{number}"))
            arrivals.append(drawn["arrival"])
        jobs.append(Listed(name, structures, arrivals, group, epochs=epochs))
    return jobs


def _drawn(table: Table, key: str, default: Any) -> Callable[[Random], float]:
    """Draws an amount."""
    value = table.take(key, (float, list, dict), default)
    if isinstance(value, dict):
        bounds = table.table(key)
        if bounds is None:
            raise ScenarioError(f"`{key}` is no table")
        low = bounds.number("low")
        high = bounds.number("high", least=low)
        bounds.done()
        return lambda rng: rng.uniform(low, high)
    options = value if isinstance(value, list) else [value]
    if not options or not all(_amount(option) for option in options):
        table.fail(key, f"`{key}` must be a number, not negative, or a list of those to draw from, got {value!r}")
    return lambda rng: float(options[0] if len(options) == 1 else rng.choice(options))


def read_events(
    tables: Iterable[Table], cluster: Cluster, tuned: dict[str, bool], taken: set[str]
) -> tuple[ClusterEvent, ...]:
    """[[events]]: what fails, is restored or removed by name, and `add`: as under [[nodes]]; see `read_nodes`."""
    read = sorted(((table.number("at"), place, table) for place, table in enumerate(tables)), key=lambda each: each[:2])
    devices = {name: mine for node in cluster.nodes for name, mine in _named(node)}
    events: list[ClusterEvent] = []
    for at, _, table in read:
        named: dict[str, tuple[str, ...]] = {}
        for key in ("fail", "restore", "remove"):
            for name in table.names(key):
                if name not in devices:
                    table.fail(key, f"at {at:g} s there is no node or device {name!r}, only {', '.join(devices)}")
            named[key] = tuple(device for name in table.names(key) for device in devices[name])
        nodes = read_nodes(table.tables("add"), tuned, taken)
        table.done()
        if not (nodes or any(named.values())):
            table.fail("at", "nothing happens; say what fails, is restored, removed or added")
        devices = {name: mine for name, mine in devices.items() if not set(mine) & set(named["remove"])}
        devices |= {name: mine for node in nodes for name, mine in _named(node)}
        events.append(ClusterEvent(at, named["fail"], named["restore"], named["remove"], nodes))
    return tuple(events)


def _named(node: Node) -> list[tuple[str, tuple[str, ...]]]:
    """What a node and its devices are called, each with the devices that are meant."""
    names = tuple(device.name for device in node.devices)
    return [(node.name, names), *((name, (name,)) for name in names)]
