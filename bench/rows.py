"""The rows of the table that compare: contenders, loads, and weir's targets.

A row is data and a function, so that `run.py` can interleave rows without knowing what they
measure, and a question about one number (`run.py --rows NAME`) runs only what it needs.

Never prints, never computes a ratio. The factors are the project's targets, and are defined only
here.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import loads
import servers
from loads import Load
from results import Cheaper, Faster

WEIR = "weir"
DIRECT = "direct fio"
QEMU = ("qemu-nbd native", "qemu-nbd io_uring")
NBDKIT_FILE = ("nbdkit file",)
NBDKIT_MEMORY = ("nbdkit memory", "nbdkit -t 1")
NBDKIT_CACHED = ("nbdkit file", "nbdkit -t 1")
# Suffix of rows with the client placed by the kernel, as for users, and the same in titles.
FREE = {False: ("", ""), True: ("-free", ", not pinned")}
# Share of the bound for these rows, by kind of load.
FREE_OF_DIRECT = {"randread": 0.75, "randwrite": 0.8}
# Share of the bound that suffices if the peers are close to it themselves.
NEAR_DIRECT = (0.80, DIRECT)
# nbdcopy's defaults: requests of 256 KiB, 64 in flight.
NBDCOPY_LOAD = Load("read", 64, block_bytes=256 * 1024)
# Rates above any disk's: every request is charged and none waits.
OUT_OF_REACH = ("--iops-total", "1000000000", "--bps-total", "100T")
MIB = 1 << 20


@dataclass(frozen=True)
class Setup:
    """Parameters of all rows."""

    program: Path  # the weir binary, or None to measure only the peers
    generator: Path  # the weir binary whose `weir bench` is the client of any server
    disk: Path  # a raw file of `size_bytes`, every block written
    size_bytes: int  # of the file and of every memory disk
    seconds: float  # of one random load; 0 for a few requests, whose figures are not judged
    limit_seconds: float  # over which a limit's accuracy is measured; 0 as above
    exports: int  # in the row of idle ones


@dataclass(frozen=True)
class Row:
    """One row. `contenders(setup, stack)` returns `{name: function that takes one sample}`. Servers
    that outlive a sample are entered into `stack`, which ends with the row.
    """

    name: str
    title: str
    contenders: object
    targets: tuple
    columns: tuple = ("iops", "cpu_us")  # of a sample, in the order to print; the first is the row's figure
    needs_weir: bool = False
    rounds_factor: float = 1  # times the number of rounds


def cost(name, title, contenders, targets, columns, needs_weir=False):
    """A row of costs with upper limits, which vary little, so fewer rounds suffice."""
    return Row(name, title, contenders, targets, columns, needs_weir, rounds_factor=0.4)


def settle(disk):
    """Writes back and drops the file's page cache, so that a contender is independent of earlier
    ones.
    """
    fd = os.open(disk, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def with_processor_time(server, load):
    """The figures of a load, with the server's CPU time per request."""
    before = server.cpu_seconds()
    sample = load()
    sample["cpu_us"] = (server.cpu_seconds() - before) * 1e6 / sample["requests"]
    return sample


def under_load(server, load, seconds):
    """One sample of a random load on a running server."""
    return with_processor_time(server, lambda: loads.fio(load, loads.over_nbd(server.uri), seconds))


