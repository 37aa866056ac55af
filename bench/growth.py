"""Rows for costs that must grow no faster than the work: many busy disks beside few, memory of a
busy connection, and the change of one limit among thousands of groups.

One client process drives all connections of a load, with `epoll`: fio needs a process for each, and
`weir bench` has one target. The client is on the first core, and weir has one worker, so that each
has a core.

`busy-disks` has two targets, and the CPU time of the server per request is the decisive one. The
client needs about as much of it as the server, so with few disks either may be the bottleneck, and
the ratio of the IOPS then hides a part of the server's growth. `server` shows the bottleneck: it is
the server's share of one core. The client's CPU time per request shows the growth that a program
with almost no state of its own has, because of the sockets of many connections in the kernel and in
the processor's caches.

Never judges the speed of one disk or one connection, which is in `bench/rows.py`.
"""

import contextlib
import itertools
import os
import select
import time
from statistics import median

import front_end
import groups
import hostile_clients
import loads
import servers
from groups import Disk
from members import UNREACHED
from report import kib
from results import AtMost, Cheaper, Faster
from rows import WEIR, Row, cost, with_processor_time

KIB = 1 << 10
BLOCK_BYTES = 4 * KIB
# A reply of NBD without data.
REPLY_BYTES = 16
# A load without a reply for this time has failed.
PATIENCE_SECONDS = 60
# A client for each disk is more than the default maximum of clients.
DAEMON = {"workers": 1, "max-connections": 0}
FEW, MANY = 32, 1000
# Connections whose memory is measured, and requests in flight on each.
CONNECTIONS, DEPTH = 64, 16
# Groups in a large and in a small file, and the tenants among them; leaves for each disk.
LARGE, SMALL = (10_000, 100), (10, 2)
LEAVES = 10
# A tick of CPU time, 10 ms, is 5 µs for each change.
CHANGES = 2000


