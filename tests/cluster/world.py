"""A Ceph cluster of the test's own, and `weir serve` on images in it.

Everything is started here and ended here, by its number. What is waited for is an event (a line of
the log, an answer, the end of a process), never a time.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CEPH = ROOT / "scripts" / "ceph"
# A machine that has other work may take long; nothing is judged by it.
PATIENCE_S = 120


class Failed(Exception):
    """A case does not hold: what was asked, and what was seen."""


def check(holds, what, seen=""):
    """One fact of a case."""
    if not holds:
        raise Failed(f"{what}\n      seen: {str(seen)[-1500:]}")


def run(*command, ok=True, env=None, text=None):
    """Runs a command to its end; its output and errors together."""
    command = [str(word) for word in command]
    done = subprocess.run(
        command, env=env, input=text, text=True, timeout=PATIENCE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    check(not ok or done.returncode == 0, f"`{' '.join(command)}` succeeds", done.stdout)
    return done.stdout if ok else (done.returncode, done.stdout)


class Cluster:
    """One monitor and one OSD. In memory it is up sooner, and loses all when its OSD dies."""

    def __init__(self, directory, auth=False, store="memstore"):
        self.directory = Path(directory)
        self.env = dict(os.environ, WEIR_CEPH_STORE=store, WEIR_CEPH_BYTES=str(2 << 30), CEPH_ARGS="")
        run(CEPH, "start", self.directory, *(["--auth"] if auth else []), env=self.env)
        self.config = self.directory / "ceph.conf"
        self.env["CEPH_CONF"] = str(self.config)

    def stop(self):
        run(CEPH, "stop", self.directory, env=self.env)

    def __call__(self, *command, ok=True, text=None):
        return run(*command, ok=ok, env=self.env, text=text)

    def image(self, name, size="32M", *options):
        """A new image; as weir is told of it."""
        self("rbd", "create", "--size", size, *options, f"rbd/{name}")
        return f"rbd:rbd/{name}"

    def osd(self):
        """The number of its process."""
        return int((self.directory / "run" / "osd.0.pid").read_text())

    def freeze(self):
        os.kill(self.osd(), signal.SIGSTOP)

    def thaw(self):
        os.kill(self.osd(), signal.SIGCONT)

    def kill(self):
        """Its OSD dies, and what it had in memory with it."""
        number = self.osd()
        descriptor = os.pidfd_open(number)
        os.kill(number, signal.SIGKILL)
        wait_for_end(descriptor)

    def start_osd(self):
        run(CEPH, "osd", self.directory, env=self.env)


def wait_for_end(descriptor):
    """Of a process that is not ours to wait for."""
    import select

    ready, _, _ = select.select([descriptor], [], [], PATIENCE_S)
    os.close(descriptor)
    check(ready, "a process that was killed ends")


class Weir:
    """A daemon, from its line `ready` to its end."""

    program = "weir"

    def __init__(self, cluster, directory, *images, options=(), sandbox="require", config=True):
        self.socket, self.qmp = Path(directory) / "nbd.sock", Path(directory) / "qmp.sock"
        command = [self.program, "serve", *images, "--nbd", f"unix:{self.socket}", "--qmp", f"unix:{self.qmp}"]
        command += ["--sandbox", sandbox, *options]
        if config:
            command += ["--rbd-config", str(cluster.config)]
        env = {key: value for key, value in cluster.env.items() if key != "CEPH_CONF"}
        self.process = subprocess.Popen(
            [str(word) for word in command], env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self.log, self.lines, self.has_ended = [], queue.Queue(), False
        threading.Thread(target=self.read, daemon=True).start()
        try:
            self.wait_for(r"INFO .* ready ")
        except Failed:
            self.process.kill()
            self.process.wait()
            raise

    def read(self):
        for line in self.process.stderr:
            self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, pattern):
        """A line of the log, perhaps one that was there already."""
        for line in self.log:
            if re.search(pattern, line):
                return line
        while True:
            line = self.lines.get(timeout=PATIENCE_S)
            if line is None:
                raise Failed(f"a line like {pattern!r}\n      seen: {''.join(self.log)[-1500:]}")
            self.log.append(line)
            if re.search(pattern, line):
                return line

    def uri(self, name=""):
        return f"nbd+unix:///{name}?socket={self.socket}"

    def end(self, status=0):
        if self.has_ended:
            return
        self.has_ended = True
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        while (line := self.lines.get(timeout=PATIENCE_S)) is not None:
            self.log.append(line)
        check(self.process.returncode == status, f"weir ends with {status}", "".join(self.log))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.end()
        elif self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def ask(self, command, **arguments):
        """The answer of one QMP command, or the error as {"error": …}."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(self.qmp))
            stream = connection.makefile("rw")
            stream.readline()
            for request in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                stream.write(json.dumps(request) + "\n")
                stream.flush()
                answer = json.loads(stream.readline())
                while "event" in answer:
                    answer = json.loads(stream.readline())
            return answer.get("return", answer)

    def disk(self, name):
        """What `weir status --json` has of a disk."""
        return next(disk for disk in self.ask("x-weir-query-status")["disks"] if disk["name"] == name)

    def io(self, *commands, name="", ok=True, options=()):
        """qemu-io on an export; its output, and where it may fail its status too."""
        words = [word for command in commands for word in ("-c", command)]
        result = run("qemu-io", "-f", "raw", *options, *words, self.uri(name), ok=False)
        status, output = result
        holds = status == 0 and "failed" not in output and "error" not in output.lower()
        check(not ok or holds, f"qemu-io {commands} succeeds", output)
        return output if ok else (status, output)


def refused(weir, cluster, *words, config=True):
    """What `weir serve` says as it refuses."""
    command = [weir, "serve", *words, "--no-control", "--nbd", "unix:/tmp/never.sock"]
    if config:
        command += ["--rbd-config", cluster.config]
    env = {key: value for key, value in cluster.env.items() if key != "CEPH_CONF"}
    status, output = run(*command, ok=False, env=env)
    check(status in (1, 2), f"`weir serve {' '.join(map(str, words))}` is refused", output)
    return output.strip().splitlines()[-1]
