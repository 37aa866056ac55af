"""Rows for vhost-user-blk: beside qemu-storage-daemon, beside NBD, and the cost of limits, queues
and idle machines.

`weir bench` is the client of all servers: no other program works without a virtual machine, and an
emulated machine would dominate the figures. Its driver is libblkio's, by QEMU's developers.

The client is on the first core in contenders called "pinned", else placed by the kernel; direct fio
is as everywhere (`loads.placement`). Servers are never pinned. CPU time is the server's only.

Never starts a virtual machine.
"""

import json
import multiprocessing
import subprocess
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import front_end
import groups
import loads
import servers
from exported import PINNED, PREFETCH, QSD, QSDS, Exported, both_ways, null_of
from loads import Load, LoadFailed
from results import About, AtLeast, AtMost, Cheaper, Faster
from rows import DIRECT, OUT_OF_REACH, WEIR, Row, settle

RATE, BYTES_RATE, KIB = 1000, 10_000_000, 1 << 10
# Excluded from a load under a limit: the burst.
SKIP_SECONDS = 1
TOLERANCE, PART_TOLERANCE = 0.005, 0.02
SHARED_RATE, RESERVED = 10_000, 3000
IDLE_SECONDS = 10
NEIGHBOURS_RATE = 5000
# Targets of reads from a raw file with the client placed by the kernel, by depth: IOPS and CPU time
# relative to qemu-storage-daemon.
FREE_READS = {1: (1.05, 1.0), 32: (1.15, 0.9)}


def percent(value):
    """A share as a percentage."""
    return f"{value:.1%}"


def argv_of(setup, load, target, seconds, *options):
    """`weir bench` with this load; 0 seconds mean a few requests."""
    if not setup.generator.exists():
        raise LoadFailed(f"{setup.generator}: no such file (build it with `make build`)")
    kinds = {"randread": ["--random"], "randwrite": ["--random", "-w"], "read": []}
    # A new sequence each time; otherwise a second sample would find the data of the first in a
    # cache.
    seed = ["--seed", time.monotonic_ns() % (1 << 32)] if load.kind != "read" else []
    long = ["--runtime", f"{seconds * 1000:.0f}ms"] if seconds else ["--count", loads.FEW]
    return [
        setup.generator, "bench", "--json", *kinds[load.kind], *seed, "-s", load.block_bytes,
        "-d", load.depth, "--jobs", load.connections, *long, *options, target,
    ]  # fmt: skip


def put(setup, server, load, pinned=False, target=None):
    """One sample of a load on a running server."""
    before = ["taskset", "--cpu-list", "0"] if pinned else []
    argv = [*before, *argv_of(setup, load, target or server.target, setup.seconds)]
    began = server.cpu_seconds()
    sample = loads.counted(loads.run(argv, setup.seconds + 300), server.argv[0])
    sample["cpu_us"] = (server.cpu_seconds() - began) * 1e6 / sample["requests"]
    return sample


def weir(setup, image, *options, queues=16, over_nbd=False):
    """weir with one disk for a virtual machine, and optionally for clients over NBD as well."""

    def command(path, nbd):
        exports = ["--vhost-user-blk", f"unix:{path},queues={queues}"]
        exports += ["--nbd", f"unix:{nbd}"] if over_nbd else []
        return servers.weir(setup.program, image, *exports, *options)

    return servers.Machine(command)


def storage_daemon(node, *objects):
    """qemu-storage-daemon with an I/O thread and this block device, named d."""

    def command(path, _nbd):
        export = f"type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={path},writable=on,num-queues=1"
        return [
            "qemu-storage-daemon", "--object", "iothread,id=io", *objects,
            *(word for blockdev in node for word in ("--blockdev", blockdev)),
            "--export", f"{export},iothread=io",
        ]  # fmt: skip

    return servers.Machine(command, monitored=True)


EXPORT = Exported(weir, storage_daemon, put, lambda _load, name, take: both_ways(name, take))


