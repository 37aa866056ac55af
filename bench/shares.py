"""Rows for the distribution of a group's limit: clients with different loads, weights, a
reservation.

Measured as shares of the limit and not as a ratio of the members, so that a group that leaves a
part of its limit unused does not pass. Rates are taken from the times of completions, as in
`limits.py`. The same decisions are tested exactly, in virtual time, beside their code.

Never sets targets for QEMU: its figures show what changes for its users.
"""

import groups
import loads
from groups import Disk
from limits import lasting, passed_per_second
from loads import Load
from results import About, AtLeast
from rows import WEIR, Row

QSD = "qemu-storage-daemon"
# By then every client is connected, and the burst (a tenth of a second's worth) is over.
SKIP_MS = 500
TOLERANCE = 0.02
NAMES = ("first", "second", "third")
KIB = 1 << 10
SIZES_RATE = 20_000_000
DEPTHS_RATE = 2000
WEIGHTS_RATE = 10_000
RESERVATION_RATE = 2000
RESERVED = 1000
HOSTILE = 10


def percent(value):
    """A share as a percentage."""
    return f"{value:.1%}"


def rates(daemon, jobs, seconds):
    """Requests per second of concurrent loads, each on the export of its name."""
    pairs = [(load, daemon.uri_of(name)) for name, load in jobs.items()]
    times_ms = loads.together(pairs, lasting(seconds, SKIP_MS))
    return [passed_per_second(times, SKIP_MS, seconds * 1000) for times in times_ms]


def both(setup, limits, disks):
    """The daemons to compare, each restarted for a sample: `{name: function that returns one}`."""
    daemons = {QSD: lambda: groups.storage_daemon(limits, disks)}
    return ({WEIR: lambda: groups.weir(setup.program, limits, disks)} if setup.program else {}) | daemons


def sharing(limit, rate, jobs, settings=None):
    """Contenders whose sample is the share of the limit of each of `jobs`."""

    def contenders(setup, _stack):
        disks = [Disk(name, (settings or {}).get(name, {})) for name in jobs]

        def sample(start):
            with start() as daemon:
                passed = rates(daemon, jobs, setup.seconds)
            units = [load.block_bytes if limit.startswith("bps") else 1 for load in jobs.values()]
            return {name: part * unit / rate for name, part, unit in zip(jobs, passed, units, strict=True)}

        return {
            name: lambda start=start: sample(start)
            for name, start in both(setup, {limit: rate}, disks).items()
        }

    return contenders


def reservation(setup, _stack):
    """One member with a reservation among many greedy ones."""
    disks = [Disk("reserved", {"iops-reservation": RESERVED})]
    disks += [Disk(f"hostile{number}", {"weight": 1000}) for number in range(HOSTILE)]
    jobs = {disk.name: Load("randread", 64) for disk in disks}

    def sample(start):
        with start() as daemon:
            reserved, *others = rates(daemon, jobs, setup.seconds)
        return {"reserved": reserved, "least": min(others)}

    limits = {"iops-total": RESERVATION_RATE}
    return {name: lambda start=start: sample(start) for name, start in both(setup, limits, disks).items()}


def levels(setup, _stack):
    """Shares of three disks under limits on every level."""
    config = "\n".join(
        [
            groups.table("group.host", {"iops-total": 2000}),
            groups.table("group.tenant", {"iops-total": 1200, "group": "host"}),
            groups.table("disk.first", {"image": groups.NULL, "group": "tenant", "iops-total": 300}),
            groups.table("disk.second", {"image": groups.NULL, "group": "tenant"}),
            groups.table("disk.third", {"image": groups.NULL, "group": "host"}),
        ]
    )
    jobs = {name: Load("randread", 32) for name in NAMES}

    def sample():
        with groups.weir_from(setup.program, config) as daemon:
            return dict(zip(NAMES, (rate / 2000 for rate in rates(daemon, jobs, setup.seconds)), strict=True))

    return {WEIR: sample}


def _fair(parts):
    return tuple(
        About(WEIR, part, TOLERANCE, name, percent) for name, part in zip(NAMES, parts, strict=False)
    )


ROWS = (
    Row(
        "share-sizes",
        "20 MB/s shared by 4 KiB (first) and 256 KiB (second) reads",
        sharing(
            "bps-total",
            SIZES_RATE,
            {"first": Load("randread", 32), "second": Load("randread", 8, block_bytes=256 * KIB)},
        ),
        _fair((1 / 2, 1 / 2)),
        columns=NAMES[:2],
        rounds_factor=0.6,
    ),
    Row(
        "share-depths",
        "2000 IOPS shared by depth 1 (first) and depth 64 (second)",
        sharing("iops-total", DEPTHS_RATE, {"first": Load("randread", 1), "second": Load("randread", 64)}),
        _fair((1 / 2, 1 / 2)),
        columns=NAMES[:2],
        rounds_factor=0.6,
    ),
    Row(
        "share-weights",
        "10,000 IOPS shared by weights 100, 200 and 700",
        sharing(
            "iops-total",
            WEIGHTS_RATE,
            {name: Load("randread", 32) for name in NAMES},
            {name: {"weight": weight} for name, weight in zip(NAMES, (100, 200, 700), strict=True)},
        ),
        _fair((0.1, 0.2, 0.7)),
        columns=NAMES,
        rounds_factor=0.6,
    ),
    Row(
        "share-reservation",
        "2000 IOPS, 1000 of them reserved for one among ten neighbours of ten times its weight",
        reservation,
        (
            AtLeast(WEIR, RESERVED * (1 - TOLERANCE), "reserved", "{:,.0f}".format),
            # The reservation must not starve the rest: they share the remaining rate.
            AtLeast(
                WEIR, (RESERVATION_RATE - RESERVED) / HOSTILE * (1 - 5 * TOLERANCE), "least", "{:,.0f}".format
            ),
        ),
        columns=("reserved", "least"),
        rounds_factor=0.6,
    ),
    Row(
        "share-levels",
        "2000 IOPS of a host: 1200 at most for a tenant, 300 of them at most for its first disk; a neighbour of the tenant",
        levels,
        # Tenant and neighbour have a thousand each; of the tenant's, the limited disk gets its own
        # limit.
        _fair((0.15, 0.35, 0.5)),
        columns=NAMES,
        needs_weir=True,
        rounds_factor=0.6,
    ),
)
