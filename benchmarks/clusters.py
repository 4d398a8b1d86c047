"""What searches cost on clusters of 16, 1,000 and 10,000 devices: by policy, fused and packed or not, with failures.

Every row is the state machine of a live study on a virtual cluster (`shoal simulate`). The scenarios are HyperSack's
SP4 on 16 A100, Gavel's models on devices of three kinds, and Alibaba's demands and run times; their files in scenarios/
name the sources of every figure. In the last two, studies arrive over hours, and nodes fail at random at the rate of
Meta's RSC-1, 6.50 per thousand node-days, and come back after a day; their jobs go on elsewhere from their last
checkpoints. SP4 takes minutes on four nodes: at that rate a node fails in one of thousands of runs, so it has no rows
with failures.

"plain" is one trial a job; "fused" lets trials share arrays, and arrays a process. Device hours count every device with
a job on it. JCT is the mean time from the proposal of a trial to its end.

    python benchmarks/clusters.py [--scenarios sp4 gavel_1k ...] [--policies fifo wfd auto] [--data DIR] [--quick]
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import baselines

from shoal.plan.schedule import POLICIES
from shoal.simulate.scenario import DATA, Scenario, load
from shoal.simulate.slowdown import SHARES_FILE

ROOT = Path(__file__).parents[1]
SCENARIOS = ("sp4", "gavel_1k", "alibaba_1k", "gavel_10k", "alibaba_10k")
ASKED_SECONDS = 300.0
"""Most CPU seconds of one simulation."""
QUICK_SOURCES = 3
"""Studies and lists of jobs that are left of a scenario with `--quick`."""
HOUR = 3600.0


@dataclass(frozen=True)
class Row:
    """The result of one simulation; times in hours, but `seconds` in seconds of CPU time."""

    scenario: str
    policy: str
    fused: bool
    failures: int | None
    devices: int
    segments: int
    ended: int
    makespan: float
    device_hours: float
    completion: float
    seconds: float

    @property
    def faults(self) -> Iterator[str]:
        """Say what is wrong with the row."""
        name = f"{self.scenario}, {self.policy}, {'fused' if self.fused else 'plain'}"
        if self.ended < self.segments:
            yield f"{name}: {self.ended} of {self.segments} segments ended"
        if self.device_hours > self.devices * self.makespan * (1 + 1e-9):
            yield f"{name}: {self.device_hours} device hours are more than {self.devices} devices have"
        if self.seconds > ASKED_SECONDS:
            yield f"{name}: simulated in {self.seconds:.0f} s of CPU time, asked at most {ASKED_SECONDS:.0f}"


def simulated(scenario: Scenario, policy: str, fused: bool, failing: bool) -> Row:
    """Simulate a scenario under a policy."""
    chosen = replace(
        scenario,
        fuse=fused,
        packing="cost" if fused else "none",
        events=scenario.events if failing else (),
    )
    began = time.process_time()
    result = chosen.simulate(policy)
    seconds = time.process_time() - began
    end = min(result.arrivals.values()) + result.makespan
    return Row(
        scenario.name,
        policy,
        fused,
        sum(bool(event.failed) and event.at < end for event in chosen.events) if failing else None,
        sum(1 for _ in scenario.cluster),
        len(result.arrivals),
        len(result.completion),
        result.makespan / HOUR,
        result.device_seconds / HOUR,
        result.mean_completion / HOUR,
        seconds,
    )


def main() -> int:
    baselines.register()
    options = arguments()
    rows: list[Row] = []
    print(f"{'scenario':12} {'policy':15} {'arrays':6} {'node failures':>13} {'makespan h':>11} "
          f"{'device hours':>13} {'mean JCT h':>11} {'trials':>7} {'CPU s':>6}")  # fmt: skip
    for name in options.scenarios:
        if name == "sp4" and not (options.data / SHARES_FILE).is_file():
            print(f"sp4 is left out: {options.data / SHARES_FILE} is not there; name its folder with --data")
            continue
        scenario = load(ROOT / "scenarios" / f"{name}.toml", options.data)
        if options.quick and name != "sp4":
            scenario = replace(scenario, sources=scenario.sources[:QUICK_SOURCES])
        for failing in (False, True) if scenario.events else (False,):
            for policy in options.policies:
                for fused in (False, True):
                    row = simulated(scenario, policy, fused, failing)
                    rows.append(row)
                    failures = "-" if row.failures is None else row.failures
                    print(f"{name:12} {policy:15} {'fused' if fused else 'plain':6} {failures:>13} "
                          f"{row.makespan:11.2f} {row.device_hours:13,.1f} {row.completion:11.2f} "
                          f"{row.segments:7,} {row.seconds:6.0f}", flush=True)  # fmt: skip
    missed = [fault for row in rows for fault in row.faults]
    print(json.dumps({"rows": [vars(row) for row in rows], "missed": missed}))
    return 1 if missed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / DATA, help="folder of the measured tables")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS, help="of the folder scenarios/")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["fifo", "wfd", "auto"])
    parser.add_argument("--quick", action="store_true", help="SP4, and three studies of Gavel's mix; only wfd")
    options = parser.parse_args()
    if options.quick:
        options.scenarios, options.policies = ("sp4", "gavel_1k"), ["wfd"]
    return options


if __name__ == "__main__":
    sys.exit(main())
