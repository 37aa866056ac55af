"""Rows for the cost of hostile clients: silent ones, short connections, half or less of a write, a
flood of flushes, or all descriptors in use.

Beside peers: a server for many tenants is only as robust as a single tenant permits.

Never judges a speed: memory, CPU time and counts only.
"""

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import servers
from loads import LoadFailed
from report import kib, mib
from results import AtMost
from rows import WEIR, cost

MIB = 1 << 20
QEMU, NBDKIT = "qemu-nbd", "nbdkit"
MAGIC, READ, WRITE, FLUSH = 0x25609513, 0, 1, 3
# A client without a reply for this time is considered rejected.
PATIENCE_SECONDS = 60
# weir returns memory a second after the last client has left.
SETTLE_SECONDS = 2


def receive(client, count):
    """Receives this many bytes, or fails the row."""
    data = bytearray()
    while len(data) < count:
        part = client.recv(count - len(data))
        if not part:
            raise LoadFailed("the server closed the connection")
        data += part
    return bytes(data)


def connect_silently(server, stack, count):
    """Connects silent clients. The listener's backlog is short, so each waits in its own thread
    until it is accepted.
    """

    def silent():
        with contextlib.suppress(OSError, ValueError):
            stack.enter_context(connect(server))

    connections = [threading.Thread(target=silent, daemon=True) for _ in range(count)]
    for connection in connections:
        connection.start()
    return connections


def request(kind, cookie, offset=0, length=0):
    """A request with a compact header."""
    return struct.pack(">IHHQQI", MAGIC, 0, kind, cookie, offset, length)


def connect(server):
    """A client without a handshake."""
    client = socket.socket(socket.AF_UNIX)
    # With a timeout set, connect would not wait while the backlog is full.
    client.connect(server.uri.partition("socket=")[2])
    client.settimeout(PATIENCE_SECONDS)
    return client


def negotiate(server, name=b""):
    """A client in the transmission phase of an export; "" is the default one."""
    client = connect(server)
    receive(client, 18)
    # Fixed newstyle, without the zeroes after the reply; then NBD_OPT_EXPORT_NAME.
    client.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 1, len(name)) + name)
    receive(client, 10)
    return client


def all_contenders(setup, *options, image="memory:64M"):
    """Command lines of all contenders, serving memory; qemu-nbd, which cannot, serves a file."""
    weir = {WEIR: servers.weir(setup.program, image, *options)} if setup.program else {}
    qemu = ["qemu-nbd", "--persistent", "--shared=0", "--format=raw", setup.disk]
    return weir | {QEMU: qemu, NBDKIT: servers.nbdkit_memory("64M")}


def each(argvs, use, kills_peers=False, start=servers.Server):
    """Contenders that each start a server for a sample. `kills_peers`: peers cannot end cleanly
    afterwards. `start` creates the server.
    """

    def on(name, argv):
        def sample():
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            try:
                server = start(argv, killed=kills_peers and name != WEIR)
                with server, contextlib.ExitStack() as stack:
                    return use(server, stack)
            except OSError as error:
                raise LoadFailed(f"{argv[0]}: {error}") from error
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        return sample

    return {name: on(name, argv) for name, argv in argvs.items()}


def quiet(setup, _stack):
    """Memory for each of many clients, before and after their handshake."""
    count = 1000 if setup.seconds else 20

    def use(server, stack):
        def cost(make):
            before = servers.resident_bytes(server.pid)
            clients = [stack.enter_context(make(server)) for _ in range(count)]
            # After this reply the server has processed the earlier clients as well.
            with negotiate(server):
                pass
            assert len(clients) == count
            return (servers.resident_bytes(server.pid) - before) / count

        with negotiate(server):
            pass
        return {"silent_bytes": cost(connect), "idle_bytes": cost(negotiate)}

    return each(all_contenders(setup, "--max-connections", "0"), use)


