"""Rows for tail latencies (99.9 % of requests are faster): of one disk over vhost-user-blk and over
NBD, and of a quiet disk beside a busy one of the same server.

Percentiles are the client's, of `weir bench` over vhost-user-blk and of fio over NBD, and the
median of the rounds counts. Clients are placed by the kernel, as for users. The rate is printed
beside them, because a server with a lower one has fewer requests in its queues.

Never sets a target for the rate or the cost: those have other rows.
"""

from dataclasses import replace

import groups
import loads
import rows
import vhost_user
from exported import QSDS
from loads import Load
from qcow2 import raw_copy
from results import Lower
from rows import DIRECT, NBDKIT_FILE, QEMU, WEIR, Row, random_file, settle

FACTOR = 1.1
COLUMNS = ("iops", "p99_us", "p999_us", "cpu_us")
QUIET, BUSY = "quiet", "busy"
QUIET_LOAD, BUSY_LOAD = Load("randread", 1, free=True), Load("randread", 128, free=True)
# Share of the device for the busy disk under a limit; and its limit for a few requests, whose rate
# says nothing about the device.
PART, LEAST_LIMIT = 0.1, 1000

# The contenders of `vhost_user.py`, without those whose client is pinned.
FREE_EXPORT = replace(vhost_user.EXPORT, ways=lambda _load, name, take: {name: lambda: take(False)})


def weir(setup, paths, limit):
    """weir with both disks; `limit` is that of the busy one, or None."""
    tables = []
    for name, path in paths.items():
        keys = {"image": str(path), "format": "raw", "cache": "none"}
        if name == BUSY and limit:
            keys["iops-total"] = limit
        tables.append(groups.table(f"disk.{name}", keys))
    return groups.weir_from(setup.program, "\n".join(tables))


def storage_daemon(paths, limit, aio):
    """qemu-storage-daemon with both disks, in its main thread: if an NBD export has an I/O thread,
    version 7.2 fails an assertion as soon as a client disconnects.
    """

    def command(_directory, _monitor):
        argv = ["qemu-storage-daemon", "--nbd-server", "addr.type=fd,addr.str=3"]
        if limit:
            argv += ["--object", f"throttle-group,id=limit,x-iops-total={limit}"]
        for name, path in paths.items():
            node = f"driver=raw,node-name={name},cache.direct=on"
            below = f"driver=file,filename={path},cache.direct=on,aio={aio}"
            argv += ["--blockdev", f"node-name={name}-file,{below}", "--blockdev", f"{node},file={name}-file"]
            top = name
            if name == BUSY and limit:
                top = "limited"
                argv += ["--blockdev", f"driver=throttle,node-name={top},throttle-group=limit,file={name}"]
            argv += ["--export", f"type=nbd,id={name},node-name={top},name={name}"]
        return argv

    return groups.Daemon(command)


def beside(setup, target_of):
    """Latencies of the quiet load while the busy one runs; `target_of` a disk is fio's."""
    jobs = [(QUIET_LOAD, target_of(QUIET)), (BUSY_LOAD, target_of(BUSY))]
    quiet, busy = loads.each(jobs, setup.seconds)
    return quiet | {"neighbour": busy["iops"]}


def neighbour(limited):
    """Two files behind one server; and without a limit the files themselves under the same loads.
    """

    def contenders(setup, _stack):
        paths = {QUIET: setup.disk, BUSY: raw_copy(setup)}
        limit = tenth(setup) if limited else None

        def on(start):
            def sample():
                settle_all(paths)
                with start() as server:
                    return beside(setup, lambda name: loads.over_nbd(server.uri_of(name)))

            return sample

        def direct():
            settle_all(paths)
            return beside(setup, lambda name: loads.on_file(paths[name]))

        ours = {WEIR: on(lambda: weir(setup, paths, limit))} if setup.program else {}
        theirs = {name: on(lambda aio=name.split()[1]: storage_daemon(paths, limit, aio)) for name in QSDS}
        return ours | theirs | ({} if limited else {DIRECT: direct})

    return contenders


def settle_all(paths):
    """Every file independent of earlier contenders."""
    for path in paths.values():
        settle(path)


def tenth(setup):
    """A tenth of the device's rate under the busy load."""
    rate = rows.on_direct(setup, BUSY_LOAD)()["iops"] if setup.seconds else 0
    return max(round(rate * PART), LEAST_LIMIT)


def _vhost_user(depth):
    return Row(
        f"tail-vhost-user-file-{depth}",
        f"4 KiB randread, depth {depth}, vhost-user-blk, raw file, cache none: latencies",
        FREE_EXPORT.on_file(Load("randread", depth, free=True), "raw"),
        (Lower(WEIR, FACTOR, QSDS, "p999_us"),),
        columns=COLUMNS,
    )


def _nbd(depth):
    return Row(
        f"tail-nbd-file-{depth}",
        f"4 KiB randread, depth {depth}, one connection, raw file, cache none, not pinned: latencies",
        random_file(Load("randread", depth, free=True)),
        (Lower(WEIR, FACTOR, (*QEMU, *NBDKIT_FILE), "p999_us"),),
        columns=COLUMNS,
    )


def _neighbour(limited):
    how = "limited to a tenth of the device's rate" if limited else "without limits"
    return Row(
        f"tail-neighbour{'-limited' if limited else ''}",
        f"latencies of 4 KiB randread over NBD at depth 1, beside depth 128 on another disk, {how}",
        neighbour(limited),
        (Lower(WEIR, FACTOR, QSDS, "p999_us"),),
        columns=("p999_us", "p99_us", "iops", "neighbour"),
    )


ROWS = (
    *(_vhost_user(depth) for depth in (1, 32)),
    *(_nbd(depth) for depth in (1, 32)),
    *(_neighbour(limited) for limited in (False, True)),
)
