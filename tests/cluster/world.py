"""A Ceph cluster for the tests, and `weir serve` on images in it.

All processes are started here and ended by their PID. The tests wait for events (a log line, an
answer, the end of a process), never for a fixed time.
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
# A busy host may be slow; no test asserts a duration.
PATIENCE_S = 120


class Failed(Exception):
    """A failed check: the expected fact and the observed output."""


def check(holds, what, seen=""):
    """Raises Failed with `what` unless `holds`."""
    if not holds:
        raise Failed(f"{what}\n      seen: {str(seen)[-1500:]}")


def run(*command, ok=True, env=None, text=None):
    """Runs a command to its end; returns stdout and stderr together."""
    command = [str(word) for word in command]
    done = subprocess.run(
        command, env=env, input=text, text=True, timeout=PATIENCE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    check(not ok or done.returncode == 0, f"`{' '.join(command)}` succeeds", done.stdout)
    return done.stdout if ok else (done.returncode, done.stdout)


class Cluster:
    """A cluster with one monitor and one OSD. With memstore it starts faster, and loses its data
    with the OSD."""

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
        """Creates an image; returns the argument for weir."""
        self("rbd", "create", "--size", size, *options, f"rbd/{name}")
        return f"rbd:rbd/{name}"

    def osd(self):
        """PID of the OSD."""
        return int((self.directory / "run" / "osd.0.pid").read_text())

    def freeze(self):
        os.kill(self.osd(), signal.SIGSTOP)

    def thaw(self):
        os.kill(self.osd(), signal.SIGCONT)

    def kill(self):
        """Kills the OSD; with memstore its data is lost."""
        number = self.osd()
        descriptor = os.pidfd_open(number)
        os.kill(number, signal.SIGKILL)
        wait_for_end(descriptor)

    def start_osd(self):
        run(CEPH, "osd", self.directory, env=self.env)


def wait_for_end(descriptor):
    """Waits for the end of a process that is not a child."""
    import select

    ready, _, _ = select.select([descriptor], [], [], PATIENCE_S)
    os.close(descriptor)
    check(ready, "the killed process ends")


class Weir:
    """A daemon, from its line `ready` to its end."""

    program = "weir"
    started = []

    def __init__(
        self,
        cluster,
        directory,
        *images,
        options=(),
        sandbox="require",
        config=True,
        upgrade_option=None,
    ):
        self.successor = lambda upgrade_option, images=images, more=(): Weir(
            cluster,
            directory,
            *images,
            options=[*options, *more],
            sandbox=sandbox,
            config=config,
            upgrade_option=upgrade_option,
        )
        self.socket, self.qmp = Path(directory) / "nbd.sock", Path(directory) / "qmp.sock"
        command = [self.program, "serve", *images, "--nbd", f"unix:{self.socket}", "--qmp", f"unix:{self.qmp}"]
        command += ["--sandbox", sandbox, *options]
        if config:
            command += ["--rbd-config", str(cluster.config)]
        command += [upgrade_option] if upgrade_option else []
        env = {key: value for key, value in cluster.env.items() if key != "CEPH_CONF"}
        self.process = subprocess.Popen(
            [str(word) for word in command], env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self.started.append(self.process)
        self.log, self.lines, self.has_ended = [], queue.Queue(), False
        threading.Thread(target=self.read, daemon=True).start()
        try:
            if not upgrade_option:
                self.wait_for(r"INFO .* ready ")
        except Failed:
            self.process.kill()
            self.process.wait()
            raise

    def read(self):
        for line in self.process.stderr:
            self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, pattern, since=0):
        """Waits for a matching log line; earlier lines count from index `since` on."""
        for line in self.log[since:]:
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

    @classmethod
    def end_all(cls):
        """Kills the daemons that a case has left behind."""
        for process in cls.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        cls.started.clear()

    def kill(self):
        self.has_ended = True
        self.process.kill()
        self.process.wait()

    def ended(self):
        """Waits for the exit of the daemon; returns its status and its log."""
        self.has_ended = True
        self.process.wait(timeout=PATIENCE_S)
        while (line := self.lines.get(timeout=PATIENCE_S)) is not None:
            self.log.append(line)
        return self.process.returncode, "".join(self.log)

    def upgrade(self, **changed):
        """Upgrades; returns the new daemon and the length of the pause in ms."""
        new = self.successor("--takeover", **changed)
        new.wait_for(r"INFO .* ready ")
        status, log = self.ended()
        check(
            status == 0 and "a new process has taken over" in log,
            "the old process ends after the upgrade",
            log,
        )
        check("writes have stopped" not in log, "the old process has kept its lock", log)
        pause = re.search(r"pause_us=(\d+)", new.wait_for("taken over"))
        return new, int(pause.group(1)) / 1000

    def fails_to_upgrade(self, **changed):
        """Asserts that an upgrade fails; returns the log of the new process."""
        since = len(self.log)
        status, log = self.successor("--takeover", **changed).ended()
        check(status == 1, "the new process fails", log)
        self.wait_for(UPGRADE_FAILED, since)
        return log

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.end()
        elif self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def run_qmp(self, command, **arguments):
        """The reply to one QMP command, or an error as {"error": …}."""
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
        """The entry of a disk in `weir status --json`."""
        return next(
            disk for disk in self.run_qmp("x-weir-query-status")["disks"] if disk["name"] == name
        )

    def io(self, *commands, name="", ok=True, options=()):
        """Runs qemu-io on an export; returns its output, and with ok=False its status as well."""
        words = [word for command in commands for word in ("-c", command)]
        result = run("qemu-io", "-f", "raw", *options, *words, self.uri(name), ok=False)
        status, output = result
        holds = status == 0 and "failed" not in output and "error" not in output.lower()
        check(not ok or holds, f"qemu-io {commands} succeeds", output)
        return output if ok else (status, output)


UPGRADE_FAILED = "the upgrade failed, this process continues"


class UpgradeProxy:
    """A proxy between a new process and the daemon that it replaces. It forwards message by
    message, so that the new process can be killed at a known step. It parses only the framing; it
    relies on the order: the daemon's first message is the offer, the second the state."""

    # Maximum number of descriptors that accompany one byte.
    AT_ONCE = 250

    def __init__(self, weir, directory):
        path = Path(directory) / "between.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(PATIENCE_S)
            self.new_process = weir.successor(f"--takeover=unix:{path}")
            connection = listener.accept()[0]
        path.unlink()
        with connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(b'{"QMP": {}}\n')
            # Only up to the end of the line: the descriptors accompany the next bytes.
            while self.exactly(connection, 1) != b"\n":
                pass
            connection.sendall(b'{"return": {}}\n')
            command, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
            self.to_new = socket.socket(fileno=descriptors[0])
            self.to_daemon, passed = socket.socketpair()
            with passed, socket.socket(socket.AF_UNIX) as control:
                control.settimeout(PATIENCE_S)
                control.connect(str(weir.qmp))
                answers = control.makefile("r")
                answers.readline()
                control.sendall(b'{"execute": "qmp_capabilities"}\n')
                answers.readline()
                socket.send_fds(control, [command], [passed.fileno()])
                answer = answers.readline()
                check('"return"' in answer, "the daemon accepts the upgrade command", answer)
            connection.sendall(answer.encode())
        for side in (self.to_new, self.to_daemon):
            side.settimeout(PATIENCE_S)

    def receive(self, side):
        head = self.exactly(side, 24)
        text, more, count = (int.from_bytes(head[at : at + 8], "little") for at in (0, 8, 16))
        body, descriptors = self.exactly(side, text + more), []
        while count > 0:
            _, received, _, _ = socket.recv_fds(side, 1, self.AT_ONCE)
            descriptors.append(received)
            count -= len(received)
        return head + body, descriptors

    @staticmethod
    def exactly(side, count):
        data = b""
        while len(data) < count:
            received = side.recv(count - len(data))
            check(received, "the connection stays open")
            data += received
        return data

    @staticmethod
    def send(side, message):
        data, descriptors = message
        side.sendall(data)
        for batch in descriptors:
            socket.send_fds(side, [b"."], batch)
            for descriptor in batch:
                os.close(descriptor)

    def offered(self):
        """The new process has received the offer."""
        self.send(self.to_new, self.receive(self.to_daemon))

    def prepared(self):
        """The new process has opened all disks; its message is not delivered."""
        self.offered()
        self.pending = self.receive(self.to_new)
        while self.pending[0][24:].startswith(b'{"opens-as"'):
            self.send(self.to_daemon, self.pending)
            self.pending = self.receive(self.to_new)
        check(
            self.pending[0][24:] == b'"prepared"',
            "the new process has opened all disks",
            self.pending,
        )

    def suspended(self):
        """The daemon is suspended; its message is not delivered."""
        self.prepared()
        self.send(self.to_daemon, self.pending)
        self.pending = self.receive(self.to_daemon)

    def state(self):
        """The new process receives the state."""
        self.suspended()
        self.send(self.to_new, self.pending)

    def ready(self):
        """The new process is ready; its message is not delivered."""
        self.state()
        self.pending = self.receive(self.to_new)
        check(self.pending[0][24:] == b'"ready"', "the new process is ready", self.pending)

    def end(self):
        """Kills the new process, and closes the connection to the daemon."""
        self.new_process.kill()
        self.to_new.close()
        self.to_daemon.close()


