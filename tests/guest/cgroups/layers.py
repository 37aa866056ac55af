"""Limits of control groups on a disk that weir limits itself: the guest's disk is an NBD export
with a limit for all.

Each layer keeps its own limit: a group that the guest's kernel holds to less gets that, and the
export's limit bounds them together. The export's time is the machine's, and so is this guest's. How
fast both are on a machine that does other work too is judged with --full; without, what neither may
ever pass: its limit, and what passes at once.
"""

import subprocess
import time
from contextlib import contextmanager

import servers  # bench/servers.py
import streams
from commands import limit
from guest import ExportedDisk
from outcome import contains, fact, most, near

TOTAL = 20_000_000
ONE = 4_000_000
# What passes at once before a limit binds: a tenth of a second's worth
# (docs/reference/throttling.md), and a request that is begun. The kernel's own throttle hands out a
# tenth of a second as well (block/blk-throttle.c, throtl_slice).
AT_ONCE, REQUEST = 0.1, 1 << 20
SECONDS, FULL_SECONDS = 2, 6


@contextmanager
def exported(weir, directory, name):
    """A disk of that name, served by weir with a limit for as long as this is held."""
    image = directory / f"{name}.raw"
    subprocess.run(["truncate", "--size", "2G", image], check=True)
    # Complete tables: to fill them later would be I/O that nobody asked for.
    subprocess.run(
        ["/sbin/mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", image], check=True
    )
    options = ("--format", "raw", "--cache", "unsafe", "--bps-total", TOTAL)
    with servers.Server(servers.weir(weir, image, *options)) as server:
        yield ExportedDisk(name, server.uri)


class Layers:
    """The case."""

    def __init__(self, disk, full):
        self.guest = None  # set when it runs
        self.disk = disk
        self.full = full

    def cases(self):
        """Name and function."""
        yield "two layers: a group with 4 MB/s on an export of weir's with 20", self.meet

    def meet(self):
        """One group with a limit and one without, together on the export."""
        disk = self.disk
        body = f"""
            {limit("a", disk, "--bps-write", ONE)}
            part limits
            cat $cgroups/a/io.max
            {streams.two_streams(disk, "direct", FULL_SECONDS if self.full else SECONDS)}
        """
        begin = time.monotonic()
        parts = self.guest.parts(
            f"part all\nsample {disk.name} a b\n{body}\nsample {disk.name} a b", streams.end(disk)
        )
        seconds = time.monotonic() - begin
        (before,), (after,) = streams.samples(parts["all"]), streams.samples(parts["after"])
        checks = [contains("io.max of the group", parts["limits"], f"wbps={ONE} ")]
        if self.full:
            rates = streams.Rates.of(parts["window"])
            return checks + [
                near("the group with a limit", rates.groups[0], ONE, 0.05),
                near("the other gets the rest", rates.groups[1], TOTAL - ONE, 0.05),
                near("the export's limit for both", rates.disk, TOTAL, 0.05),
            ]
        one, other = (late - early for early, late in zip(before.groups, after.groups))
        # By the guest's clock, by which its kernel goes; and by the machine's, by which weir does.
        guests = after.seconds - before.seconds
        return checks + [
            fact("both have written", one > 0 and other > 0, f"{one} and {other} bytes", "some each"),
            most("the group with a limit", one, ONE * (guests + 2 * AT_ONCE) + REQUEST, unit="MB", scale=1e6),
            most(
                "both together",
                after.disk - before.disk,
                TOTAL * (seconds + AT_ONCE) + REQUEST,
                unit="MB",
                scale=1e6,
            ),
        ]