class Client:
    """One connection to each of `exports`. Use it in a `with` statement."""

    def __init__(self, server, exports):
        self._connections = []
        self._poll = select.epoll()
        try:
            for export in exports:
                connection = hostile_clients.negotiate(server, export.encode())
                # With a timeout, Python would wait for the socket before each call.
                connection.setblocking(False)
                self._connections.append(connection)
                self._poll.register(connection, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Disconnects all."""
        self._poll.close()
        for connection in self._connections:
            connection.close()

    def run(self, seconds, busy, depth=1, writes=False):
        """Keeps `depth` requests in flight on each of the first `busy` connections; returns when
        all are answered. 0 seconds mean a few requests.

        Does not read the replies' content. An error of a read has a reply without data; it is then
        too short, and the load fails after a time. An error of a write is not noticed.
        """
        request = hostile_clients.request(hostile_clients.WRITE if writes else hostile_clients.READ, 0, 0, BLOCK_BYTES)
        requests = [(request + bytes(BLOCK_BYTES if writes else 0)) * count for count in range(depth + 1)]
        reply_bytes = REPLY_BYTES + (0 if writes else BLOCK_BYTES)
        buffer = bytearray(reply_bytes * depth)
        calls = {client.fileno(): (client.recv_into, client.sendall) for client in self._connections[:busy]}
        partial = dict.fromkeys(calls, 0)
        in_flight, done, least = depth * busy, 0, 2 * depth * busy
        start, cpu = time.monotonic(), time.thread_time()
        for _, send in calls.values():
            send(requests[depth])
        while in_flight:
            ready = self._poll.poll(PATIENCE_SECONDS, busy)
            if not ready:
                raise loads.LoadFailed(f"{in_flight} requests: no reply within {PATIENCE_SECONDS} s")
            goes_on = done < least or time.monotonic() < start + seconds
            for number, _ in ready:
                receive, send = calls[number]
                received = receive(buffer)
                if not received:
                    raise loads.LoadFailed("the server closed a connection")
                count, partial[number] = divmod(partial[number] + received, reply_bytes)
                done += count
                if not goes_on:
                    in_flight -= count
                elif count:
                    send(requests[count])
        client_us = (time.thread_time() - cpu) * 1e6 / done
        return {"iops": done / (time.monotonic() - start), "requests": done, "client_us": client_us}


@contextlib.contextmanager
def on_first_core(setup):
    """This thread on the first core; anywhere if no figure is judged."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {0} if setup.seconds else cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def busy_disks(setup, stack):
    """Few clients of a daemon with all disks, and of another such daemon, a client for each disk.

    Two daemons, so that the few are not served beside many idle connections.
    """
    front_end.allow_descriptors()
    disks = [Disk(f"disk{number}") for number in range(setup.exports)]
    start = {"QEMU": lambda: groups.storage_daemon(UNREACHED, disks)}
    if setup.program:
        start = {WEIR: lambda: groups.weir(setup.program, UNREACHED, disks, daemon=DAEMON)} | start

    def sample(daemon, client, busy):
        with on_first_core(setup):
            figures = with_processor_time(daemon, lambda: client.run(setup.seconds / 2, busy))
        return figures | {"server": figures["cpu_us"] * figures["iops"] / 1e6}

    samples = {}
    for name, busy in itertools.product(start, (FEW, MANY)):
        exports = [disk.name for disk in disks[:busy]]
        daemon = stack.enter_context(start[name]())
        client = stack.enter_context(Client(daemon, exports))
        samples[busy_name(name, busy)] = lambda daemon=daemon, client=client, busy=len(exports): sample(
            daemon, client, busy
        )
    return samples


def busy_name(contender, busy):
    """Name of a contender."""
    return f"{contender}, {busy:,} busy"


def connection_memory(setup, _stack):
    """Most resident memory of a server with busy connections, above that with none, without the
    data in flight: negative for a server that handles a part of the requests at a time.
    """
    connections = CONNECTIONS if setup.seconds else 4
    argvs = {"QEMU": ["qemu-nbd", "--persistent", "--shared=0", "--image-opts", "driver=null-co,size=1G"]}
    if setup.program:
        argvs = {WEIR: servers.weir(setup.program, groups.NULL, "--max-connections", "0")} | argvs

    def sample(argv, writes):
        with servers.Server(argv) as server:
            # Code and buffers of the server itself are in memory after the first requests.
            with Client(server, [""]) as first:
                first.run(0, 1, 1, writes)
            before = servers.resident_bytes(server.pid)
            with Client(server, [""] * connections) as client:
                client.run(setup.seconds / 4, connections, DEPTH, writes)
            more = servers.most_resident_bytes(server.pid) - before
        return {"connection_bytes": more / connections - DEPTH * BLOCK_BYTES}

    return {
        f"{name}, {kind}": lambda argv=argv, writes=writes: sample(argv, writes)
        for name, argv in argvs.items()
        for kind, writes in (("reads", False), ("writes", True))
    }


def levels(number, tenants):
    """A config file with this number of groups on three levels: the host, tenants, leaves, and a
    disk in some leaves.
    """
    tables = [groups.table("daemon", DAEMON), groups.table("group.host", UNREACHED)]
    tables += [groups.table(f"group.tenant{at}", {"group": "host"} | UNREACHED) for at in range(tenants)]
    for leaf in range(number - tenants - 1):
        tables.append(groups.table(f"group.leaf{leaf}", {"group": f"tenant{leaf % tenants}"} | UNREACHED))
        if leaf % LEAVES == 0:
            tables.append(groups.table(f"disk.disk{leaf}", {"image": groups.NULL, "group": f"leaf{leaf}"}))
    return "\n".join(tables)


def change(setup, stack):
    """Changes of the limit of one group: of a leaf, or of the host above all others."""
    large = LARGE if setup.seconds else (100, 10)
    changes = CHANGES if setup.seconds else 20

    def monitor_of(number, tenants):
        daemon = stack.enter_context(groups.weir_from(setup.program, levels(number, tenants)))
        # The first client is greeted when all groups exist.
        loads.run(["nbdinfo", daemon.uri_of("disk0")], 300)
        return daemon, stack.enter_context(daemon.monitor())

    def sample(daemon, monitor, group):
        waits_ms, before = [], daemon.cpu_seconds()
        for number in range(changes):
            limit = {"iops-total": UNREACHED["iops-total"] - number}
            start = time.monotonic()
            monitor.run("qom-set", path=group, property="limits", value=limit)
            waits_ms.append((time.monotonic() - start) * 1000)
        change_us = (daemon.cpu_seconds() - before) * 1e6 / changes
        return {"change_ms": median(waits_ms), "most_ms": max(waits_ms), "change_us": change_us}

    running = {size: monitor_of(*size) for size in (SMALL, large)}
    cases = {IN_SMALL: (SMALL, "leaf0"), LEAF: (large, "leaf0"), HOST: (large, "host")}
    return {
        name: lambda size=size, group=group: sample(*running[size], group)
        for name, (size, group) in cases.items()
    }


LEAF, HOST = (f"{what}, {LARGE[0]:,} groups" for what in ("leaf", "host"))
IN_SMALL = f"leaf, {SMALL[0]} groups"
ALL_BUSY, FEW_BUSY = (busy_name(WEIR, busy) for busy in (MANY, FEW))

ROWS = (
    Row(
        "busy-disks",
        "4 KiB reads, depth 1, null: 1000 busy disks of one group beside 32, limit never reached",
        busy_disks,
        (Cheaper(ALL_BUSY, 1.15, (FEW_BUSY,)), Faster(ALL_BUSY, 0.9, (FEW_BUSY,))),
        columns=("iops", "cpu_us", "server", "client_us"),
        rounds_factor=0.6,
    ),
    cost(
        "busy-connection-memory",
        "4 KiB requests, depth 16, null, 64 connections: memory for each besides its data in flight",
        connection_memory,
        tuple(
            AtMost(64 * KIB, "connection_bytes", kib, f"{WEIR}, {kind}")
            for kind in ("reads", "writes")
        ),
        ("connection_bytes",),
    ),
    cost(
        "change-among-groups",
        "a limit changed over the control socket, among 10,000 groups on three levels",
        change,
        tuple(AtMost(1, "change_ms", "{:.3f} ms".format, name) for name in (LEAF, HOST)),
        ("change_ms", "most_ms", "change_us"),
        needs_weir=True,
    ),
)
