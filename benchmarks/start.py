"""From the command to the first training step, with a warm file cache: `shoal run FILE` beside a plain script.

- run     the file imports torch and calls `shoal.tune` for a small MLP, whose job history is empty
- plain   a script that imports torch, builds the same MLP and trains it by a loop

Each is a new process, as of a shell, and they take turns. The first round fills the caches of files and of compiled
modules and does not count. Medians, in seconds from the start of the process to the beginning of the first step.

    python benchmarks/start.py [--quick]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from papers.experiment import missed_of
from papers.rivals import EXPERIMENTS, START
from report import machine, report

ROUNDS = 5
BOTH = """
import time
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

x, y = torch.randn(1024, 64), torch.arange(1024) % 10

def network():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

def begin_step():
    with open("step", "a") as file:
        print(time.time(), file=file)
"""
SEARCH = f"""{BOTH}
import shoal

class Digits(shoal.Task):
    def data(self, config):
        return TensorDataset(x, y), TensorDataset(x[:64], y[:64])

    def model(self, config):
        return network()

    def optimizer(self, model, config):
        return torch.optim.Adam(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        if torch.is_grad_enabled():
            begin_step()
        return F.cross_entropy(model(batch[0]), batch[1])

shoal.tune(
    Digits(), {{"lr": shoal.loguniform(1e-4, 1e-1)}}, metric="valid_loss", mode="min",
    algorithm=shoal.Random(4, epochs=1), directory="study",
)
"""
PLAIN = f"""{BOTH}
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for rows in torch.randperm(len(x)).split(32):
    begin_step()
    optimizer.zero_grad()
    F.cross_entropy(model(x[rows]), y[rows]).backward()
    optimizer.step()
"""
WAYS = {
    "run": (SEARCH, [sys.executable, "-c", "from shoal.__main__ import main; main()", "run"]),
    "plain": (PLAIN, [sys.executable]),
}
"""The file of each way, and the command that runs it."""


def begin(way: str) -> float:
    """Seconds until the first step."""
    text, command = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "file.py").write_text(text)
        environment = {**os.environ, "SHOAL_CACHE": f"{folder}/cache"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # modules are compiled once, as those of an installation
        began = time.time()
        subprocess.run([*command, "file.py"], cwd=folder, env=environment, check=True, capture_output=True)
        return float((Path(folder) / "step").read_text().split()[0]) - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, which counts; checks no figure")
    quick = parser.parse_args().quick
    rounds = [{way: begin(way) for way in WAYS} for _ in range(1 if quick else ROUNDS + 1)]
    seconds = {way: round(statistics.median(each[way] for each in rounds[not quick :]), 3) for way in WAYS}
    print(machine() + "".join(f", {way} {took:.2f} s" for way, took in seconds.items()))
    return report({"seconds": seconds}, [] if quick else missed_of(EXPERIMENTS, START, {"seconds": seconds}))


if __name__ == "__main__":
    sys.exit(main())
