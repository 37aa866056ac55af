"""Debian's etcd on loopback, as installed by `scripts/etcd` in the target directory: one member or
several, which can be killed and restarted.

Never judges results, and leaves no files behind.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PROGRAMS = TARGET / "etcd" / "bin"
# Deadline of all waits; never part of a result.
PATIENCE_SECONDS = 120


class DeadlineExceeded(Exception):
    """An awaited condition did not become true; the text names it."""


def free_port():
    """A port that is free at this moment; etcd reports a lost race."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Etcd:
    """A cluster of etcd, three members by default; `directory` has their data. `inside` are words
    before a command that runs where `address` is: in another network namespace.
    """

    def __init__(self, directory, stack, members=3, address="127.0.0.1", inside=()):
        self._directory, self._stack, self._address, self._inside = directory, stack, address, inside
        self.clients = [free_port() for _ in range(members)]
        self._peers = [free_port() for _ in range(members)]
        self.members = [None] * members
        for at in range(members):
            self.start(at)

    def wait(self):
        """Waits until all members answer."""
        until("etcd answers", lambda: self.control("endpoint", "status").count("\n") == len(self.members))

    def urls(self):
        """URLs of the members for clients."""
        return [f"http://{self._address}:{port}" for port in self.clients]

    def start(self, at):
        """Starts a member with its previous data."""
        url = lambda port: f"http://{self._address}:{port}"  # noqa: E731
        all_of_them = ",".join(f"m{one}={url(port)}" for one, port in enumerate(self._peers))
        argv = [
            *self._inside, PROGRAMS / "etcd", "--name", f"m{at}",
            "--data-dir", self._directory / f"etcd{at}",
            "--listen-client-urls", url(self.clients[at]), "--advertise-client-urls", url(self.clients[at]),
            "--listen-peer-urls", url(self._peers[at]), "--initial-advertise-peer-urls", url(self._peers[at]),
            "--initial-cluster", all_of_them, "--initial-cluster-state", "new",
        ]  # fmt: skip
        if not (PROGRAMS / "etcd").exists():
            raise DeadlineExceeded(f"{PROGRAMS / 'etcd'}: no such file (run scripts/etcd)")
        with open(self._directory / f"etcd{at}.log", "ab") as log:
            self.members[at] = subprocess.Popen(argv, stdout=log, stderr=log)
        self._stack.callback(stop, self.members[at])

    def control(self, *words):
        """Output of etcdctl; empty if it fails."""
        argv = [*self._inside, PROGRAMS / "etcdctl", "--endpoints", ",".join(self.urls()), *words]
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env={**os.environ, "ETCDCTL_API": "3"}
        )
        return done.stdout if done.returncode == 0 else ""

    def leading(self):
        """Index of the leading member."""
        rows = self.control("endpoint", "status").splitlines()
        return next((at for at, row in enumerate(rows) if row.split(", ")[4] == "true"), 0)

    def freeze(self, at):
        """Suspends a member; its connections stay open."""
        self.members[at].send_signal(signal.SIGSTOP)

    def thaw(self, at):
        """Resumes a member."""
        self.members[at].send_signal(signal.SIGCONT)

    def kill(self, at):
        """Kills a member with SIGKILL."""
        self.members[at].kill()
        self.members[at].wait()


def stop(process):
    """Kills a process in any state."""
    process.kill()
    process.wait()


def until(what, look):
    """Polls until `look` returns a value; returns it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.005)
    raise DeadlineExceeded(f"deadline exceeded: {what}")

