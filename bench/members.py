"""Rows for the cost and the coverage of a group: idle members, two workers on one lock, reads of
holes; and adding and listing thousands of groups and disks.

One group for a whole host requires that an idle member costs nothing and that threads do not wait
for its lock; and a limit must cover all reads.

Never compares a rate bounded by a limit with one bounded by the processor, except where the title
states that.
"""

import itertools

import groups
import loads
from groups import Disk
from limits import SKIP_MS, lasting, passed_per_second
from loads import Load
from results import About, AtMost, Faster
from rows import OUT_OF_REACH, WEIR, Row, cost, with_processor_time
from shares import QSD

LOAD = Load("randread", 32)
ACTIVE = Disk("active")
UNREACHED = {"iops-total": int(OUT_OF_REACH[1]), "bps-total": 10**14}
# With 8000 members it takes 45 seconds to start.
QSD_IDLE = (2, 4000)
WORKERS_RATE = 100_000
HOLES_RATE = 1000
# Unit of CPU time (sysconf(3), _SC_CLK_TCK).
TICK_SECONDS = 0.01


def samples(running, load):
    """A sample of each running daemon: the figures of the load, with CPU time per request."""

    def sample(daemon):
        return with_processor_time(daemon, lambda: load(daemon))

    return {name: lambda daemon=daemon: sample(daemon) for name, daemon in running.items()}


def idle_members(setup, stack):
    """One active member beside many idle ones, under a limit that is never reached."""
    count = setup.exports * 10
    running = {}
    if setup.program:
        idle = [Disk(f"idle{number}") for number in range(count)]
        running[f"{WEIR}, none"] = groups.weir(setup.program, UNREACHED, [ACTIVE])
        running[f"{WEIR}, 10,000"] = groups.weir(setup.program, UNREACHED, [ACTIVE, *idle])
    for members in QSD_IDLE:
        running[f"QEMU, {members:,}"] = groups.storage_daemon(UNREACHED, [ACTIVE], idle=min(members, count))
    for daemon in running.values():
        stack.enter_context(daemon)
        # The first client is greeted when all members exist; that time is not part of the figure.
        loads.run(["nbdinfo", daemon.uri_of(ACTIVE.name)], 300)

    def load(daemon):
        return loads.fio(LOAD, loads.over_nbd(daemon.uri_of(ACTIVE.name)), setup.seconds / 2)

    return samples(running, load)


def two_workers(setup, stack):
    """Two busy disks on two workers: in one group, and with a separate limit of half for each."""
    disks = [Disk("a"), Disk("b")]
    workers = {"workers": 2}
    alone = [groups.table("daemon", workers)]
    half = {"image": groups.NULL, "iops-total": WORKERS_RATE // 2}
    alone += [groups.table(f"disk.{disk.name}", half) for disk in disks]
    running = {
        "two groups": groups.weir_from(setup.program, "\n".join(alone)),
        "one group": groups.weir(setup.program, {"iops-total": WORKERS_RATE}, disks, daemon=workers),
    }
    for daemon in running.values():
        stack.enter_context(daemon)

    def load(daemon):
        return loads.in_total([(LOAD, daemon.uri_of(disk.name)) for disk in disks], setup.seconds)

    return samples(running, load)


def holes(setup, stack):
    """Reads of a file without data, with structured replies, under a limit."""
    path = setup.disk.with_name("holes.raw")
    with open(path, "wb") as file:
        file.truncate(setup.size_bytes)
    stack.callback(path.unlink)
    limits = {"iops-total": HOLES_RATE}

    def sample(start):
        with start() as daemon:
            where = loads.over_nbd(daemon.uri_of(ACTIVE.name))
            times_ms = loads.completions(LOAD, where, lasting(setup.seconds, SKIP_MS))
        return {"rate": passed_per_second(times_ms, SKIP_MS, setup.seconds * 1000)}

    daemons = {QSD: lambda: groups.storage_daemon(limits, [ACTIVE], file=f"driver=file,filename={path}")}
    if setup.program:
        raw = Disk(ACTIVE.name, {"format": "raw"})
        daemons = {WEIR: lambda: groups.weir(setup.program, limits, [raw], image=str(path))} | daemons
    return {name: lambda start=start: sample(start) for name, start in daemons.items()}


def thousands(setup, _stack):
    """Groups with a disk and an export each, added one by one at run time: CPU time of the second
    half relative to the first, and of one status for each group.
    """
    count = setup.exports * 8

    def add(monitor, numbers):
        for number in numbers:
            group, disk = f"g{number}", f"d{number}"
            monitor.run("x-weir-add-group", name=group, keys={})
            keys = {"image": "null:1M", "format": "raw", "group": group}
            monitor.run("x-weir-add-disk", name=disk, keys=keys)

    def sample():
        with groups.weir(setup.program, UNREACHED, [ACTIVE], daemon={"memory": "64G"}) as daemon:
            loads.run(["nbdinfo", daemon.uri_of(ACTIVE.name)], 300)
            with daemon.monitor() as monitor:
                seconds = [daemon.cpu_seconds()]
                for half in (range(count // 2), range(count // 2, count)):
                    add(monitor, half)
                    seconds.append(daemon.cpu_seconds())
                listed = monitor.run("x-weir-query-status")["groups"]
                assert len(listed) == count + 1, len(listed)
                seconds.append(daemon.cpu_seconds())
        first, second, status = (after - before for before, after in itertools.pairwise(seconds))
        # One clock tick is added as tolerance, because it dominates the result of a few disks.
        growth = (second + TICK_SECONDS) / (first + TICK_SECONDS)
        return {"growth": growth, "add_us": (first + second) * 1e6 / count, "status_us": status * 1e6 / count}

    return {WEIR: sample} if setup.program else {}


ROWS = (
    cost(
        "thousands-of-groups",
        "8000 groups with a disk each, added at run time: the second half relative to the first",
        thousands,
        (
            AtMost(1.5, "growth", "×{:.2f}".format, WEIR),
            AtMost(40, "status_us", "{:.0f} µs for each".format, WEIR),
        ),
        ("growth", "add_us", "status_us"),
        needs_weir=True,
    ),
    Row(
        "idle-members",
        "4 KiB randread, depth 32, null: one member of a group beside idle ones, limit never reached",
        idle_members,
        (Faster(f"{WEIR}, 10,000", 0.95, (f"{WEIR}, none",)),),
        rounds_factor=0.8,
    ),
    Row(
        "two-workers",
        "4 KiB randread, depth 32 each, null, two workers: 100,000 IOPS in one group against twice 50,000",
        two_workers,
        (Faster("one group", 0.95, ("two groups",)),),
        needs_weir=True,
        rounds_factor=0.8,
    ),
    Row(
        "holes",
        "4 KiB randread of a sparse file under 1000 IOPS",
        holes,
        (About(WEIR, HOLES_RATE, 0.01, "rate", "{:,.0f}".format),),
        columns=("rate",),
        rounds_factor=0.6,
    ),
)