def limited(setup, stack):
    """Limits that never make a request wait."""
    group = "throttle-group,id=g,x-iops-total=1000000000,x-bps-total=100000000000000"
    below = ",".join(f"file.{word}" for word in null_of(setup).split(","))
    throttled = storage_daemon([f"driver=throttle,node-name=d,throttle-group=g,{below}"], "--object", group)
    machines = {QSD: throttled}
    if setup.program:
        machines = {WEIR: weir(setup, f"null:{setup.size_bytes}", *OUT_OF_REACH)} | machines
    return EXPORT.running(setup, stack, Load("randread", 32), machines)


def beside_nbd(setup, _stack):
    """One disk over both protocols, with one client."""
    load = Load("randread", 32)
    images = {
        "null": (f"null:{setup.size_bytes}",),
        "memory": (f"memory:{setup.size_bytes}",),
        "file": (setup.disk, "--format", "raw", "--cache", "none"),
    }

    def on(image, nbd, pinned):
        def sample():
            settle(setup.disk)
            with weir(setup, *image, over_nbd=True) as server:
                if image[0] == images["memory"][0]:
                    # Unwritten blocks are answered without work.
                    loads.fill(server.uri, setup.disk)
                return put(setup, server, load, pinned, server.uri if nbd else None)

        return sample

    return {
        f"{way} {name}{PINNED if pinned else ''}": on(image, way == "nbd", pinned)
        for name, image in images.items()
        for pinned in (False, True)
        for way in ("vhost-user", "nbd")
    }


def two_queues(setup, stack):
    """One queue and two, each with its own thread on either side."""
    image = f"null:{setup.size_bytes}"
    server = stack.enter_context(weir(setup, image, "--workers", 2, queues=2))
    return {
        name: lambda number=number: put(setup, server, Load("randread", 32, connections=number))
        for name, number in (("one", 1), ("two", 2))
    }


@contextmanager
def mixed(setup, group, members):
    """One group with these members: the first over vhost-user-blk, the others over NBD. Returns the
    targets by name.
    """
    first, *_ = members

    def command(path, nbd):
        config = [groups.table("daemon", {"nbd": f"unix:{nbd}"}), groups.table("group.all", group)]
        for name, keys in members.items():
            config.append(groups.table(f"disk.{name}", {"image": groups.NULL, "group": "all"} | keys))
            if name == first:
                config[-1] += f'export = [{{ type = "vhost-user-blk", listen = "unix:{path}" }}]\n'
        file = path.with_name("weir.toml")
        file.write_text("\n".join(config))
        return [setup.program, "serve", "--config", file]

    with servers.Machine(command) as server:
        yield {name: server.target if name == first else server.uri_of(name) for name in members}


def rates(setup, jobs, seconds):
    """Requests per second of concurrent loads, `jobs` being pairs of a load and a target: over the
    whole seconds after the first.
    """
    long = seconds and seconds + SKIP_SECONDS + 1
    clients = [
        subprocess.Popen([str(word) for word in argv_of(setup, load, target, long)], stdout=subprocess.PIPE)
        for load, target in jobs
    ]
    figures = []
    try:
        for client in clients:
            out = client.communicate(timeout=seconds + 300)[0]
            if client.returncode != 0:
                raise LoadFailed(f"weir bench: status {client.returncode}")
            figures.append(json.loads(out)["weir"])
    finally:
        for client in clients:
            client.kill()
            client.wait()
    if not seconds:
        return [figure["iops"] for figure in figures]
    each = [figure["iops-each-second"][SKIP_SECONDS : SKIP_SECONDS + round(seconds)] for figure in figures]
    return [sum(counts) / len(counts) for counts in each]


