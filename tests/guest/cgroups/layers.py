"""Limits of control groups on a disk that weir limits itself: the guest's disk is an NBD export with a limit for all.

Each layer keeps its own limit: a group that the guest's kernel holds to less gets that, and the export's limit bounds them together.
"""

from contextlib import contextmanager

import servers  # bench/servers.py
import streams
from commands import limit, unlimit
from guest import Disk, make_file_system
from outcome import near

TOTAL = 20_000_000
ONE = 4_000_000
SECONDS = 6


@contextmanager
def exported(weir, directory, name):
    """A disk of that name, served by weir with a limit for as long as this is held."""
    image = directory / f"{name}.raw"
    make_file_system(image, "2G")
    options = ("--format", "raw", "--cache", "unsafe", "--bps-total", TOTAL)
    with servers.Server(servers.weir(weir, image, *options)) as server:
        yield Disk(name, bps=None, uri=server.uri)


class Layers:
    """The case."""

    def __init__(self, guest, disk):
        self.guest = guest
        self.disk = disk

    def cases(self):
        """Name and function."""
        yield "two layers: a group with 4 MB/s on an export of weir's with 20", self.meet

    def meet(self):
        """One group with a limit and one without, together on the export."""
        guest, disk = self.guest, self.disk
        try:
            limit(guest, "a", disk, "--bps-write", ONE)
            rates = streams.two_streams(guest, disk, "direct", SECONDS)
        finally:
            unlimit(guest, disk, "a", "b")
        return [
            near("the group with a limit", rates.groups[0], ONE, 0.05),
            near("the other gets the rest", rates.groups[1], TOTAL - ONE, 0.05),
            near("the export's limit for both", rates.disk, TOTAL, 0.05),
        ]
