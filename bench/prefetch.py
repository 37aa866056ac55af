"""Rows for the prefetch cache: sequential readers with and without it, in-process and over NBD, and
its cost where it cannot help.

The first rows are the experiment of the talk that presented pcache (KVM Forum 2016: `qemu-img bench
-d 1|8|64 -c 262144 -s 4096 -S 4096 -t none`), the rows fio-* its table. The possible gain depends
on the device, which is measured beside them with large requests, several in flight.

Never measures through the page cache, which has its own read-ahead.
"""

import json

import loads
import rows
import servers
from loads import Load
from qcow2 import QEMU, QEMU_NBD, Image, bench_sample, path_of
from results import AtLeast, AtMost, AtMostMore, Faster
from rows import Row, settle, under_load

NONE = "none"
PREFETCH = "prefetch"
DEVICE = "device, 1 MiB at a time"
SMALL = "device, 4 KiB, depth 32"
MEMORY = "memory"
# Share of the bandwidth of the device or the socket that suffices if the expected gain would exceed
# it.
NEAR = 0.80
BLOCK = 4096
# Number of requests in the talk's runs: 1 GiB.
COUNT = 262_144
# A load that reaches the device's bandwidth.
LARGE = Load("read", 4, block_bytes=1 << 20)


def count(setup):
    """Requests of a sample: the talk's number, or few if the figures are not judged."""
    return COUNT if setup.seconds >= 1 else 1024


def device(setup):
    """Bandwidth of the disk with large requests."""
    return rows.on_direct(setup, LARGE)


def in_process(setup, path, form, *options, requests=None):
    """A sample of `weir bench`: requests of 4 KiB past the page cache."""
    requests = requests or count(setup)
    argv = [setup.program, "bench", "-f", form, "-t", "none", "-c", requests, "-s", BLOCK, *options, path]

    def sample():
        settle(path)
        return bench_sample(argv, requests)

    return sample


def with_and_without(setup, path, form, *options, requests=None):
    """The same load with and without prefetch."""
    return {
        PREFETCH: in_process(setup, path, form, *options, "--prefetch", "auto", requests=requests),
        NONE: in_process(setup, path, form, *options, requests=requests),
    }


def talk(form, depth):
    """The talk's experiment, beside QEMU's own tool."""

    def contenders(setup, _stack):
        path = setup.disk if form == "raw" else path_of(setup, Image("random", setup.size_bytes))
        options = ["-d", depth, "-S", BLOCK]

        def qemu(aio):
            argv = [
                "qemu-img", "bench", "-f", form, "-t", "none", "-i", aio, "-c", count(setup), "-s",
                BLOCK, *options, path,
            ]  # fmt: skip

            def sample():
                settle(path)
                return bench_sample(argv, count(setup))

            return sample

        theirs = {name: qemu(name.split()[1]) for name in QEMU}
        ours = with_and_without(setup, path, form, *options) if setup.program else {}
        return ours | theirs | {DEVICE: device(setup)}

    return contenders


def over_nbd(setup, stack):
    """The same at depth 1 through a socket, and the throughput of memory through it."""
    load = Load("read", 1)

    def use(server):
        return under_load(server, load, setup.seconds)

    def weir(mode):
        return rows.on_file(setup, servers.weir_file(setup.program, setup.disk, "--prefetch", mode), use)

    memory = rows.in_memory(setup, stack, servers.weir(setup.program, f"memory:{setup.size_bytes}"))
    theirs = {
        name: rows.on_file(setup, servers.qemu_nbd(setup.disk, name.split()[1]), use) for name in QEMU_NBD
    }
    return {PREFETCH: weir("auto"), NONE: weir("off"), MEMORY: lambda: use(memory)} | theirs


def fio(kind, threads, depth):
    """One row of the talk's table: fio through exports, one connection per thread, all threads from
    the beginning of the disk.
    """
    load = Load(kind, depth, connections=threads)

    def contenders(setup, stack):
        seconds = setup.seconds / 2

        def use(server):
            return under_load(server, load, seconds)

        def weir(mode):
            return rows.on_file(setup, servers.weir_file(setup.program, setup.disk, "--prefetch", mode), use)

        both = {PREFETCH: weir("auto"), NONE: weir("off")}
        if kind == "randread":
            return both
        memory = rows.in_memory(setup, stack, servers.weir(setup.program, f"memory:{setup.size_bytes}"))
        return both | {MEMORY: lambda: use(memory), DEVICE: device(setup)}

    return contenders


