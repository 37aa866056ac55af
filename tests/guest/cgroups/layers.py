"""Limits of control groups on a disk that weir limits as well: the guest's disk is an NBD export
with a limit.

Each layer enforces its own limit: a group with a lower limit in the guest's kernel gets that limit,
and the export's limit bounds all groups together. The export runs in the host's time, and so does
this guest. Rates on a busy host are therefore asserted with --full only; without it, only the upper
bounds: each limit and its burst.
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
# Work admitted before a limit takes effect: a tenth of a second's worth
# (docs/reference/throttling.md), and one request. The kernel's own throttle admits a tenth of a
# second as well (block/blk-throttle.c, throtl_slice).
AT_ONCE, REQUEST = 0.1, 1 << 20
SECONDS, FULL_SECONDS = 2, 6


@contextmanager
def exported(weir, directory, name):
    """Context manager: a disk of this name, served by weir with a limit."""
    image = directory / f"{name}.raw"
    subprocess.run(["truncate", "--size", "2G", image], check=True)
    # Complete tables: lazy initialization would cause additional I/O.
    subprocess.run(
        ["/sbin/mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", image], check=True
    )
    options = ("--format", "raw", "--cache", "unsafe", "--bps-total", TOTAL)
    with servers.Server(servers.weir(weir, image, *options)) as server:
        yield ExportedDisk(name, server.uri)


class Layers:
    """The case."""

    def __init__(self, disk, full):
        self.guest = None  # set by the runner
        self.disk = disk
        self.full = full

    def cases(self):
        """Name and function."""
        yield "two layers: a group with 4 MB/s on an export with 20", self.both_layers

    def both_layers(self):
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
                near("rate of the group with a limit", rates.groups[0], ONE, 0.05),
                near("rate of the unlimited group: the rest", rates.groups[1], TOTAL - ONE, 0.05),
                near("rate of both: the export's limit", rates.disk, TOTAL, 0.05),
            ]
        limited, unlimited = (late - early for early, late in zip(before.groups, after.groups))
        # The guest's clock applies to its kernel's limit, the host's clock to weir's.
        guest_seconds = after.seconds - before.seconds
        return checks + [
            fact(
                "bytes written by each group",
                limited > 0 and unlimited > 0,
                f"{limited} and {unlimited} bytes",
                "some by each",
            ),
            most(
                "rate of the group with a limit",
                limited,
                ONE * (guest_seconds + 2 * AT_ONCE) + REQUEST,
                unit="MB",
                scale=1e6,
            ),
            most(
                "bytes of both groups together",
                after.disk - before.disk,
                TOTAL * (seconds + AT_ONCE) + REQUEST,
                unit="MB",
                scale=1e6,
            ),
        ]
