"""The page of a large study: first paint, delay of an event, memory of the server; and what it costs a study that runs.

A made-up journal of 10,000 trials with 100 reports each is served by `shoal page`. Measured are the time from the
address to the first drawn view in headless Chromium (Debian's chromium, driven by playwright; without them only the
server is measured), the time until each view is drawn, the time from the commit of a report to its arrival at a client,
and the resident memory of the server after all of that.

    python benchmarks/page.py [--trials 10000] [--epochs 100] [--quick]
    OMP_NUM_THREADS=1 python benchmarks/page.py --engine [--rounds 7]

With --engine a real study is run instead, in turns without its page and with it and ten clients, each of which follows
the changes and asks for the overview every 2.5 seconds, as a browser does. Its time is that between its first and its
last report, so that the start of the page is no part of it; the figure is the ratio of the medians.

The last line is JSON; "missed" names the figures that are worse than asked.
"""

import argparse
import http.client
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Job
from shoal.core.space import Space, loguniform
from shoal.core.trial import Budget, Report, Trial, TrialGroup, TrialState
from shoal.journal.view import JournalView
from shoal.spec import StudySpec

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.recorded import RecordedJournal

ASKED = {"first_paint_s": 1.5, "event_s": 1.0, "server_mib": 250.0, "engine_ratio": 1.02}
"""At most."""

VIEWS = ("trials", "curves", "space", "devices", "failures", "trial/7")
DEVICES = 8
EVENTS = 10
CLIENTS = 10
OVERVIEW_SECONDS = 2.5

STUDY = """
import sys
import torch
import shoal

class Line(shoal.Task):
    def data(self, config):
        x = torch.linspace(-1, 1, 2048).unsqueeze(1)
        return (both := torch.utils.data.TensorDataset(x, x)), both

    def model(self, config):
        return torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

directory, trials, epochs, page = sys.argv[1:]
shoal.tune(Line(), {"lr": shoal.loguniform(1e-4, 1e-1)}, metric="valid_loss", mode="min", fuse=False, devices="cpu:1",
           algorithm=shoal.Random(int(trials), epochs=int(epochs)), backend="inline", directory=directory,
           show_progress=False, page=page == "page")
"""


def make_study(directory: Path, trials: int, epochs: int) -> RecordedJournal:
    """Write a journal as a study of arrays of sixteen leaves it; the last array still runs."""
    study = StudySpec(metric="accuracy", mode="max", space=Space({"lr": loguniform(1e-6, 1.0)}).to_json())
    journal = RecordedJournal.create(directory, study, task=b"", algorithm=b"")
    devices = tuple(Device(f"cuda:{index}", "H100", 80 * 10**9, cores=8) for index in range(DEVICES))
    proposed = [Trial(number, {"lr": 0.5 / (number + 1)}, number, 0) for number in range(trials)]
    with journal.transaction():
        journal.record_devices(Cluster((Node("one", 64, devices),)))
        journal.record_proposal(trials, [TrialGroup(tuple(proposed), Budget(epochs + 10 * EVENTS))])
        for first in range(0, trials, 16):
            members = proposed[first : first + 16]
            name, last = f"job-{first // 16 + 1:05d}", first + 16 >= trials
            array = Array(FusionKey("net", "data", 32), tuple(Member(trial, 0, epochs) for trial in members))
            journal.record_job_start(Job(name, (array,)), f"cuda:{first // 16 % DEVICES}")
            for epoch in range(1, epochs + 1):
                done = epoch == epochs and not last
                state = TrialState.COMPLETE if done else TrialState.RUNNING
                journal.record_reports(name, [_report(trial.number, epoch, state) for trial in members])
            if not last:
                journal.record_job_end(name, "finished", failed=False)
    return journal


def _report(trial: int, epoch: int, state: TrialState = TrialState.RUNNING) -> Report:
    value = (1 - 1 / (epoch + 1)) * (0.5 + (trial * 7919 % 1000) / 2100)
    return Report(trial, epoch, {"accuracy": value, "valid_loss": 1 - value}, 0.01, state)


