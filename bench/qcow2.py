"""Rows for qcow2: in-process (`weir bench` beside `qemu-img bench`), over NBD, and opening.

QEMU's tool creates every image, so that weir and QEMU work on the same file, and neither benefits
from a different layout.

Images are beside the raw disk file and are created once; a sample removes its output. Never writes
to the raw file.

Rows whose name ends in -ram have their images in a file system in memory: there the disk is not the
bottleneck, and the programs are compared. The other rows show the remaining difference on the
host's disk.
"""

import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import nbd

import loads
import servers
from loads import Load
from results import AtMost, Cheaper, Faster
from rows import WEIR, Row, settle, under_load

QEMU = ("qemu-img native", "qemu-img io_uring")
QEMU_NBD = ("qemu-nbd native", "qemu-nbd io_uring")
RAW = "weir raw"
MIB = 1 << 20
GIB = 1 << 30
# qemu-img bench has no random offsets: a step of 4099 blocks, a prime, visits the whole disk.
FAR_STEP = 4099 * 4096
# Requests per second that determine the number in a sample, so that it takes as long as other
# loads.
RATE = 100_000
DEPTH = 32


@dataclass(frozen=True)
class Image:
    """An image of the bench; `size_bytes` of the disk, `options` of qemu-img create, `data`: True
    if every cluster is written.
    """

    name: str
    size_bytes: int
    options: str = ""
    data: bool = True


def path_of(setup, image):
    """The image's file, created if it is missing."""
    path = setup.disk.with_name(f"{image.name}-{image.size_bytes // MIB}M.qcow2")
    if path.exists():
        return path
    unfinished = path.with_suffix(".new")
    options = ["-o", image.options] if image.options else []
    run(["qemu-img", "create", "-q", "-f", "qcow2", *options, unfinished, image.size_bytes])
    if image.data:
        # In order, so that the layout is sequential.
        count = image.size_bytes // (2 * MIB)
        run(["qemu-img", "bench", "-q", "-f", "qcow2", "-t", "none", "-w", "-s", "2M", "-d", "4", "-c", count,
             "--pattern", "165", unfinished])  # fmt: skip
    unfinished.rename(path)
    return path


def run(argv, timeout_seconds=600):
    """Runs a command to its end."""
    return loads.run(argv, timeout_seconds)


def seconds_of(text):
    """The duration that both tools print at the end."""
    return float(text.rpartition("Run completed in ")[2].split()[0])


def bench_sample(argv, count, block_bytes=4096):
    """One run of either tool; `argv` without the image's name comes first."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    elapsed = max(seconds_of(run(argv)), 1e-6)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "iops": count / elapsed,
        "bytes_per_s": count * block_bytes / elapsed,
        "requests": count,
        "cpu_us": cpu * 1e6 / count,
    }


def requests(setup):
    """Number of requests of a sample."""
    return max(256, int(setup.seconds * RATE))


def weir_bench(setup, path, form, count, *options):
    """`weir bench`, past the page cache."""
    return [setup.program, "bench", "-f", form, "-t", "none", "-d", DEPTH, "-c", count, *options, path]


def qemu_bench(path, aio, count, *options, image_options=""):
    """`qemu-img bench`, past the page cache. Options of the image's caches need its long form."""
    if image_options:
        target = (f"driver=qcow2,file.driver=file,file.filename={path},file.aio={aio},cache.direct=on,"
                  f"file.cache.direct=on,{image_options}")  # fmt: skip
        return ["qemu-img", "bench", "-t", "none", "-d", DEPTH, "-c", count, *options, "--image-opts", target]
    return [
        "qemu-img", "bench", "-f", "qcow2", "-t", "none", "-i", aio, "-d", DEPTH, "-c", count,
        *options, path,
    ]  # fmt: skip


def in_ram(setup, stack):
    """The setup with a directory in memory for the images, which is removed with the row, and the
    raw copy in it.
    """
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-bench-", dir="/dev/shm"))
    ram = replace(setup, disk=Path(directory) / setup.disk.name)
    run(["cp", "--sparse=never", setup.disk, scratch_of(ram)])
    return ram


