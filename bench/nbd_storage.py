"""Rows for disks on other NBD servers: the overhead of weir in front of a server, beside other
programs in front of it, and the gain of prefetch for a distant server.

The server has its disk in memory, so that a request costs only its transport. A distant server is
weir with `--delay`: 5 ms for each read, with any number in flight.

Never measures a network: all processes run on this host, over Unix sockets.
"""

import rows
import servers
from loads import Load
from results import Faster
from rows import WEIR, Row, under_load

ALONE = "the server alone"
QEMU, NBDKIT = "qemu-nbd before it", "nbdkit before it"
PREFETCH = "prefetch"
NONE = "none"
LOCAL = "the same disk here"
# Without its own prefetch, which would hide the delay.
FAR = ("--delay", "read=5ms", "--prefetch", "off")


def front(setup, stack, behind, *options):
    """weir in front of a running server."""
    argv = servers.weir(setup.program, behind.uri, "--format", "raw", *options)
    return stack.enter_context(servers.Server(argv))


def beside(argv_of, load):
    """The server, and weir and its peers in front of an equal one."""

    def contenders(setup, stack):
        alone = rows.in_memory(setup, stack, argv_of(setup))
        behind = rows.in_memory(setup, stack, argv_of(setup))
        fronts = {
            WEIR: front(setup, stack, behind, "--prefetch", "off"),
            QEMU: stack.enter_context(servers.Server(servers.qemu_nbd_before(behind.uri))),
            NBDKIT: stack.enter_context(servers.Server(servers.nbdkit_before(behind.uri))),
        }

        def sample(server):
            return lambda: under_load(server, load, setup.seconds)

        return {name: sample(server) for name, server in (fronts | {ALONE: alone}).items()}

    return contenders


def far(setup, stack):
    """A sequential reader over weir in front of a server at a distance of 5 ms, and the throughput
    of the same disk without the delay, which is the maximum of a reader with one request in flight.
    """
    argv = servers.weir(setup.program, f"memory:{setup.size_bytes}", *FAR)
    behind = rows.in_memory(setup, stack, argv)
    reader = Load("read", 1)

    def through(mode):
        before = front(setup, stack, behind, "--prefetch", mode)
        return lambda: under_load(before, reader, setup.seconds)

    here = rows.in_memory(setup, stack, servers.weir(setup.program, f"memory:{setup.size_bytes}"))
    return {
        PREFETCH: through("auto"),
        NONE: through("off"),
        LOCAL: lambda: under_load(here, reader, setup.seconds),
    }


def _beside(kind, depth, name, argv_of):
    return Row(
        f"nbd-storage-{name}-{kind}-{depth}",
        f"4 KiB {kind}, depth {depth}, weir, qemu-nbd and nbdkit in front of {name} with its disk in memory",
        beside(argv_of, Load(kind, depth)),
        (Faster(WEIR, 0.7, (ALONE,)), Faster(WEIR, 1.0, (QEMU, NBDKIT))),
        needs_weir=True,
    )


def _weir(setup):
    return servers.weir(setup.program, f"memory:{setup.size_bytes}")


def _nbdkit(setup):
    return servers.nbdkit_memory(setup.size_bytes)


ROWS = (
    *(
        _beside(kind, 32, name, argv_of)
        for kind in ("randread", "randwrite")
        for name, argv_of in (("nbdkit", _nbdkit), ("weir", _weir))
    ),
    Row(
        "nbd-storage-far",
        "4 KiB sequential reads, depth 1, weir in front of a server at a distance of 5 ms",
        far,
        (
            Faster(PREFETCH, 10, (NONE,), key="bytes_per_s"),
            Faster(PREFETCH, 0.8, (LOCAL,), key="bytes_per_s"),
        ),
        columns=("bytes_per_s", "cpu_us"),
        needs_weir=True,
    ),
)
