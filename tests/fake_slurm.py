"""Stands for srun, sbatch, squeue, scancel and scontrol, whose name is the first argument; every node is this machine.

Installed by `slurm_clusters.fake_cluster`; uses nothing but the standard library. The directory FAKE_SLURM in its
environment has the files `nodes` (names) and `down` (names that take no step), and gets `calls` (a line of JSON for
each command) and `jobs`. A node has one CPU and takes one batch job at a time.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_SLURM"])
NODES = STATE.joinpath("nodes").read_text().split()


def fail(message):
    print(message, file=sys.stderr)
    sys.exit(1)


def options_of(arguments):
    """Options that are written as one word, and the words after the last one."""
    count = next((i for i, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    pairs = (word.partition("=") for word in arguments[:count])
    return {name: value for name, _, value in pairs}, arguments[count:]


def srun(arguments):
    options, command = options_of(arguments)
    node = options["--nodelist"]
    if node in STATE.joinpath("down").read_text().split():
        fail("srun: error: Unable to create step for job 12: Requested node configuration is not available")
    step = {"SLURMD_NODENAME": node, "SLURM_JOB_ID": "12", "SLURM_CPUS_ON_NODE": options["--cpus-per-task"]}
    task = subprocess.Popen(command, env=os.environ | step)
    signal.signal(signal.SIGTERM, lambda number, frame: task.terminate())
    status = task.wait()
    if status < 0:
        fail(f"srun: error: {node}: task 0: {signal.strsignal(-status)}")
    sys.exit(status)


def sbatch(arguments):
    options, _ = options_of(arguments)
    if options.get("--partition") == "nope":
        fail(
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified"
        )
    if "--test-only" in options:
        return
    job = str(100 + len(list(STATE.glob("jobs/*.json"))))
    STATE.joinpath(f"jobs/{job}.sh").write_text(sys.stdin.read())
    record(job, state="PENDING", pid=0, node="", log=options["--output"].replace("%j", job))
    start_pending()
    print(job)


def record(job, **values):
    path = STATE / f"jobs/{job}.json"
    path.with_suffix(".new").write_text(json.dumps(values))
    path.with_suffix(".new").rename(path)


def jobs():
    """Id of each job -> its values, with the state that it has now."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(STATE.glob("jobs/*.json"))}
    for job, values in found.items():
        status = STATE / f"jobs/{job}.status"
        if values["state"] != "RUNNING":
            continue
        if status.exists() and status.read_text():
            record(job, **values | {"state": "FAILED" if int(status.read_text()) else "COMPLETED"})
        elif not lives(values["pid"]):
            record(job, **values | {"state": "NODE_FAIL"})
    return {job: json.loads((STATE / f"jobs/{job}.json").read_text()) for job in found}


def lives(pid):
    try:
        return not re.search(r"\) [ZX]", Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return False


def start_pending():
    known = jobs()
    for job, values in known.items():
        busy = [each["node"] for each in jobs().values() if each["state"] == "RUNNING"]
        free = [node for node in NODES if node not in busy]
        if values["state"] != "PENDING" or not free:
            continue
        script = STATE / f"jobs/{job}"
        given = {"SLURMD_NODENAME": free[0], "SLURM_JOB_ID": job, "SLURM_CPUS_ON_NODE": "1"}
        with open(values["log"], "ab") as log:
            process = subprocess.Popen(
                ["/bin/sh", "-c", f"/bin/sh {script}.sh; echo $? > {script}.status"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | given,
            )
        record(job, **values | {"state": "RUNNING", "pid": process.pid, "node": free[0]})


def squeue(arguments):
    options, _ = options_of(arguments)
    start_pending()
    known, asked = jobs(), options["--jobs"].split(",")
    if not set(asked) & known.keys():
        fail("slurm_load_jobs error: Invalid job id specified")
    for job in asked:
        if job in known:
            print(job, known[job]["state"])


def scancel(arguments):
    known = jobs()
    for job in arguments:
        if known[job]["state"] == "RUNNING":
            os.killpg(known[job]["pid"], signal.SIGTERM)
            while lives(known[job]["pid"]):
                time.sleep(0.01)
        if known[job]["state"] in ("RUNNING", "PENDING"):
            record(job, **known[job] | {"state": "CANCELLED"})


def scontrol(arguments):
    match arguments:
        case ["-d", "show", "job", job]:
            print(f"JobId={job} JobState=RUNNING NodeList={','.join(NODES)}")
            print(f"     Nodes={','.join(NODES)} CPU_IDs=0 Mem=0 GRES=")
        case ["show", "config"]:
            print("SlurmctldAddr           = (null)\nSlurmctldHost[0]        = ash(127.0.0.1)")
        case ["show", "hostnames", names]:
            print("\n".join(names.split(",")))


if __name__ == "__main__":
    own = sorted(name for name in os.environ if name.startswith("SLURM") or name == "CUDA_VISIBLE_DEVICES")
    with STATE.joinpath("calls").open("a") as calls:
        print(json.dumps({"command": sys.argv[1:], "environment": own}), file=calls)
    {"srun": srun, "sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}[sys.argv[1]](
        sys.argv[2:]
    )