def hurried(setup, _stack):
    """Memory kept after many short connections."""

    def use(server, _stack):
        with negotiate(server):
            pass
        before = servers.resident_bytes(server.pid)
        until = time.monotonic() + setup.seconds * 2
        count = 0
        while count < 100 or time.monotonic() < until:
            connect(server).close()
            count += 1
        with negotiate(server):
            pass
        time.sleep(SETTLE_SECONDS if setup.seconds else 0)
        return {"kept_bytes": servers.resident_bytes(server.pid) - before, "came": count}

    return each(all_contenders(setup, "--max-connections", "0"), use)


def crowd(setup, _stack):
    """Time until a client is served behind three times as many silent clients as the maximum number
    of connections.
    """
    limit = 100 if setup.seconds else 5

    def use(server, stack):
        connect_silently(server, stack, 3 * limit)[limit].join()
        start = time.monotonic()
        with negotiate(server):
            pass
        return {"start_s": time.monotonic() - start}

    argvs = all_contenders(setup, "--max-connections", str(limit))
    # qemu-nbd serves no further client until a connection ends, which never happens.
    del argvs[QEMU]
    return each(argvs, use)


def halves(setup, _stack):
    """Memory of a server whose clients each send half of the largest write."""
    count = 31 if setup.seconds else 3

    def use(server, stack):
        before = servers.resident_bytes(server.pid)
        for _ in range(count):
            client = stack.enter_context(negotiate(server))
            client.settimeout(0.2)
            # A server without memory for it does not read it.
            with contextlib.suppress(TimeoutError):
                client.sendall(request(WRITE, 1, 0, 32 * MIB) + bytes(16 * MIB))
        return {"resident_bytes": servers.resident_bytes(server.pid) - before}

    return each(all_contenders(setup, "--memory", "256M"), use)


class Ended(servers.Server):
    """A server whose end is measured."""

    _ended = False

    def end_seconds(self):
        """Ends the server; returns the duration."""
        start = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(servers.STOP_SECONDS) != 0:
            raise LoadFailed(f"the server ended with an error:\n{self.log()}")
        self._ended = True
        return time.monotonic() - start

    def _stop(self, quiet):
        if not self._ended:
            super()._stop(quiet)


def stalled(setup, _stack):
    """Clients that send the header of a 1 MiB write and 100 bytes of it: their cost to a client of
    another disk, CPU time of their connections, and the time that the server takes to end.
    """
    count = 10_000 if setup.seconds else 50

    def use(server, stack):
        def rate():
            start, done = time.monotonic(), 0
            while done == 0 or time.monotonic() - start < setup.seconds:
                other.sendall(request(READ, 1, 0, 4096))
                receive(other, 16 + 4096)
                done += 1
            return done / (time.monotonic() - start)

        other = stack.enter_context(negotiate(server, b"other"))
        alone, before = rate(), server.cpu_seconds()
        clients = [stack.enter_context(negotiate(server)) for _ in range(count)]
        connected = server.cpu_seconds() - before
        for client in clients:
            with contextlib.suppress(OSError):
                client.sendall(request(WRITE, 1, 0, MIB) + bytes(100))
        lost = max(0, 1 - rate() / alone)
        return {"lost": lost, "connect_us": connected / count * 1e6, "end_s": server.end_seconds()}

    disks = ("memory:64M", "--name", "stalled", "--name", "other")
    argv = servers.weir(setup.program, "memory:64M", *disks, "--max-connections", "0", "--memory", "512M")
    return each({WEIR: argv}, use, start=Ended)


def flushes_of(device):
    """Flushes that the block device has completed (Documentation/block/stat.rst, field 16)."""
    return int(Path(f"/sys/block/{Path(device).name}/stat").read_text().split()[15])


