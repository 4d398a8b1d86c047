"""The Ray cluster of a study on nodes of Slurm: its head runs beside the engine, and Slurm starts its nodes."""

import atexit
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from secrets import token_hex
from typing import Any

from shoal.core.errors import BackendError
from shoal.host.machine import ThisMachine, own_addresses
from shoal.host.process_lock import TemporaryFolder
from shoal.run.nodes.inventory import agent_probe_fault, version_fault, versions
from shoal.run.nodes.ray import check_address, check_ray

__all__ = ["ClusterHead", "be_node"]

_PARENT_BYTES = 7
"""Longest path of the parent of Ray's folder: Ray adds up to 70 bytes to the path of a socket, which may have 107."""
_STORE_BYTES = 80_000_000
"""Memory of the object store of a node, which holds messages and no data; Ray asks for at least 75 MB."""
_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would end an agent
    "RAY_enable_worker_prestart": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # a node ends so long after the head
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "90",  # a node that is warned of its end waits for its jobs so long
}
_NAMES = (*_VARIABLES, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""The variables of Ray that its cluster sets or removes."""
_RAY_VERSION = "2.60"
"""The version of Ray whose private functions are called here."""


class ClusterHead:
    """The head of a Ray cluster of this process, which is connected to it; nodes join with its address and token.

    The head listens on free ports, has no CPU for jobs, and ends with this process. Its files are in a folder of mode
    0700.

    Args:
        peer: Host in the network of the nodes, which shows by what address they reach this machine; "" if unknown.
    """

    def __init__(self, peer: str) -> None:
        check_ray("slurm")
        import ray

        if ray.is_initialized():
            raise BackendError(
                f"this process is connected to the Ray cluster at {ray.get_runtime_context().gcs_address!r}, and back "
                "end 'slurm' starts one of its own; call ray.shutdown() first"
            )
        _private_classes()
        self._folder = TemporaryFolder(_PARENT_BYTES)
        self._users = {name: os.environ[name] for name in _NAMES if name in os.environ}
        self._address = ""
        self.logs = self._folder.path
        """Folder for the output of nodes."""
        token = token_hex(32)
        atexit.register(self.close)
        before = signal.getsignal(signal.SIGTERM)
        try:
            _use_token(self._folder.path, token)
            _in_lasting_thread(
                lambda: ray.init(
                    address="local",
                    num_cpus=0,
                    num_gpus=0,
                    object_store_memory=_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                    _node_ip_address=_address_towards(peer),
                    _temp_dir=str(self._folder.path / "r"),
                )
            )
        except BaseException as error:
            ray.shutdown()  # it may have started in part
            self.close()
            if not isinstance(error, (OSError, RuntimeError, ValueError, ray.exceptions.RayError)):
                raise
            raise BackendError(f"Ray could not start the head of a cluster on this machine: {error}") from error
        finally:
            if signal.getsignal(signal.SIGTERM) is not before:  # Ray would let it raise SystemExit
                signal.signal(signal.SIGTERM, before)
        self._address = ray.get_runtime_context().gcs_address
        self.contact = json.dumps({"address": self._address, "token": token, "versions": versions()})
        """Address, token and versions, with which a node joins, in one line; it is secret."""

    @property
    def alive(self) -> bool:
        """Whether this process is connected to the cluster."""
        import ray

        return bool(ray.is_initialized() and ray.get_runtime_context().gcs_address == self._address)

    def close(self) -> None:
        """End the cluster, remove its files, and restore the user's settings of Ray. May be called once."""
        import ray

        atexit.unregister(self.close)
        if self.alive:
            ray.shutdown()
        _set_variables(self._users)
        self._folder.close()

    def write_contact(self, file: Path) -> None:
        """Write the contact into a new file, which only its user can read."""
        _write_secret(file, self.contact)


def be_node() -> None:
    """Be a node of a cluster; arguments: its label and, in a batch job, the study's directory and the engine's file.

    Without these the contact is the first line of the standard input, and the node ends at the end of the input. A node
    that cannot be used says why in its last line.
    """
    label, *study = sys.argv[2:]
    node = os.environ["SLURMD_NODENAME"]
    cores, gpus, fault = _share()
    if fault := fault or (agent_probe_fault(Path(study[0]), node, study[1]) if study else ""):
        sys.exit(fault)
    about = json.loads((Path(study[0]) / "agents" / study[1]).read_text() if study else sys.stdin.readline())
    if fault := version_fault(node, versions(), about["versions"]):
        sys.exit(fault)
    try:
        check_address(about["address"])
    except BackendError as error:
        sys.exit(
            f"node {node} cannot reach the engine at {about['address']}: {error.__cause__ or error}; run the engine on "
            "a machine that all nodes reach by TCP at any port, such as one of the nodes"
        )
    share = hashlib.sha256(json.dumps([cores, gpus]).encode()).hexdigest()[:16]
    with TemporaryFolder(_PARENT_BYTES) as folder:
        _use_token(folder.path, about["token"])
        if not study:
            threading.Thread(target=_end_with_input, args=(folder.path,), daemon=True).start()
        from ray.scripts.scripts import cli

        options = {
            "address": about["address"],
            "node-ip-address": _address_towards(about["address"].rpartition(":")[0]),
            "node-name": node,
            "labels": f"shoal-launch={label},shoal-node={node},shoal-share={share}",
            "num-cpus": ThisMachine().cores() if cores is None else cores,
            "num-gpus": len(gpus),
            "object-store-memory": _STORE_BYTES,
            "include-log-monitor": "false",
            "temp-dir": folder.path / "r",
        }
        cli.main(["start", *(f"--{name}={value}" for name, value in options.items()), "--block"])


def _address_towards(host: str) -> str:
    """The address by which this machine is reached from a host; its first one if the host is unknown, or is itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # any port; nothing is sent
        except OSError:
            return own_addresses()[0]
        address = str(probe.getsockname()[0])
    return own_addresses()[0] if address.startswith("127.") else address


def _share() -> tuple[int | None, list[str], str]:
    """Return the cores and the UUIDs of the GPUs that Slurm gives this process, and a fault; hide GPUs of others."""
    cores, gpus = os.environ.get("SLURM_CPUS_ON_NODE"), os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    if gpus == "0":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    found = ThisMachine().gpus().gpus
    fault = ""
    if found and "CUDA_VISIBLE_DEVICES" not in os.environ:
        fault = (
            f"Slurm gives this job {gpus} GPUs here and does not say which, as CUDA_VISIBLE_DEVICES is not set; "
            "gres.conf must name their files"
        )
    return int(cores) if cores else None, [gpu.uuid for gpu in found], fault


def _end_with_input(folder: Path) -> None:
    """End this process and those of Ray when the engine has ended; they are the process group of the task."""
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _use_token(folder: Path, token: str) -> None:
    """Let Ray in this process and its children use a token, of a file in a folder, and no other one."""
    _write_secret(folder / "token", token)
    _set_variables(_VARIABLES | {"RAY_AUTH_TOKEN_PATH": str(folder / "token")})


def _set_variables(values: Mapping[str, str]) -> None:
    """Let Ray in this process and its children have these values of the variables of `_NAMES`, and no others."""
    config, tokens = _private_classes()
    for name in _NAMES:
        os.environ.pop(name, None)
    os.environ.update(values)
    config.initialize("")  # Ray has read the variables and a token when it was imported
    tokens.instance().reset_cache()


def _private_classes() -> tuple[Any, Any]:
    """Ray's classes of its settings and of its token, which are not public."""
    try:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
    except ImportError as error:
        raise BackendError(
            f"back end 'slurm' was made with Ray {_RAY_VERSION}, and the installed Ray {version('ray')} does not take "
            f"a token in the same way ({error}); install that version: pip install 'ray=={_RAY_VERSION}.*'"
        ) from error
    return Config, AuthenticationTokenLoader


def _in_lasting_thread(call: Callable[[], object]) -> None:
    """Call in a thread that lasts as long as this process: Ray's processes end with the thread that started them."""
    if threading.current_thread() is threading.main_thread():
        call()
        return
    done: Future[None] = Future()

    def last() -> None:
        try:
            call()
        except BaseException as error:  # the caller raises it
            done.set_exception(error)
        else:
            done.set_result(None)
            threading.Event().wait()

    threading.Thread(target=last, daemon=True).start()
    done.result()


def _write_secret(file: Path, text: str) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as output:
        output.write(text)
        output.flush()
        os.fsync(output.fileno())