STEPS = ["offered", "prepared", "suspended", "state", "ready"]

# A client that acquires the lock of an image and holds it until its input ends.
KEEPER = """
import ctypes, sys
rbd, cluster, pool, image = ctypes.CDLL("librbd.so.1"), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
for function, *arguments in [
    ("rados_create", ctypes.byref(cluster), b"admin"),
    ("rados_conf_read_file", lambda: cluster, sys.argv[1].encode()),
    ("rados_connect", lambda: cluster),
    ("rados_ioctx_create", lambda: cluster, b"rbd", ctypes.byref(pool)),
    ("rbd_open", lambda: pool, sys.argv[2].encode(), ctypes.byref(image), None),
    ("rbd_lock_acquire", lambda: image, 0),
]:
    assert getattr(rbd, function)(*(a() if callable(a) else a for a in arguments)) == 0, function
print("locked", flush=True)
sys.stdin.read()
assert rbd.rbd_close(image) == 0
"""


class Keeper:
    """A process that holds the lock of an image."""

    def __init__(self, cluster, image):
        self.process = subprocess.Popen(
            ["python3", "-c", KEEPER, str(cluster.config), image], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        check(self.process.stdout.readline() == "locked\n", "the third client acquires the lock")

    def end(self):
        self.process.communicate(timeout=PATIENCE_S)
        check(self.process.returncode == 0, "the third client closes the image")


def serve_error(weir, cluster, *words, config=True):
    """Messages of a `weir serve` that fails."""
    command = [weir, "serve", *words, "--qmp", "none", "--nbd", "unix:/tmp/never.sock"]
    if config:
        command += ["--rbd-config", cluster.config]
    env = {key: value for key, value in cluster.env.items() if key != "CEPH_CONF"}
    status, output = run(*command, ok=False, env=env)
    check(status in (1, 2), f"`weir serve {' '.join(map(str, words))}` fails", output)
    return output.strip().splitlines()[-1]