def everywhere(kind, ram):
    """4 KiB requests on the whole disk, with an L2 cache that covers it."""
    write = ["-w"] if kind == "write" else []

    def contenders(setup, stack):
        if ram:
            setup = in_ram(setup, stack)
        image = Image("random", setup.size_bytes)
        count = requests(setup)
        step = ["-s", 4096, "-S", FAR_STEP]

        def on(argv):
            def sample():
                settle(path_of(setup, image))
                return bench_sample(argv, count)

            return sample

        path = path_of(setup, image)
        raw = raw_copy(setup)
        theirs = {name: on(qemu_bench(path, name.split()[1], count, *step, *write)) for name in QEMU}
        if not setup.program:
            return theirs
        return {
            WEIR: on(weir_bench(setup, path, "qcow2", count, *step, *write, "--l2-cache-size", "full")),
            RAW: on(weir_bench(setup, raw, "raw", count, *step, *write)),
        } | theirs

    return contenders


def scratch_of(setup):
    """Path of a writable raw file with the size of the disk."""
    return setup.disk.with_name(f"scratch-{setup.size_bytes // MIB}M.raw")


def raw_copy(setup):
    """That file, created if it is missing."""
    path = scratch_of(setup)
    if not path.exists():
        unfinished = path.with_suffix(".new")
        run(["cp", "--sparse=never", setup.disk, unfinished])
        unfinished.rename(path)
    return path


def allocating(cluster):
    """Sequential writes of one cluster each into an empty image, which is recreated for each
    sample.
    """

    def contenders(setup, _stack):
        size = setup.size_bytes
        count = size // cluster
        block = ["-w", "-s", cluster]
        path = setup.disk.with_name("allocating.qcow2")

        def on(argv):
            def sample():
                try:
                    run(
                        [
                            "qemu-img", "create", "-q", "-f", "qcow2", "-o",
                            f"cluster_size={cluster}", path, size,
                        ]  # fmt: skip
                    )
                    return bench_sample(argv, count, cluster)
                finally:
                    path.unlink(missing_ok=True)

            return sample

        theirs = {name: on(qemu_bench(path, name.split()[1], count, *block)) for name in QEMU}
        ours = {WEIR: on(weir_bench(setup, path, "qcow2", count, *block))} if setup.program else {}
        return ours | theirs

    return contenders


