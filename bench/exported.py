"""Contenders of rows that measure one disk behind an export: weir and qemu-storage-daemon, on null
storage, on a file past the page cache, and with prefetch. vhost_user.py and fuse.py supply the
export.
"""

from collections.abc import Callable
from dataclasses import dataclass

from loads import Load
from qcow2 import Image, path_of
from rows import DIRECT, WEIR, on_direct, settle

QSD = "qsd"
# Its two ways of reading files; the better one counts.
QSDS = ("qsd native", "qsd io_uring")
PINNED = ", pinned"
PREFETCH = "prefetch"


def null_of(setup):
    """QEMU's null storage."""
    return f"driver=null-co,size={setup.size_bytes},read-zeroes=off"


def file_of(path, aio, form="raw"):
    """QEMU's options for a file past the page cache."""
    return [
        f"driver=file,node-name=f,filename={path},cache.direct=on,aio={aio}",
        f"driver={form},node-name=d,file=f,cache.direct=on",
    ]


def both_ways(name, take):
    """A contender with the client placed by the kernel, and one with the client on the first core.
    """
    return {name: lambda: take(False), f"{name}{PINNED}": lambda: take(True)}


@dataclass(frozen=True)
class Exported:
    """An export: `weir(setup, image, *options)` and `storage_daemon(nodes)` are servers of a disk,
    `put(setup, server, load, pinned)` takes one sample of a load, and `ways(load, name, take)`
    returns the contenders of a server.
    """

    weir: Callable
    storage_daemon: Callable
    put: Callable
    ways: Callable

    def running(self, setup, stack, load, servers):
        """Contenders whose servers live as long as the row."""
        contenders = {}
        for name, start in servers.items():
            server = stack.enter_context(start)
            contenders |= self.ways(
                load, name, lambda pinned, server=server: self.put(setup, server, load, pinned)
            )
        return contenders

    def null(self, load):
        """Storage without costs."""

        def contenders(setup, stack):
            servers = {QSD: self.storage_daemon([f"{null_of(setup)},node-name=d"])}
            if setup.program:
                servers = {WEIR: self.weir(setup, f"null:{setup.size_bytes}")} | servers
            return self.running(setup, stack, load, servers)

        return contenders

    def _sample(self, setup, path, load, start):
        """A sample with its own server, because an image permits one at a time."""

        def take(pinned):
            settle(path)
            with start() as server:
                return self.put(setup, server, load, pinned)

        return take

    def on_file(self, load, form):
        """A raw file or a qcow2 image, past the page cache."""

        def contenders(setup, _stack):
            path = setup.disk if form == "raw" else path_of(setup, Image("random", setup.size_bytes))
            options = ["--format", form, "--cache", "none"]
            options += ["--l2-cache-size", "full"] if form == "qcow2" else []
            starts = {WEIR: lambda: self.weir(setup, path, *options)} if setup.program else {}
            starts |= {
                name: lambda aio=name.split()[1]: self.storage_daemon(file_of(path, aio, form)) for name in QSDS
            }
            samples = {}
            for name, start in starts.items():
                samples |= self.ways(load, name, self._sample(setup, path, load, start))
            return samples | {DIRECT: on_direct(setup, load)}

        return contenders

    def prefetch(self, setup, _stack):
        """A sequential reader with one request in flight."""

        def on(start):
            take = self._sample(setup, setup.disk, Load("read", 1), start)
            return lambda: take(False)

        def ours(mode):
            options = ["--format", "raw", "--cache", "none", "--prefetch", mode]
            return lambda: self.weir(setup, setup.disk, *options)

        theirs = {
            name: on(lambda aio=name.split()[1]: self.storage_daemon(file_of(setup.disk, aio))) for name in QSDS
        }
        return ({PREFETCH: on(ours("auto")), "none": on(ours("off"))} if setup.program else {}) | theirs