def limits(setup, _stack):
    """A machine under limits of requests and of bytes; sharing a limit by weight with clients over
    NBD; and with a reservation beside them.
    """

    def alone(load, option, limit):
        with weir(setup, f"null:{setup.size_bytes}", option, str(limit)) as server:
            return rates(setup, [(load, server.target)], setup.limit_seconds)[0]

    def together(members):
        with mixed(setup, {"iops-total": SHARED_RATE}, members) as targets:
            return rates(setup, [(Load("randread", 32), target) for target in targets.values()], setup.seconds)

    def sample():
        block = 64 * KIB
        requests = alone(Load("randread", 32), "--iops-total", RATE)
        moved = alone(Load("randread", 8, block_bytes=block), "--bps-total", BYTES_RATE) * block
        weights = together({"machine": {"weight": 200}, "first": {"weight": 100}, "second": {"weight": 700}})
        kept = together({"machine": {"iops-reservation": RESERVED, "weight": 1}, "first": {}, "second": {}})
        parts = dict(zip(("second", "first", "third"), (rate / SHARED_RATE for rate in weights), strict=True))
        return {"iops_part": requests / RATE, "bps": moved / BYTES_RATE, "reserved": kept[0]} | parts

    return {WEIR: sample}


def idle(setup, _stack):
    """Wake-ups of all threads of a daemon with many idle machines."""

    def sample():
        front_end.allow_descriptors()
        with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
            paths = [Path(directory, f"{number}.sock") for number in range(setup.exports)]

            def command(path, _nbd):
                config = (
                    f'[disk.idle{number}]\nimage = "null:1G"\n'
                    f'export = [{{ type = "vhost-user-blk", listen = "unix:{socket}" }}]\n'
                    for number, socket in enumerate(paths)
                )
                file = path.with_name("weir.toml")
                file.write_text("".join(config))
                return [setup.program, "serve", "--config", file]

            with servers.Machine(command) as server, front_end.idle(paths):
                # Threads that opened images and sockets end half a second later.
                time.sleep(1 if setup.seconds else 0)
                before = wakes(server.pid)
                time.sleep(IDLE_SECONDS if setup.seconds else 0)
                more = sum(count - before.get(thread, 0) for thread, count in wakes(server.pid).items())
                return {"wakes": more, "resident_bytes": servers.resident_bytes(server.pid)}

    return {WEIR: sample}


def neighbour(setup, _stack):
    """A machine with its own limit: alone with a daemon, and beside a machine with a ring of random
    content.
    """
    limit = groups.table("group.own", {"iops-total": NEIGHBOURS_RATE})

    def sample(besides):
        with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
            mine, other = (Path(directory, name) for name in ("mine.sock", "other.sock"))

            def command(path, _nbd):
                config = [limit]
                for name, at in {"mine": mine, "other": other}.items():
                    keys = {"image": groups.NULL} | ({"group": "own"} if name == "mine" else {})
                    config.append(groups.table(f"disk.{name}", keys))
                    config[-1] += f'export = [{{ type = "vhost-user-blk", listen = "unix:{at}" }}]\n'
                file = path.with_name("weir.toml")
                file.write_text("\n".join(config))
                return [setup.program, "serve", "--config", file]

            with servers.Machine(command), besides(other):
                load = Load("randread", 4)
                return {"rate": rates(setup, [(load, f"vhost-user:{mine}")], setup.seconds)[0]}

    return {
        "beside a hostile one": lambda: sample(attacked),
        "alone": lambda: sample(lambda _: nullcontext()),
    }


@contextmanager
def attacked(path):
    """Context manager: a process writes random content into the ring of the machine at this socket.
    """
    ended = multiprocessing.Event()
    driver = multiprocessing.Process(target=front_end.hostile, args=(path, ended))
    driver.start()
    try:
        yield
        if not driver.is_alive():
            raise LoadFailed("the hostile machine was not served")
    finally:
        ended.set()
        driver.join()


def wakes(pid):
    """Voluntary context switches so far of each thread of a process."""
    counts = {}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        # A thread may end meanwhile.
        with suppress(OSError):
            for line in status.read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches:"):
                    counts[status.parent.name] = int(line.split()[1])
    return counts


def _both_placements(targets_at):
    """weir's targets, for both placements of the client."""
    return (*targets_at(""), *targets_at(PINNED))


def _null(depth, factor, free=None):
    """`free`: factors of IOPS and CPU time with the client placed by the kernel, if they differ."""

    def targets_at(where):
        faster, cost = free if free and not where else (factor, 0.8)
        targets = [Faster(f"{WEIR}{where}", faster, (f"{QSD}{where}",))]
        if depth > 1:
            targets.append(Cheaper(f"{WEIR}{where}", cost, (f"{QSD}{where}",)))
        return targets

    title = f"4 KiB randread, depth {depth}, vhost-user-blk, null storage"
    return Row(
        f"vhost-user-null-{depth}",
        title,
        EXPORT.null(Load("randread", depth)),
        _both_placements(targets_at),
    )