def serve(directory: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the page in a process of its own; return the process and the address."""
    program = (
        "import sys; from pathlib import Path; from shoal.look.page.server import serve; "
        "serve(Path(sys.argv[1]), announce=lambda address: print(address, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


class Client:
    """A client with the token of the address."""

    def __init__(self, address: str) -> None:
        self.port = int(address.split(":")[2].split("/")[0])
        self._cookie = f"shoal-{self.port}={address.partition('token=')[2]}"

    def open(self, path: str) -> http.client.HTTPResponse:
        """Ask for a path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("GET", path, headers={"Cookie": self._cookie})
        return connection.getresponse()

    def timed(self, path: str) -> tuple[float, bytes]:
        """Seconds until the whole answer is there, and the answer."""
        begin = time.perf_counter()
        content = self.open(path).read()
        return time.perf_counter() - begin, content


def event_delays(client: Client, journal: RecordedJournal, trials: int, epochs: int) -> list[float]:
    """Seconds from the commit of each of some reports to their arrival."""
    position = json.loads(client.timed("/api/state?study=study")[1])["position"]
    stream = client.open(f"/api/events?study=study&position={position}")
    recorded: dict[int, float] = {}
    delays: list[float] = []

    def read() -> None:
        while len(delays) < EVENTS:
            line = stream.readline()
            if line.startswith(b"data: "):
                delays.extend(time.perf_counter() - recorded[each[1]] for each in json.loads(line[6:])["reports"])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for event in range(EVENTS):
        recorded[epochs + 1 + event] = time.perf_counter()
        journal.record_reports(f"job-{(trials - 1) // 16 + 1:05d}", [_report(trials - 1, epochs + 1 + event)])
        time.sleep(1.3)
    reader.join(30)
    return delays


def browser_seconds(address: str) -> dict[str, float]:
    """Seconds until the first view and each other view is drawn; empty without a browser."""
    program = shutil.which("chromium")
    if program is None or find_spec("playwright") is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page()
        begin = time.perf_counter()
        tab.goto(address)
        tab.wait_for_selector("main .figure", timeout=60_000)
        found = {"first_paint_s": time.perf_counter() - begin}
        tab.wait_for_selector("body[data-ready]", timeout=120_000)
        found["overview_s"] = time.perf_counter() - begin
        for view in VIEWS:
            begin = time.perf_counter()
            tab.evaluate(f"location.hash = '#/study/{view}'")
            tab.wait_for_timeout(20)
            tab.wait_for_selector(f"body[data-ready={view.partition('/')[0]}]", timeout=120_000)
            found[f"{view.partition('/')[0]}_s"] = time.perf_counter() - begin
        browser.close()
        return found


def study_seconds(directory: Path, trials: int, epochs: int, clients: int) -> float:
    """Run a study, with its page if it has clients; return the seconds between its first and its last report."""
    arguments = [str(directory), str(trials), str(epochs), "page" if clients else ""]
    process = subprocess.Popen([sys.executable, "-c", STUDY, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    if clients:
        said = next(line for line in process.stderr if "the page is at" in line)
        client = Client(said.split()[-1])
        for _ in range(clients):
            threading.Thread(target=follow, args=(client, directory.name), daemon=True).start()
    said = process.stderr.read()
    if process.wait():
        raise RuntimeError(f"the study has failed: {said}")
    with JournalView.read(directory) as journal:
        ((first, last),) = journal.tables.rows("SELECT min(time), max(time) FROM reports")
    return float(last - first)


def follow(client: Client, study: str) -> None:
    """Do what a browser does that shows the overview, until the page ends."""
    position = json.loads(client.timed(f"/api/state?study={study}")[1])["position"]
    stream = client.open(f"/api/events?study={study}&position={position}")
    due = time.monotonic()
    with suppress(OSError, http.client.HTTPException):
        while line := stream.readline():
            if line.startswith(b"data: ") and time.monotonic() >= due:
                client.timed(f"/api/overview?study={study}")
                due = time.monotonic() + OVERVIEW_SECONDS


def engine_figures(trials: int, epochs: int, rounds: int) -> dict[str, float]:
    """Run the study in turns without and with clients; return the medians of its seconds, and their ratio."""
    seconds: dict[int, list[float]] = {0: [], CLIENTS: []}
    for turn in range(rounds):
        for clients in (0, CLIENTS) if turn % 2 == 0 else (CLIENTS, 0):
            with tempfile.TemporaryDirectory() as folder:
                seconds[clients].append(study_seconds(Path(folder) / "study", trials, epochs, clients))
        print(
            f"round {turn + 1}: {seconds[0][-1]:.2f} s without, {seconds[CLIENTS][-1]:.2f} s with the page", flush=True
        )
    without, served = (statistics.median(seconds[clients]) for clients in (0, CLIENTS))
    return {"engine_without_s": without, "engine_with_s": served, "engine_ratio": served / without}


def measure(trials: int, epochs: int) -> dict[str, Any]:
    """Make the study, serve it, and return all figures."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "study"
        with make_study(directory, trials, epochs) as journal:
            process, address = serve(directory)
            try:
                client, found = Client(address), {}
                found["state_s"], content = client.timed("/api/state?study=study")
                found["state_mb"] = len(content) / 1e6
                found |= browser_seconds(address)
                for view in ("curves", "space", "overview"):
                    found[f"server_{view}_s"] = client.timed(f"/api/{view}?study=study&metric=accuracy")[0]
                delays = event_delays(client, journal, trials, epochs)
                found["event_s"] = max(delays)
                found["event_median_s"] = statistics.median(delays)
                found["server_mib"] = psutil.Process(process.pid).memory_info().rss / 2**20
            finally:
                process.terminate()
                process.wait()
    return found


def main() -> None:
    """Print each figure, and all as JSON in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="only that it runs: 200 trials of 10 epochs")
    parser.add_argument("--engine", action="store_true", help="what a page with ten clients costs a study that runs")
    parser.add_argument("--rounds", type=int, default=7, help="of the study with --engine")
    given = parser.parse_args()
    trials, epochs = (32, 10) if given.engine else (200, 10) if given.quick else (given.trials, given.epochs)
    print(f"{trials} trials, {trials * epochs} reports; Python {platform.python_version()}, {platform.machine()}")
    figures = engine_figures(trials, epochs, given.rounds) if given.engine else measure(trials, epochs)
    if given.quick and not given.engine:
        with tempfile.TemporaryDirectory() as folder:  # only that it runs: seconds so short say nothing
            study_seconds(Path(folder) / "study", 2, 2, CLIENTS)
    found = {name: round(value, 3) for name, value in figures.items()}
    for name, value in found.items():
        print(f"{name:20} {value:10.3f}" + (f"   asked at most {ASKED[name]:g}" if name in ASKED else ""))
    missed = [name for name, most in ASKED.items() if name in found and found[name] > most]
    print(json.dumps({**found, "trials": trials, "reports": trials * epochs, "missed": missed}))


if __name__ == "__main__":
    main()