def flood(setup, stack):
    """Flushes that reach a device from a client limited to ten operations a second, without written
    data.
    """
    path = setup.disk.with_name("flushed.raw")
    with open(path, "wb") as file:
        file.truncate(64 * MIB)
    stack.callback(path.unlink)
    attached = subprocess.run(["losetup", "--find", "--show", path], capture_output=True, text=True, check=False)
    if attached.returncode != 0:
        raise LoadFailed(f"losetup: {attached.stderr.strip()}")
    device = attached.stdout.strip()
    stack.callback(subprocess.run, ["losetup", "--detach", device], check=True)
    seconds = setup.seconds or 0.1

    def use(server, _stack):
        with negotiate(server) as client:
            client.sendall(request(WRITE, 1, 0, 512) + bytes(512) + request(FLUSH, 2))
            receive(client, 32)
            before, sent, until = flushes_of(device), 0, time.monotonic() + seconds
            while time.monotonic() < until:
                client.sendall(b"".join(request(FLUSH, cookie) for cookie in range(16)))
                receive(client, 16 * 16)
                sent += 16
            return {"flushes": (flushes_of(device) - before) / seconds, "rate": sent / seconds}

    weir = {WEIR: servers.weir(setup.program, device, "--format", "raw", "--iops-total", "10")}
    qemu = ["qemu-nbd", "--persistent", "--format=raw", device]
    return each((weir if setup.program else {}) | {QEMU: qemu, NBDKIT: ["nbdkit", "-f", "file", device]}, use)


def exhausted(setup, _stack):
    """CPU time and log lines while no descriptor is left and clients try to connect."""
    seconds = 3 if setup.seconds else 0.1
    descriptors = 200

    def use(server, stack):
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        connect_silently(server, stack, 2 * descriptors)
        time.sleep(1 if setup.seconds else 0.1)
        before, lines = server.cpu_seconds(), server.log().count("\n")
        time.sleep(seconds)
        return {
            "cpu_share": (server.cpu_seconds() - before) / seconds,
            "lines": server.log().count("\n") - lines,
        }

    # nbdkit was observed to hang at its end after it had failed to create a pipe.
    return each(all_contenders(setup, "--max-connections", "0"), use, kills_peers=True)


ROWS = (
    cost(
        "client-memory-idle",
        "memory for each of 1000 clients: silent, and idle after negotiation",
        quiet,
        (AtMost(16 << 10, "silent_bytes", kib, WEIR), AtMost(12 << 10, "idle_bytes", kib, WEIR)),
        ("silent_bytes", "idle_bytes"),
    ),
    cost(
        "client-memory-after-disconnect",
        "memory kept after many short connections",
        hurried,
        (AtMost(20 * MIB, "kept_bytes", mib, WEIR),),
        ("kept_bytes", "came"),
    ),
    cost(
        "accept-behind-silent-clients",
        "time until a client is served behind 300 silent ones",
        crowd,
        (AtMost(4, "start_s", "{:.1f} s".format, WEIR),),
        ("start_s",),
    ),
    cost(
        "memory-partial-writes",
        "memory for 31 halves of 32 MiB writes; weir may use 256 MiB",
        halves,
        (AtMost(256 * MIB, "resident_bytes", mib, WEIR),),
        ("resident_bytes",),
    ),
    cost(
        "stalled-writers",
        "10000 clients that each send 100 bytes of a 1 MiB write: loss of another disk's rate, and shutdown",
        stalled,
        (
            AtMost(0.1, "lost", "{:.0%}".format, WEIR),
            AtMost(2, "end_s", "{:.2f} s".format, WEIR),
            AtMost(500, "connect_us", "{:.0f} µs".format, WEIR),
        ),
        ("lost", "connect_us", "end_s"),
        needs_weir=True,
    ),
    cost(
        "flush-flood",
        "flushes that reach the device from a flood without written data; weir at 10 IOPS",
        flood,
        (AtMost(20, "flushes", "{:.0f}/s".format, WEIR),),
        ("flushes", "rate"),
    ),
    cost(
        "descriptors-exhausted",
        "CPU time and log lines in 3 s without descriptors",
        exhausted,
        (AtMost(0.1, "cpu_share", "{:.1%}".format, WEIR), AtMost(10, "lines", "{:.0f}".format, WEIR)),
        ("cpu_share", "lines"),
    ),
) if os.geteuid() == 0 else ()