def readers(setup, _stack):
    """100 sequential readers, with one request in flight each."""
    options = ["-d", 1, "--readers", 100, "--json"]
    requests = count(setup)

    def sample(*more):
        argv = [
            setup.program, "bench", "-f", "raw", "-t", "none", "-c", requests, "-s", BLOCK,
            *options, *more, setup.disk,
        ]  # fmt: skip

        def run():
            settle(setup.disk)
            report = json.loads(loads.run(argv, 600))["weir"]
            return {
                "iops": report["iops"],
                "bytes_per_s": report["bytes-per-second"],
                "slowest": report["slowest-reader"],
            }

        return run

    return {
        PREFETCH: sample("--prefetch", "auto", "--prefetch-memory", "64M"),
        f"{PREFETCH}, 4 MiB": sample("--prefetch", "auto"),
        NONE: sample(),
        DEVICE: device(setup),
    }


def scan(*options):
    """One reader with one request in flight and offsets according to `options`; and the device's
    throughput with many small requests in flight.
    """

    def contenders(setup, _stack):
        both = with_and_without(setup, setup.disk, "raw", "-d", 1, *options, requests=count(setup) // 8)
        return both | {SMALL: rows.on_direct(setup, Load("randread", 32))}

    return contenders


def fooled(setup, _stack):
    """Short sequential runs at random offsets, which end when they are detected. Long enough that
    the gate is closed for most of it.
    """
    return with_and_without(setup, setup.disk, "raw", "-d", 1, "--random", "--run", 3)


def slow(setup, _stack):
    """Storage like a remote one: a latency of 5 ms, 200 MB/s."""
    imitated = ["--delay", "read=5ms", "--rate", "read=200000000"]
    path = setup.disk
    # The same number of bytes, in requests of 128 KiB.
    at_depth = [
        setup.program, "bench", "-f", "raw", "-t", "none", "-c", count(setup) // 32, "-s", "128K",
        "-d", 64,
    ]  # fmt: skip

    def deep():
        settle(path)
        return bench_sample([*at_depth, *imitated, path], count(setup) // 32, 128 << 10)

    return {
        PREFETCH: in_process(setup, path, "raw", "-d", 1, "--prefetch", "auto", *imitated),
        f"{NONE}, 128 KiB, depth 64": deep,
        f"{NONE}, depth 1": in_process(setup, path, "raw", "-d", 1, *imitated, requests=count(setup) // 1024),
    }


def cost(*options):
    """Cost of a request on memory, where storage costs nothing, in nanoseconds."""

    def contenders(setup, _stack):
        requests = 4 * count(setup)

        def sample(*more):
            argv = [
                setup.program, "bench", "-d", 1, "-c", requests, "-s", BLOCK, *options, *more,
                f"memory:{setup.size_bytes}",
            ]  # fmt: skip
            return lambda: {"ns": 1e9 / bench_sample(argv, requests)["iops"]}

        return {PREFETCH: sample("--prefetch", "on"), NONE: sample()}

    return contenders


# Gain of the cache alone according to the talk's table, in percent, by threads and requests in
# flight of each.
GAINS = {
    (1, 1): 341, (4, 1): 231, (16, 1): 80.3,
    (1, 4): 190, (4, 4): 79.0, (16, 4): 77.6,
    (1, 32): -0.8, (4, 32): 21.8, (16, 32): 46.4,
}  # fmt: skip


def _talk(form, depth, factor):
    targets = [Faster(PREFETCH, factor, (NONE,), key="bytes_per_s", cap=(NEAR, DEVICE))]
    if depth == 1:
        targets.append(Faster(PREFETCH, 10, QEMU, key="bytes_per_s", cap=(NEAR, DEVICE)))
    return Row(
        f"prefetch-{form}-{depth}",
        f"4 KiB sequential reads, depth {depth}, {form}, in-process, cache none",
        talk(form, depth),
        tuple(targets),
        columns=("bytes_per_s", "cpu_us"),
    )


def _sequential(threads, depth):
    gain = GAINS[threads, depth]
    targets = Faster(
        PREFETCH, 1 + gain / 100, (NONE,), cap=(NEAR, DEVICE, MEMORY), key="bytes_per_s"
    )
    title = f"4 KiB sequential reads over NBD, threads {threads}, depth {depth} each (the talk: {gain:+} %)"
    return Row(
        f"fio-seq-{threads}-{depth}",
        title,
        fio("read", threads, depth),
        (targets,),
        columns=("bytes_per_s", "cpu_us"),
        needs_weir=True,
    )


def _random(threads, depth):
    title = f"4 KiB random reads over NBD, threads {threads}, depth {depth} each"
    # A percent is far below the host's noise, hence more pairs.
    return Row(
        f"fio-rnd-{threads}-{depth}",
        title,
        fio("randread", threads, depth),
        (Faster(PREFETCH, 0.99, (NONE,)),),
        needs_weir=True,
        rounds_factor=3,
    )


def _scan(name, title, *options):
    targets = (Faster(PREFETCH, 4, (NONE,), cap=(NEAR, SMALL)),)
    return Row(f"prefetch-{name}", title, scan(*options), targets, needs_weir=True)


ROWS = (
    *(
        _talk(form, depth, factor)
        for form in ("raw", "qcow2")
        for depth, factor in ((1, 10), (8, 4), (64, 1.5))
    ),
    Row(
        "prefetch-nbd-1",
        "4 KiB sequential reads, depth 1, one connection, raw file, cache none",
        over_nbd,
        (
            Faster(PREFETCH, 10, (NONE,), cap=(NEAR, MEMORY)),
            Faster(PREFETCH, 10, QEMU_NBD, cap=(NEAR, MEMORY)),
        ),
        needs_weir=True,
    ),
    *(_sequential(threads, depth) for depth in (1, 4, 32) for threads in (1, 4, 16)),
    *(_random(threads, depth) for depth in (1, 4, 32) for threads in (1, 4, 16)),
    Row(
        "prefetch-readers",
        "4 KiB sequential reads, 100 readers with one request in flight each, raw file, in-process, 64 MiB of memory",
        readers,
        (
            Faster(PREFETCH, 5, (NONE,), key="bytes_per_s", cap=(NEAR, DEVICE)),
            AtLeast(PREFETCH, 1 / 3, "slowest", "{:.2f} of the mean".format),
        ),
        columns=("bytes_per_s", "slowest"),
        needs_weir=True,
    ),
    _scan("backward", "4 KiB reads from the end to the beginning, depth 1, in-process", "--backward"),
    _scan("strided", "4 KiB reads 64 KiB from each other, depth 1, in-process", "-S", "64K"),
    Row(
        "prefetch-fooled",
        "runs of three 4 KiB reads at random offsets, depth 1, in-process",
        fooled,
        (Faster(PREFETCH, 0.97, (NONE,)),),
        needs_weir=True,
    ),
    Row(
        "prefetch-slow",
        "4 KiB sequential reads, depth 1, in-process, storage with 5 ms latency and 200 MB/s",
        slow,
        (Faster(PREFETCH, 0.8, (f"{NONE}, 128 KiB, depth 64",), key="bytes_per_s"),),
        columns=("bytes_per_s",),
        needs_weir=True,
    ),
    Row(
        "prefetch-miss",
        "cost of the lookup for a 4 KiB random read from memory",
        cost("--random"),
        (AtMostMore(PREFETCH, NONE, 150, "ns"),),
        columns=("ns",),
        needs_weir=True,
    ),
    Row(
        "prefetch-hit",
        "cost of a prefetched 4 KiB sequential read, including the prefetch",
        cost(),
        (AtMost(1000, "ns", "{:.0f} ns".format, PREFETCH),),
        columns=("ns",),
        needs_weir=True,
    ),
)
