"""Rows for FUSE: a disk as a file of the host, beside qemu-storage-daemon's.

The client is fio on that file, with io_uring past the page cache: on the first core in contenders
called "pinned", else placed by the kernel (`loads.placement`). Servers are never pinned. CPU time
is the server's only.

Never leaves a mount behind.
"""

import subprocess

import loads
import servers
from exported import PREFETCH, QSD, QSDS, Exported, both_ways
from loads import Load
from results import Cheaper, Faster
from rows import WEIR, Row


class File(servers.Machine):
    """A server that exports a disk over an existing file; `command(file)` returns its command line,
    or with `monitored` that of qemu-storage-daemon without its monitor.
    """

    def __init__(self, command, monitored=False):
        def at(path, _nbd):
            self.file = path.with_name("disk.file")
            self.file.touch()
            return command(self.file)

        super().__init__(at, monitored)

    def _stop(self, quiet):
        try:
            super()._stop(quiet)
        finally:
            # A killed server leaves the mount behind.
            subprocess.run(["umount", "--lazy", self.file], stderr=subprocess.DEVNULL, check=False)


def weir(setup, image, *options):
    """weir with one disk as a file."""
    return File(lambda file: servers.weir(setup.program, image, "--fuse", file, *options))


def storage_daemon(node):
    """qemu-storage-daemon with this block device, named d."""

    def command(file):
        return [
            "qemu-storage-daemon",
            *(word for blockdev in node for word in ("--blockdev", blockdev)),
            "--export", f"type=fuse,id=e,node-name=d,mountpoint={file},writable=on",
        ]  # fmt: skip

    return File(command, monitored=True)


def put(setup, server, load, pinned):
    """One sample of a load on a running server."""
    load = Load(load.kind, load.depth, load.connections, load.block_bytes, free=not pinned)
    before = server.cpu_seconds()
    sample = loads.fio(load, loads.on_file(server.file), setup.seconds)
    sample["cpu_us"] = (server.cpu_seconds() - before) * 1e6 / sample["requests"]
    return sample


def ways(load, name, take):
    """Deep queues are measured in both ways; at depth 1 the client is never pinned
    (`loads.placement`)."""
    return both_ways(name, take) if load.depth > 1 else {name: lambda: take(False)}


EXPORT = Exported(weir, storage_daemon, put, ways)


def _asked(depth, peers):
    """Target: 1.3 times the rate at four fifths of the cost."""
    targets = []
    for where in ("", ", pinned") if depth > 1 else ("",):
        names = tuple(f"{name}{where}" for name in peers)
        targets += [Faster(f"{WEIR}{where}", 1.3, names), Cheaper(f"{WEIR}{where}", 0.8, names)]
    return tuple(targets)


def _null(kind, depth):
    title = f"4 KiB rand{kind}, depth {depth}, FUSE, null storage"
    load = Load(f"rand{kind}", depth)
    return Row(f"fuse-null-{kind}-{depth}", title, EXPORT.null(load), _asked(depth, (QSD,)))


def _file(form, kind, depth):
    name = "file" if form == "raw" else form
    title = f"4 KiB rand{kind}, depth {depth}, FUSE, {form}, cache none"
    load = Load(f"rand{kind}", depth)
    return Row(f"fuse-{name}-{kind}-{depth}", title, EXPORT.on_file(load, form), _asked(depth, QSDS))


ROWS = (
    *(_null(kind, depth) for kind in ("read", "write") for depth in (1, 32)),
    *(_file(form, kind, depth) for form in ("raw", "qcow2") for kind in ("read", "write") for depth in (1, 32)),
    Row(
        "fuse-prefetch",
        "4 KiB sequential reads, depth 1, FUSE, raw file, cache none",
        EXPORT.prefetch,
        (Faster(PREFETCH, 3, QSDS),),
    ),
)
