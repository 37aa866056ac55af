"""Debian's etcd on loopback, as `scripts/etcd` has put it into the target directory: one member or
several, which can be killed and started again.

Never judges anything, and leaves nothing behind.
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
# How long anything is waited for. Nothing is judged by it.
PATIENCE_SECONDS = 120


class NotReached(Exception):
    """What was waited for did not come to be; the text says what."""


def free_port():
    """Free at this moment; etcd says so where another was faster."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Etcd:
    """Members that agree, three unless said otherwise; `directory` keeps what they know."""

    def __init__(self, directory, stack, members=3):
        self._directory, self._stack = directory, stack
        self.clients = [free_port() for _ in range(members)]
        self._peers = [free_port() for _ in range(members)]
        self.members = [None] * members
        for at in range(members):
            self.start(at)

    def wait(self):
        """Until all members answer."""
        until("etcd answers", lambda: self.control("endpoint", "status").count("\n") == len(self.members))

    def urls(self):
        """Where clients find them."""
        return [f"http://127.0.0.1:{port}" for port in self.clients]

    def start(self, at):
        """Starts a member, with what it had before."""
        url = lambda port: f"http://127.0.0.1:{port}"  # noqa: E731
        all_of_them = ",".join(f"m{one}={url(port)}" for one, port in enumerate(self._peers))
        argv = [
            PROGRAMS / "etcd", "--name", f"m{at}",
            "--data-dir", self._directory / f"etcd{at}",
            "--listen-client-urls", url(self.clients[at]), "--advertise-client-urls", url(self.clients[at]),
            "--listen-peer-urls", url(self._peers[at]), "--initial-advertise-peer-urls", url(self._peers[at]),
            "--initial-cluster", all_of_them, "--initial-cluster-state", "new",
        ]  # fmt: skip
        with open(self._directory / f"etcd{at}.log", "ab") as log:
            try:
                self.members[at] = subprocess.Popen(argv, stdout=log, stderr=log)
            except FileNotFoundError as error:
                raise NotReached(f"there is no {error.filename} (scripts/etcd gets it)") from error
        self._stack.callback(stop, self.members[at])

    def control(self, *words):
        """What etcdctl says; nothing where it fails."""
        argv = [PROGRAMS / "etcdctl", "--endpoints", ",".join(self.urls()), *words]
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env={**os.environ, "ETCDCTL_API": "3"}
        )
        return done.stdout if done.returncode == 0 else ""

    def leading(self):
        """Which member leads the others."""
        rows = self.control("endpoint", "status").splitlines()
        return next((at for at, row in enumerate(rows) if row.split(", ")[4] == "true"), 0)

    def freeze(self, at):
        """It is silent, and its connections stay."""
        self.members[at].send_signal(signal.SIGSTOP)

    def thaw(self, at):
        """It goes on."""
        self.members[at].send_signal(signal.SIGCONT)

    def kill(self, at):
        """At once."""
        self.members[at].kill()
        self.members[at].wait()


def stop(process):
    """Whatever it is doing."""
    process.kill()
    process.wait()


def until(what, look):
    """What there is once it is there."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.005)
    raise NotReached(f"it did not come to be: {what}")

