"""Stands for nvidia-cuda-mps-control: a daemon on a UNIX socket in its pipe directory, and a server for its clients.

Installed as an executable by `mps_fakes.install`; uses nothing but the standard library. FAKE_MPS in its environment
names what it does wrong.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

WRONG = os.environ.get("FAKE_MPS", "")
PIPE = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
LOG = os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")
SOCKET = os.path.join(PIPE, "control")
PID = os.path.join(PIPE, "nvidia-cuda-mps-control.pid")

SERVER = "import os, time\nparent = os.getppid()\nwhile os.getppid() == parent: time.sleep(0.02)"


def main():
    if WRONG == "forbidden":
        print("Permission denied: MPS needs the right to ...")
        sys.exit(1)
    if sys.argv[1:] == ["-d"]:
        start()
    for line in sys.stdin:
        if WRONG == "silent":
            time.sleep(60)
        print(ask(line.strip()), end="")


def ask(line):
    with socket.socket(socket.AF_UNIX) as control:
        try:
            control.connect(SOCKET)
        except OSError:
            print("Cannot find MPS control daemon process")
            sys.exit(1)
        control.sendall(line.encode() + b"\n")
        return control.makefile().read()


def start():
    if runs(SOCKET):
        print("An instance of this daemon is already running")
        sys.exit(1)
    if os.path.exists(SOCKET):
        os.unlink(SOCKET)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)
    listener.listen()
    if os.fork():
        os._exit(0)  # its child keeps the standard output open, and writes the pid file a moment later
    os.setsid()
    if WRONG == "short-lived":
        os._exit(1)
    with open(PID, "w") as file:
        file.write(str(os.getpid()))
    with open(os.path.join(LOG, "control.log"), "a") as file:
        file.write(json.dumps(dict(os.environ)) + "\n")
    Daemon(listener).serve()


def runs(path):
    with socket.socket(socket.AF_UNIX) as control:
        return control.connect_ex(path) == 0


class Daemon:
    def __init__(self, listener):
        self.listener = listener
        self.server = None
        self.clients = set()
        self.quits = False

    def serve(self):
        while not (self.quits and not self.present()):
            if select.select([self.listener], [], [], 0.02)[0]:
                connection, _ = self.listener.accept()
                with connection:
                    words = connection.makefile().readline().split()
                    if words:
                        connection.sendall(self.answer(*words).encode())
            self.forget_dead_server()
        if self.server is not None:
            self.server.kill()
            self.server.wait()
        os.unlink(PID)
        os.unlink(SOCKET)
        os._exit(0)

    def forget_dead_server(self):
        if self.server is not None and self.server.poll() is not None:
            self.server, self.clients = None, set()

    def answer(self, command, argument=""):
        self.forget_dead_server()  # it may have died since, and a client that comes now gets another one
        known = self.server is not None and argument == str(self.server.pid)
        match command:
            case "get_server_list":
                return f"{self.server.pid}\n" if self.server is not None else ""
            case "get_client_list" if known:
                return "".join(f"{pid}\n" for pid in self.present())
            case "get_client_list":
                return f"Server {argument} not found\n"
            case "client":  # what CUDA's first call in a process does
                if self.server is None:
                    self.server = subprocess.Popen([sys.executable, "-IS", "-c", SERVER, "nvidia-cuda-mps-server"])
                self.clients.add(int(argument))
                return "connected\n"
            case "quit":
                self.quits = WRONG != "stubborn"
                return ""
        return f"Unknown command {command}\n"

    def present(self):
        """The clients that live: one whose process has gone is not one any more."""
        return sorted(pid for pid in self.clients if alive(pid))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


signal.signal(signal.SIGINT, signal.SIG_IGN)
main()
