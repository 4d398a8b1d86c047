"""Slurm's commands: the nodes of an allocation, steps there, and batch jobs."""

import argparse
import logging
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import IO

from shoal.core.errors import BackendError

__all__ = [
    "SlurmNode",
    "allocated_nodes",
    "allocation",
    "cancel",
    "controller",
    "ended_jobs",
    "requested_nodes",
    "requeue",
    "restarted",
    "submit",
]

_log = logging.getLogger("shoal.run")

_MOST_NODES = 10_000
_RESERVED = ("array", "wait", "wrap", "test-only")
"""Options of `sbatch` that Shoal says itself, or that make one job of several."""

_COMMAND_SECONDS = 60.0
_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FORGOTTEN", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
}
"""States of jobs without any process left; Slurm forgets jobs some minutes after their end."""


@dataclass(frozen=True)
class SlurmNode:
    """A node of an allocation, with the CPUs and GPUs that the allocation has there."""

    name: str
    cpus: int
    gpus: int

    def srun(self, command: Sequence[str], output: IO[str]) -> "subprocess.Popen[str]":
        """Start a step of one task there, with all CPUs and GPUs, beside all other steps; its input is a pipe."""
        job = ["srun", f"--jobid={os.environ['SLURM_JOB_ID']}", "--overlap"]
        share = [f"--cpus-per-task={self.cpus}", f"--gpus-per-node={self.gpus}"]
        place = ["--nodes=1", "--ntasks=1", f"--nodelist={self.name}"]
        return subprocess.Popen(
            [*job, *place, *share, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the engine
        )


def requested_nodes(options: str) -> int:
    """Number of nodes in options of `sbatch`, 1 without.

    BackendError if it is no number, or the options ask for an array of jobs or for what Shoal says itself.
    """
    nodes, others = _parsed(options)
    reserved = [word for word in others if _is_reserved(word)]
    if reserved or not nodes.isdecimal() or not 1 <= int(nodes) <= _MOST_NODES:
        raise BackendError(
            "--sbatch asks for nodes one by one; --nodes among its options is their number, such as --nodes=4, at most "
            f"{_MOST_NODES}, and there is no {' or '.join(f'--{name}' for name in _RESERVED)}, got {options!r}"
        )
    return int(nodes)


def _parsed(options: str) -> tuple[str, list[str]]:
    """The number of nodes as it is written, and the other options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-N", "--nodes", default="1")
    try:
        known, others = parser.parse_known_args(shlex.split(options))
    except (ValueError, argparse.ArgumentError) as error:
        raise BackendError(f"--sbatch takes options of sbatch, got {options!r}: {error}") from error
    return known.nodes, others


def _is_reserved(word: str) -> bool:
    """Return whether a word is an option that Shoal says itself, or the beginning of one, which Slurm takes for it."""
    name = word.partition("=")[0]
    if name.startswith("--"):
        return len(name) > 4 and any(each.startswith(name[2:]) for each in _RESERVED)
    return name[:2] in ("-a", "-W")


def allocated_nodes(text: str, hostnames: Callable[[str], Sequence[str]]) -> list[SlurmNode]:
    """The nodes of a job, from what `scontrol -d show job` prints.

    `hostnames` is a function from a list of nodes as Slurm writes it, "ash,beech[1-3]", to their names.
    """
    nodes = []
    for names, ids, gres in re.findall(r"^\s+Nodes=(\S+) CPU_IDs=(\S+) Mem=\S+ GRES\w*=(\S*)", text, re.MULTILINE):
        ranges = [part.partition("-") for part in ids.split(",")]
        cpus = sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
        gpus = sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", gres)))
        nodes += [SlurmNode(name, cpus, gpus) for name in hostnames(names)]
    return nodes


def allocation() -> list[SlurmNode]:
    """The nodes that the allocation of this process has now; BackendError without one."""
    job = os.environ.get("SLURM_JOB_ID", "")
    text = _run("scontrol", "-d", "show", "job", job)
    if nodes := allocated_nodes(text, lambda names: _run("scontrol", "show", "hostnames", names).split()):
        return nodes
    raise BackendError(f"Slurm job {job!r} has no nodes; `scontrol -d show job {job}` prints: {' '.join(text.split())}")


def controller() -> str:
    """The host of Slurm's controller; "" if Slurm does not say it."""
    try:
        text = _run("scontrol", "show", "config")
    except BackendError as error:
        _log.info("Slurm does not say where its controller is: %s", error)
        return ""
    found = re.search(r"^SlurmctldHost\S*\s*=\s*([^\s(]+)(?:\((\S+)\))?", text, re.MULTILINE)
    return (found[2] or found[1]) if found else ""


def submit(options: str, *more: str, script: str = "") -> str:
    """Call `sbatch` for one node, and return its output; BackendError if Slurm refuses the job."""
    try:
        # Options of the user come last: after a word that is none, sbatch takes all others for arguments of a script.
        return _run("sbatch", "--job-name=shoal", "--nodes=1", *more, *_parsed(options)[1], text=script)
    except BackendError as error:
        raise BackendError(
            f"{error}; it was called with --sbatch {options!r}, and sinfo lists the partitions"
        ) from error


def ended_jobs(ids: Collection[str]) -> dict[str, str]:
    """Return the jobs without any process left, with Slurm's names of their states; none if Slurm does not answer."""
    if not ids:
        return {}
    try:
        text = _run("squeue", "-h", "--states=all", "--format=%i %T", f"--jobs={','.join(ids)}")
    except BackendError as error:
        if "Invalid job id" not in str(error):
            _log.info("Slurm does not say which jobs have ended: %s", error)
            return {}
        text = ""
    states = dict.fromkeys(ids, "FORGOTTEN") | dict(line.split() for line in text.splitlines() if line.strip())
    return {id: state for id, state in states.items() if state in _ENDED}


def cancel(ids: Collection[str]) -> None:
    """Cancel jobs; those that have ended stay as they are. A warning if Slurm cancels none of the others."""
    if ids:
        try:
            _run("scancel", *ids)
        except BackendError as error:
            text = str(error)
            if text.count("error:") != text.count("Invalid job id"):  # else Slurm has forgotten them
                _log.warning("jobs may be left in Slurm's queue: %s; end them with: scancel %s", text, " ".join(ids))


def restarted() -> bool:
    """Return whether this process is in a Slurm job that has been started before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def requeue() -> None:
    """Put the Slurm job of this process back into the queue, which ends this process; BackendError if it may not be."""
    try:
        _run("scontrol", "requeue", os.environ["SLURM_JOB_ID"])
    except BackendError as error:
        raise BackendError(f"{error}; only a job of `sbatch --requeue` starts again") from error


def _run(*command: str, text: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",  # names of others, in any encoding
            timeout=_COMMAND_SECONDS,
            env=_environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendError(f"{command[0]} failed: {error}") from error
    if done.returncode:
        raise BackendError(f"{command[0]} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Return the variables of this process without those of its own job, which commands of Slurm take for options."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    own = [name for name in os.environ if name.startswith("SLURM") and not name.startswith(kept)]
    return {name: value for name, value in os.environ.items() if name not in (*own, "CUDA_VISIBLE_DEVICES")}