def covering(part):
    """4 KiB reads on the whole of 16 GiB with an L2 cache for a part of it: 1 of `part`."""

    def contenders(setup, _stack):
        # Less if the figures are not judged.
        size = 16 * GIB if setup.seconds >= 1 else 256 * MIB
        # Metadata only: all data is holes, so that the mapping is measured and not the disk.
        image = Image("mapped", size, "preallocation=metadata", data=False)
        path = path_of(setup, image)
        # One entry of 8 bytes for each cluster of 64 KiB.
        cache = max(size // part * 8 // 65536, 65536)
        count = max(256, requests(setup) // 4)
        step = ["-s", 4096, "-S", FAR_STEP]
        options = f"l2-cache-size={cache},l2-cache-entry-size=4096"
        theirs = {
            name: lambda aio=name.split()[1]: bench_sample(
                qemu_bench(path, aio, count, *step, image_options=options), count
            )
            for name in QEMU
        }
        ours = weir_bench(
            setup, path, "qcow2", count, *step, "--l2-cache-size", cache, "--l2-cache-entry-size", 4096
        )
        return ({WEIR: lambda: bench_sample(ours, count)} if setup.program else {}) | theirs

    return contenders


def over_nbd(kind, ram, free):
    """The same over NBD: fio's random requests of 4 KiB."""
    load = Load(kind, 32, free=free)

    def contenders(setup, stack):
        if ram:
            setup = in_ram(setup, stack)
        path = path_of(setup, Image("random", setup.size_bytes))

        def on(argv):
            def sample():
                settle(path)
                with servers.Server(argv) as server:
                    return under_load(server, load, setup.seconds)

            return sample

        theirs = {
            name: on(["qemu-nbd", "--persistent", "--shared=8", "--format=qcow2", "--cache=none",
                      f"--aio={name.split()[1]}", path])
            for name in QEMU_NBD
        }  # fmt: skip
        if not setup.program:
            return theirs
        raw = raw_copy(setup)
        options = ["--format", "qcow2", "--cache", "none", "--l2-cache-size", "full"]
        return {
            WEIR: on(servers.weir(setup.program, path, *options)),
            RAW: on(servers.weir_file(setup.program, raw)),
        } | theirs

    return contenders


def opening(setup, _stack):
    """Time from the start of a server of a 10 TiB image to the reply to its first read, and its
    memory then.
    """
    path = setup.disk.with_name("huge.qcow2")
    if not path.exists():
        unfinished = path.with_suffix(".new")
        run(["qemu-img", "create", "-q", "-f", "qcow2", unfinished, "10T"])
        unfinished.rename(path)

    def on(argv):
        def sample():
            start = time.monotonic()
            with servers.Server(argv) as server:
                client = nbd.NBD()
                client.connect_uri(server.uri)
                client.pread(4096, 5 << 40)
                elapsed = time.monotonic() - start
                resident = servers.resident_bytes(server.pid)
                client.shutdown()
            return {"start_s": elapsed, "resident_bytes": resident}

        return sample

    theirs = {"qemu-nbd": on(["qemu-nbd", "--persistent", "--format=qcow2", path])}
    ours = {WEIR: on(servers.weir(setup.program, path, "--format", "qcow2"))} if setup.program else {}
    return ours | theirs


def _milliseconds(value):
    return f"{value * 1000:.0f} ms"


def _mib(value):
    return f"{value / MIB:.0f} MiB"


def _random(name, requests_of, contenders, ram, targets):
    """Random 4 KiB requests, with an L2 cache that covers the disk: the images on the disk, or in
    memory.
    """
    ending, where = ("-ram", ", images in memory") if ram else ("", "")
    return Row(
        f"qcow2-{name}{ending}",
        f"4 KiB {requests_of}, L2 cache for the whole disk, cache none{where}",
        contenders,
        (Faster(WEIR, 0.95, (RAW,)), *targets),
    )


def _everywhere(kind, ram):
    requests_of = f"{kind}s everywhere, depth 32, qcow2, in-process"
    return _random(f"rand{kind}", requests_of, everywhere(kind, ram), ram, (Faster(WEIR, 1.5, QEMU),))


def _over_nbd(kind, ram, free):
    requests_of = f"{kind}, depth 32, one connection, qcow2 over NBD"
    contenders = over_nbd(kind, ram, free)
    faster = Faster(WEIR, 1.5, QEMU_NBD)
    if free:
        targets = (faster, Cheaper(WEIR, 1.0, QEMU_NBD))
        return _random(f"nbd-{kind}-free", f"{requests_of}, not pinned", contenders, ram, targets)
    return _random(f"nbd-{kind}", requests_of, contenders, ram, (faster,))


def _covering(part):
    targets = (Faster(WEIR, 1.5, QEMU),) if part == 128 else ()
    name = "the whole" if part == 1 else f"1/{part}"
    return Row(
        f"qcow2-cache-{part}",
        f"4 KiB reads everywhere, depth 32, qcow2 of 16 GiB, in-process, L2 cache for {name} of it, cache none",
        covering(part),
        targets,
    )


ROWS = (
    *(_everywhere(kind, ram) for ram in (True, False) for kind in ("read", "write")),
    *(
        Row(
            f"qcow2-allocate-{name}",
            f"sequential writes of a cluster ({name}) into an empty qcow2 image, in-process, cache none",
            allocating(cluster),
            (Faster(WEIR, 1.2, QEMU, key="bytes_per_s"),),
            columns=("bytes_per_s", "cpu_us"),
        )
        for name, cluster in (("64K", 65536), ("2M", 2 * MIB))
    ),
    *(_covering(part) for part in (128, 32, 8, 2, 1)),
    *(
        _over_nbd(kind, ram, free)
        for free in (False, True)
        for ram in (True, False)
        for kind in ("randread", "randwrite")
    ),
    Row(
        "qcow2-open",
        "from the start of a server of a qcow2 image of 10 TiB to its first reply",
        opening,
        (AtMost(0.050, "start_s", _milliseconds, WEIR), AtMost(64 * MIB, "resident_bytes", _mib, WEIR)),
        columns=("start_s", "resident_bytes"),
    ),
)