def warm(disk):
    """Writes back the file and reads all of it into the page cache."""
    with open(disk, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        while file.read(MIB):
            pass


def on_file(setup, argv, use):
    """A contender whose server lives for one sample: an image is locked by one server."""

    def sample():
        settle(setup.disk)
        with servers.Server(argv) as server:
            return use(server)

    return sample


def on_direct(setup, load):
    """The contender without a server: the disk itself under this load."""

    def sample():
        settle(setup.disk)
        return loads.fio(load, loads.on_file(setup.disk), setup.seconds)

    return sample


def in_memory(setup, stack, argv):
    """A memory server that lives as long as the row, filled: unwritten blocks are answered without
    work.
    """
    server = stack.enter_context(servers.Server(argv))
    loads.fill(server.uri, setup.disk)
    return server


def file_servers(setup, access):
    """Command lines that serve the raw file past the page cache, each with its best options."""
    weir = {WEIR: servers.weir_file(setup.program, setup.disk)} if setup.program else {}
    return weir | {
        QEMU[0]: servers.qemu_nbd(setup.disk, "native"),
        QEMU[1]: servers.qemu_nbd(setup.disk, "io_uring"),
        NBDKIT_FILE[0]: servers.nbdkit_file(setup.disk, access),
    }


def memory_servers(setup):
    """Command lines that serve memory."""
    weir = {WEIR: servers.weir(setup.program, f"memory:{setup.size_bytes}")} if setup.program else {}
    return weir | {
        NBDKIT_MEMORY[0]: servers.nbdkit_memory(setup.size_bytes),
        NBDKIT_MEMORY[1]: servers.nbdkit_memory(setup.size_bytes, "--threads=1"),
    }


def random_file(load):
    """All servers on the raw file under one load, and the disk itself."""

    def contenders(setup, _stack):
        def use(server):
            return under_load(server, load, setup.seconds)

        samples = {name: on_file(setup, argv, use) for name, argv in file_servers(setup, "random").items()}
        return samples | {DIRECT: on_direct(setup, load)}

    return contenders


def random_memory(load):
    """All memory servers under one load."""

    def contenders(setup, stack):
        running = {name: in_memory(setup, stack, argv) for name, argv in memory_servers(setup).items()}
        return {
            name: lambda server=server: under_load(server, load, setup.seconds)
            for name, server in running.items()
        }

    return contenders


def cached(load):
    """Servers on the raw file in the page cache under one load."""

    def contenders(setup, _stack):
        argvs = {
            NBDKIT_CACHED[0]: servers.nbdkit_cached(setup.disk),
            NBDKIT_CACHED[1]: servers.nbdkit_cached(setup.disk, "--threads=1"),
        }
        if setup.program:
            weir = servers.weir(setup.program, setup.disk, "--format", "raw", "--cache", "writeback")
            argvs = {WEIR: weir} | argvs

        def on(argv):
            def sample():
                warm(setup.disk)
                with servers.Server(argv) as server:
                    return under_load(server, load, setup.seconds)

            return sample

        return {name: on(argv) for name, argv in argvs.items()}

    return contenders


def copy_file(setup, _stack):
    """nbdcopy of the raw file out of every server; and the disk itself, with the same pattern of
    reads.
    """

    def use(server):
        return loads.nbdcopy_out(server.uri, setup.size_bytes)

    samples = {name: on_file(setup, argv, use) for name, argv in file_servers(setup, "sequential").items()}
    return samples | {DIRECT: on_direct(setup, NBDCOPY_LOAD)}


def copy_memory(setup, stack):
    """nbdcopy out of every memory server."""
    running = {name: in_memory(setup, stack, argv) for name, argv in memory_servers(setup).items()}
    return {
        name: lambda server=server: loads.nbdcopy_out(server.uri, setup.size_bytes)
        for name, server in running.items()
    }


def connections(depth, free=False):
    """weir on the raw file with one connection and with four, each `depth` deep; the disk itself
    with four.
    """

    def contenders(setup, _stack):
        def use(number):
            load = Load("randread", depth, connections=number, free=free)
            return lambda server: under_load(server, load, setup.seconds)

        argv = servers.weir_file(setup.program, setup.disk)
        return {
            "one": on_file(setup, argv, use(1)),
            "four": on_file(setup, argv, use(4)),
            f"{DIRECT}, four": on_direct(setup, Load("randread", depth, connections=4)),
        }

    return contenders


def with_options(load, **options):
    """weir's memory disk with two sets of options."""

    def contenders(setup, stack):
        def run(more):
            return in_memory(setup, stack, servers.weir(setup.program, f"memory:{setup.size_bytes}", *more))

        running = {name.replace("_", " "): run(more) for name, more in options.items()}
        return {
            name: lambda server=server: under_load(server, load, setup.seconds)
            for name, server in running.items()
        }

    return contenders


def _of_price(name, title, what, without, free, **options):
    """Cost of a feature that should be unnoticeable: 2 percent at most."""
    load = Load("randread", 32, free=free)
    suffix, placed = FREE[free]
    name, title = f"{name}{suffix}", f"4 KiB randread, depth 32, memory: {title}{placed}"
    targets = (Faster(what, 0.98, (without,)),)
    # Two percent is close to the host's noise, hence more pairs.
    return Row(
        name, title, with_options(load, **options), targets, needs_weir=True, rounds_factor=2
    )


def _at_depth_32(kind, free):
    if free:
        targets = (
            Faster(WEIR, 1.25, QEMU),
            Faster(WEIR, FREE_OF_DIRECT[kind], (DIRECT,)),
            Cheaper(WEIR, 1.0, QEMU),
        )
    else:
        targets = (
            Faster(WEIR, 1.5, QEMU, cap=NEAR_DIRECT),
            Faster(WEIR, 1.2, NBDKIT_FILE, cap=NEAR_DIRECT),
            Cheaper(WEIR, 0.5, QEMU),
        )
    suffix, placed = FREE[free]
    title = f"4 KiB {kind}, depth 32, one connection, raw file, cache none{placed}"
    return Row(f"file-{kind}-32{suffix}", title, random_file(Load(kind, 32, free=free)), targets)


def _in_memory_at_depth_32(free, factor, cost_factor):
    suffix, placed = FREE[free]
    return Row(
        f"memory-randread-32{suffix}",
        f"4 KiB randread, depth 32, one connection, memory{placed}",
        random_memory(Load("randread", 32, free=free)),
        (Faster(WEIR, factor, NBDKIT_MEMORY), Cheaper(WEIR, cost_factor, NBDKIT_MEMORY)),
    )


def _cached(kind, factor):
    return Row(
        f"cached-{kind}-32-free",
        f"4 KiB {kind}, depth 32, one connection, raw file in the page cache, not pinned",
        cached(Load(kind, 32, free=True)),
        (Faster(WEIR, factor, NBDKIT_CACHED),),
    )


def _at_depth_1(name, title, contenders, *peers):
    """The client is never pinned at depth 1."""
    targets = [target for those in peers for target in (Faster(WEIR, 1.3, those), Cheaper(WEIR, 0.8, those))]
    return Row(name, f"4 KiB {title}", contenders, tuple(targets))


def _file_at_depth_1(kind):
    title = f"{kind}, depth 1, one connection, raw file, cache none"
    return _at_depth_1(f"file-{kind}-1", title, random_file(Load(kind, 1)), QEMU, NBDKIT_FILE)


def _connections(depth, free):
    suffix, placed = FREE[free]
    return Row(
        f"connections-{depth}{suffix}",
        f"4 KiB randread, raw file, cache none: four connections against one, depth {depth} each{placed}",
        connections(depth, free),
        (Faster("four", 1.5, ("one",)),),
        needs_weir=True,
    )


ROWS = (
    *(_at_depth_32(kind, free) for free in (False, True) for kind in ("randread", "randwrite")),
    _file_at_depth_1("randread"),
    _file_at_depth_1("randwrite"),
    _cached("randread", 1.5),
    _cached("randwrite", 1.3),
    _in_memory_at_depth_32(False, 1.4, 0.5),
    _in_memory_at_depth_32(True, 2.0, 0.4),
    _at_depth_1(
        "memory-randread-1",
        "randread, depth 1, one connection, memory",
        random_memory(Load("randread", 1)),
        NBDKIT_MEMORY,
    ),
    Row(
        "copy-memory",
        "nbdcopy from memory to nowhere",
        copy_memory,
        (Faster(WEIR, 1.1, NBDKIT_MEMORY, key="bytes_per_s"),),
        columns=("bytes_per_s",),
    ),
    Row(
        "copy-file",
        "nbdcopy from a raw file to nowhere, cache none",
        copy_file,
        (Faster(WEIR, 1.1, (*QEMU, *NBDKIT_FILE), key="bytes_per_s"),),
        columns=("bytes_per_s",),
    ),
    _connections(32, free=False),
    _connections(32, free=True),
    _connections(1, free=False),
    *(
        _of_price(
            "unreached-limit",
            "limits set but never reached against none",
            "limit",
            "no limit",
            free,
            no_limit=(),
            limit=OUT_OF_REACH,
        )
        for free in (False, True)
    ),
    *(
        _of_price(
            "sandbox",
            "in the sandbox against without it",
            "sandbox",
            "none",
            free,
            none=("--sandbox", "off"),
            sandbox=("--sandbox", "on"),
        )
        for free in (False, True)
    ),
)
