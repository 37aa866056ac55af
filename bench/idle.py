"""Rows for the cost of many idle disks and exports: memory, time of the start and of the end, and a
status of all.

One daemon for all disks of a host requires that an idle disk costs next to nothing.

Never puts load on them: one client reads the size of the last export, so that the daemon is known
to work.
"""

import json
import resource
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import groups
import loads
import servers
from report import kib, mib
from results import AtMost, MedianAtMost
from rows import WEIR, cost

READY_SECONDS = 120
MIB = 1 << 20
QSD = "qemu-storage-daemon"
# Unit of CPU time (sysconf(3), _SC_CLK_TCK).
TICK_SECONDS = 1 / servers.TICKS_PER_SECOND


def wait_ready(process):
    """Reads the daemon's log up to `ready`."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "ready" in line:
            return
    raise servers.ServerFailed(f"weir ended before it was ready:\n{''.join(lines[-20:])}")


class Idle:
    """weir with this config file in `directory`; entered when it is ready. Ends with the `with`
    statement, unless `end_seconds` was called.
    """

    def __init__(self, program, directory, config):
        path = Path(directory, "weir.toml")
        path.write_text(config)
        self.control = Path(directory, "control.sock")
        start = time.monotonic()
        self._process = subprocess.Popen(
            [program, "serve", "--config", path, "--qmp", f"unix:{self.control}"],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            wait_ready(self._process)
        except servers.ServerFailed:
            self._process.wait()
            raise
        self.start_s = time.monotonic() - start

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.returncode is None:
            self.end_seconds()

    def cpu_seconds(self):
        """User and system time so far."""
        return servers.cpu_seconds(self._process.pid)

    def resident_bytes(self):
        """Resident memory."""
        return servers.resident_bytes(self._process.pid)

    def end_seconds(self):
        """Ends the daemon; returns the duration, and the user and system time of its end."""
        before, start = self.cpu_seconds() + ended_cpu_seconds(), time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        # Read the log to its end: a full pipe would keep the daemon from stopping.
        self._process.communicate(timeout=servers.STOP_SECONDS)
        return time.monotonic() - start, ended_cpu_seconds() - before


def ended_cpu_seconds():
    """User and system time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def exports(setup, _stack):
    """Starts the daemon, measures the time until it is ready, and its memory."""

    def sample():
        with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
            socket = Path(directory, "nbd.sock")
            export = f'export = [{{ type = "nbd", listen = "unix:{socket}" }}]'
            disks = (f'[disk.idle{number}]\nimage = "null:1G"\n{export}\n' for number in range(setup.exports))
            with Idle(setup.program, directory, "".join(disks)) as weir:
                loads.run(["nbdinfo", f"nbd+unix:///idle{setup.exports - 1}?socket={socket}"], READY_SECONDS)
                return {"start_s": weir.start_s, "resident_bytes": weir.resident_bytes()}

    return {WEIR: sample}


def disks(setup, _stack):
    """Disks in one group, from the start over a status of all to the end; and CPU time of start and
    end, relative to that of a tenth of the disks.

    No peer: with 8000 disks in a group, qemu-storage-daemon takes 45 seconds to start.
    """
    count = setup.exports * 10

    def live(number):
        with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
            names = [groups.Disk(f"idle{at}") for at in range(number)]
            daemon = {"nbd": f"unix:{directory}/nbd.sock"}
            config = groups.config({"iops-total": 10_000}, names, "memory:64M", daemon)
            with Idle(setup.program, directory, config) as weir:
                cpu = weir.cpu_seconds()
                before = cpu + ended_cpu_seconds()
                command = [setup.program, "status", "--json", "--qmp", f"unix:{weir.control}"]
                listed = json.loads(loads.run(command, READY_SECONDS))["disks"]
                assert len(listed) == number, len(listed)
                status_s = weir.cpu_seconds() + ended_cpu_seconds() - before
                end_s, end_cpu = weir.end_seconds()
        return {"start_s": weir.start_s, "end_s": end_s, "status_s": status_s, "cpu": cpu + end_cpu}

    def sample():
        few, many = live(count // 10), live(count)
        # One clock tick is added as tolerance, because it dominates the result of a few disks.
        return many | {"tenfold": (many["cpu"] + TICK_SECONDS) / (few["cpu"] + TICK_SECONDS)}

    return {WEIR: sample}


def sparse_copies(image, directory, count):
    """Copies of an image that consists mostly of zeroes."""
    content = image.read_bytes()
    pages = [(at, content[at : at + 4096]) for at in range(0, len(content), 4096)]
    pages = [(at, page) for at, page in pages if any(page)]
    copies = [Path(directory, f"idle{number}.qcow2") for number in range(count)]
    for copy in copies:
        with open(copy, "wb") as file:
            file.truncate(len(content))
            for at, page in pages:
                file.seek(at)
                file.write(page)
    return copies


def images(setup, stack):
    """Memory of each of many idle qcow2 images, beside a single one."""
    count = setup.exports * 2
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-bench.", dir=setup.disk.parent))
    empty = Path(directory, "empty.qcow2")
    loads.run(["qemu-img", "create", "-q", "-f", "qcow2", empty, "10G"], READY_SECONDS)
    copies = sparse_copies(empty, directory, count)

    def weir(paths):
        tables = (f'[disk.{path.stem}]\nimage = "{path}"\nformat = "qcow2"\n' for path in paths)
        return groups.weir_from(setup.program, "".join(tables))

    def storage_daemon(paths):
        def command(_directory, _monitor):
            argv = ["qemu-storage-daemon", "--nbd-server", "addr.type=fd,addr.str=3"]
            for path in paths:
                name, file = path.stem, f"file.driver=file,file.filename={path}"
                argv += ["--blockdev", f"driver=qcow2,node-name={name},{file}"]
                argv += ["--export", f"type=nbd,id={name},node-name={name},name={name},writable=on"]
            return argv

        return groups.Daemon(command)

    def served(server, paths):
        start = time.monotonic()
        with server:
            loads.run(["nbdinfo", server.uri_of(paths[-1].stem)], READY_SECONDS)
            return time.monotonic() - start, servers.resident_bytes(server.pid)

    def on(make):
        def sample():
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            try:
                _, alone = served(make(copies[:1]), copies[:1])
                start_s, together = served(make(copies), copies)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            return {"disk_bytes": (together - alone) / (count - 1), "start_s": start_s}

        return sample

    return ({WEIR: on(weir)} if setup.program else {}) | {QSD: on(storage_daemon)}


def _seconds(value):
    return f"{value:.2f} s"


ROWS = (
    cost(
        "idle-exports",
        "1000 idle exports in one daemon",
        exports,
        (AtMost(64 * MIB, "resident_bytes", mib), AtMost(1.0, "start_s", _seconds)),
        ("start_s", "resident_bytes"),
        needs_weir=True,
    ),
    cost(
        "idle-disks",
        "10,000 disks in memory in one group: start, status (CPU time), end; relative to 1000",
        disks,
        (
            MedianAtMost(1.5, "start_s", _seconds),
            MedianAtMost(1.0, "end_s", _seconds),
            MedianAtMost(12, "tenfold", "× {:.1f}".format),
            MedianAtMost(1.0, "status_s", _seconds),
        ),
        ("start_s", "end_s", "tenfold", "status_s"),
        needs_weir=True,
    ),
    cost(
        "idle-qcow2",
        "2000 idle qcow2 images of 10 GiB: memory for each",
        images,
        (AtMost(64 << 10, "disk_bytes", kib, WEIR),),
        ("disk_bytes", "start_s"),
    ),
)