def _file(form, kind, depth):
    def targets_at(where):
        peers = tuple(f"{name}{where}" for name in QSDS)
        if (form, kind) == ("raw", "read") and not where:
            factor, cost = FREE_READS[depth]
            targets = [Faster(WEIR, factor, peers), Cheaper(WEIR, cost, peers)]
        else:
            targets = [Faster(f"{WEIR}{where}", 1.1, peers)]
        if depth > 1:
            targets.append(Faster(f"{WEIR}{where}", 0.9, (DIRECT,)))
        return targets

    name = "file" if form == "raw" else form
    title = f"4 KiB rand{kind}, depth {depth}, vhost-user-blk, {form}, cache none"
    return Row(
        f"vhost-user-{name}-{kind}-{depth}",
        title,
        EXPORT.on_file(Load(f"rand{kind}", depth), form),
        _both_placements(targets_at),
    )


ROWS = (
    _null(1, 1.0),
    _null(32, 1.2, free=(2.0, 0.7)),
    _null(128, 1.2),
    Row(
        "vhost-user-limited-32",
        "4 KiB randread, depth 32, vhost-user-blk, null storage, limits set and never reached",
        limited,
        _both_placements(lambda where: (Faster(f"{WEIR}{where}", 1.5, (f"{QSD}{where}",)),)),
    ),
    *(_file(form, kind, depth) for form in ("raw", "qcow2") for kind in ("read", "write") for depth in (1, 32)),
    Row(
        "vhost-user-prefetch",
        "4 KiB sequential reads, depth 1, vhost-user-blk, raw file, cache none",
        EXPORT.prefetch,
        (Faster(PREFETCH, 5, QSDS),),
    ),
    Row(
        "vhost-user-beside-nbd",
        "4 KiB randread, depth 32, one disk over vhost-user-blk and over NBD, by `weir bench`",
        beside_nbd,
        tuple(
            Faster(f"vhost-user {name}{where}", 1.0, (f"nbd {name}{where}",))
            for name in ("null", "memory", "file")
            for where in ("", PINNED)
        ),
        needs_weir=True,
    ),
    Row(
        "vhost-user-two-queues",
        "4 KiB randread, depth 32 each, vhost-user-blk, null storage, two workers: two queues against one",
        two_queues,
        (),
        needs_weir=True,
    ),
    Row(
        "vhost-user-limits",
        "a machine's limits; 10,000 IOPS for it (weight 200) and two NBD clients (100, 700), and 3000 reserved for it",
        limits,
        (
            About(WEIR, 1, TOLERANCE, "iops_part", percent),
            About(WEIR, 1, TOLERANCE, "bps", percent),
            About(WEIR, 0.1, PART_TOLERANCE, "first", percent),
            About(WEIR, 0.2, PART_TOLERANCE, "second", percent),
            About(WEIR, 0.7, PART_TOLERANCE, "third", percent),
            AtLeast(WEIR, RESERVED * (1 - PART_TOLERANCE), "reserved", "{:,.0f}".format),
        ),
        columns=("iops_part", "bps", "first", "second", "third", "reserved"),
        needs_weir=True,
        rounds_factor=0.4,
    ),
    Row(
        "vhost-user-neighbour",
        "5000 IOPS, depth 4, vhost-user-blk, null storage: beside a machine with a ring of random content",
        neighbour,
        (Faster("beside a hostile one", 0.98, ("alone",), key="rate"),),
        columns=("rate",),
        needs_weir=True,
        rounds_factor=0.6,
    ),
    Row(
        "vhost-user-idle",
        "1000 idle exports with an idle machine each: wake-ups in ten seconds",
        idle,
        (AtMost(0, "wakes", "{:,.0f}".format),),
        columns=("wakes", "resident_bytes"),
        needs_weir=True,
        rounds_factor=0.4,
    ),
)
