"""Speed and memory of `weir simulate`, and its distance from a real daemon.

Speed: requests a second on one core, from the text of a trace to percentiles, with limits and
without. The trace is weir's own CSV, of one disk under a limit that throttles about half of its
requests, so that both paths through the simulation count. The time includes parsing, both
simulations (before and after), the histograms, and the start of the program. With two disks, which
have a limit each, a second core adds at least four fifths.

Memory: the peak with a trace, and with one that is ten times as long.

Distance: a trace is simulated, and sent to a daemon at its times. A request that was sent late may
complete as much later. tests/simulate.rs asserts that a daemon is never ahead of the simulation.

Never compares with another program: none replays a trace through these limits.
"""

import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import loads
import servers
from loads import LoadFailed
from results import AtLeast, AtMost, Faster, Lower
from rows import WEIR, Row, cost

# The project's target, on one core.
TARGET_PER_S = 5_000_000
# Factor for a second core, and for the memory of a trace that is ten times as long.
TWO_CORES, MEMORY = 1.8, 1.1
LIMIT = 1000
# In each second: a burst at twice the limit for a fifth of it, then the remaining requests up to
# the limit. A tenth of a second's worth is admitted at once, so 200 of the burst's 400 requests
# wait, and 300 of the later ones until the queue is empty.
BURST, BURST_GAP_NS = 400, 500_000
REST, REST_GAP_NS = 600, 1_333_333
SECOND_NS = 1_000_000_000
# Separate limits for reads and writes: with a shared one the order could depend on a microsecond.
REPLAY_LIMITS = (
    "--iops-read", "60", "--iops-read-max", "80", "--iops-size", "8K", "--bps-write", "500K", "--bps-write-max", "600K",
)  # fmt: skip
APART_MS = 1
STRIDE = 3 << 20
REQUESTS = 10_000_000
ONE, TWO = "one core", "two cores"
SHORT, LONG = "1,000,000 requests", "10,000,000 requests"
PATIENCE_SECONDS = 300
# Starts a program and prints its peak memory in KiB. The kernel counts the memory of the process
# that starts a program as the program's, so a small process starts it.
PEAK = """
import os, sys
pid = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print("", usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
# Much longer than a trace.
REPLAY_PATIENCE_SECONDS = 120
# The header of a request: the NBD specification, doc/proto.md.
REQUEST, REQUEST_MAGIC = ">IHHQQI", 0x25609513


def times_ns():
    """Times of one second's requests."""
    burst = [number * BURST_GAP_NS for number in range(BURST)]
    return burst + [BURST * BURST_GAP_NS + number * REST_GAP_NS for number in range(REST)]


def trace_of(setup, requests, disks=("vm1",)):
    """Path of a trace with this number of requests, or a thousandth if the figures are not judged;
    and that number. Each disk has a thousand requests of 4 KiB a second, at the same times as the
    others. The file is deterministic and kept between runs.
    """
    seconds = requests // LIMIT // len(disks) // (1 if setup.seconds >= 1 else 1000)
    path = setup.disk.parent / f"simulate-{len(disks)}x{seconds}.csv"
    if not path.exists():
        write_trace(path, seconds, disks)
    return path, seconds * LIMIT * len(disks)


def write_trace(path, seconds, disks):
    """Writes that trace."""
    unfinished = path.with_suffix(".new")
    with open(unfinished, "w", encoding="ascii") as file:
        file.write("time_ns,disk,op,offset,length\n")
        for second in range(seconds):
            at = second * SECOND_NS
            ops = ("read", "write")
            file.writelines(
                f"{at + time_ns},{disk},{ops[number % 2]},{(second * 7919 + number * 104_729) % 262_144 * 4096},4096\n"
                for number, time_ns in enumerate(times_ns())
                for disk in disks
            )
    unfinished.rename(path)


def argv_of(setup, trace, *options):
    """The simulation of a trace under one limit for each disk."""
    return [setup.program, "simulate", trace, "--iops-total", LIMIT, "--json", *options]


def on_cores(cpus, argv, requests):
    """One sample of a simulation on these processors."""
    listed = ",".join(map(str, cpus))
    elapsed, usage = loads.run_counted(["taskset", "--cpu-list", listed, *argv], PATIENCE_SECONDS)
    return {"iops": requests / elapsed, "cpu_us": (usage.ru_utime + usage.ru_stime) * 1e6 / requests}


def one_disk(setup, _stack):
    """The program alone, on one CPU."""
    trace, requests = trace_of(setup, REQUESTS)
    cpus = sorted(os.sched_getaffinity(0))[:1]
    return {WEIR: lambda: on_cores(cpus, argv_of(setup, trace, "--threads", 1), requests)}


def two_disks(setup, _stack):
    """One trace of two disks, on one CPU and on two."""
    trace, requests = trace_of(setup, REQUESTS, ("vm1", "vm2"))
    cpus = sorted(os.sched_getaffinity(0))
    argv = argv_of(setup, trace)
    return {
        name: lambda number=number: on_cores(cpus[:number], argv, requests)
        for name, number in ((TWO, 2), (ONE, 1))
    }


def memory(setup, _stack):
    """Peak memory of the program with a tenth of the trace, and with all of it."""

    def on(requests):
        trace, _ = trace_of(setup, requests)
        argv = [sys.executable, "-I", "-S", "-c", PEAK, *argv_of(setup, trace)]
        return lambda: {"resident_bytes": int(loads.run(argv, PATIENCE_SECONDS).split()[-1]) * 1024}

    return {LONG: on(REQUESTS), SHORT: on(REQUESTS // 10)}


def requests(count):
    """A trace with gaps between all requests, so that none are merged."""
    draw = random.Random(42)
    at_ns, trace = 0, []
    for number in range(count):
        op = draw.choice(("read", "write"))
        trace.append((at_ns, op, number * STRIDE, draw.choice((4096, 8192, 16_384, 32_768))))
        at_ns += draw.randrange(13_000_000)
    return trace


def simulated(setup, trace):
    """Completion times of a trace in the simulation, in nanoseconds."""
    with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
        path, events = Path(directory, "trace.csv"), Path(directory, "events.csv")
        lines = (f"{at_ns},null,{op},{offset},{length}\n" for at_ns, op, offset, length in trace)
        path.write_text("time_ns,disk,op,offset,length\n" + "".join(lines))
        argv = [setup.program, "simulate", path, "--size", "1G", "--events", events, *REPLAY_LIMITS]
        done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LoadFailed(done.stderr.strip())
        rows = [line.split(",") for line in events.read_text().splitlines()[1:]]
        return {int(row[3]) // STRIDE: int(row[6]) for row in rows}


def receive(stream, count):
    """Receives this many bytes."""
    data = bytearray()
    while len(data) < count:
        if not (more := stream.recv(count - len(data))):
            raise LoadFailed("the daemon closed the connection")
        data += more
    return bytes(data)


def connected(path):
    """A connection to the only export, on which a flush was answered; no limit charges it."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(REPLAY_PATIENCE_SECONDS)
    stream.connect(path)
    receive(stream, 18)
    # Fixed newstyle without zeroes, then NBD_OPT_EXPORT_NAME with the default name.
    stream.sendall(struct.pack(">I8sII", 3, b"IHAVEOPT", 1, 0))
    receive(stream, 10)
    stream.sendall(struct.pack(REQUEST, REQUEST_MAGIC, 0, 3, 0, 0, 0))
    receive(stream, 16)
    return stream


def take(stream, trace, done_ns):
    """Receives the replies to a trace, each with its time."""
    for _ in trace:
        _, error, number = struct.unpack(">IIQ", receive(stream, 16))
        done_ns[number] = time.monotonic_ns()
        if error != 0:
            raise LoadFailed(f"request {number} was answered with error {error}")
        _, op, _, length = trace[number]
        if op == "read":
            receive(stream, length)


def replayed(path, trace):
    """Sends a trace; returns for each request its completion time, and how late it was sent, in
    nanoseconds."""
    done_ns, late_ns = {}, {}
    with connected(path) as stream:
        reader = threading.Thread(target=take, args=(stream, trace, done_ns))
        reader.start()
        began = time.monotonic_ns()
        for number, (at_ns, op, offset, length) in enumerate(trace):
            kind = 1 if op == "write" else 0
            message = struct.pack(REQUEST, REQUEST_MAGIC, 0, kind, number, offset, length)
            message += bytes(length if op == "write" else 0)
            while (rest_ns := began + at_ns - time.monotonic_ns()) > 0:
                time.sleep(max(0, rest_ns - 500_000) / 1e9)
            stream.sendall(message)
            late_ns[number] = time.monotonic_ns() - began - at_ns
        reader.join()
    if len(done_ns) != len(trace):
        raise LoadFailed(f"{len(done_ns)} of {len(trace)} requests were completed")
    return {number: at - began for number, at in done_ns.items()}, late_ns


def agreement(setup, _stack):
    """Distance of a daemon from the simulation."""
    trace = requests(max(30, int(300 * setup.seconds / 4)))
    expected = simulated(setup, trace)

    def sample():
        argv = servers.weir(setup.program, "null:1G", *REPLAY_LIMITS)
        with servers.Server(argv) as server:
            done, late = replayed(server.uri.partition("socket=")[2], trace)

        def apart_ns(number):
            behind = done[number] - expected[number]
            # A deviation of one percent of a late request counts like a millisecond of an early
            # one.
            off = max(-behind, behind - late[number], 0)
            return off * min(1, 100 * APART_MS * 1e6 / max(1, expected[number]))

        return {"apart_ms": sorted(map(apart_ns, done))[len(done) * 99 // 100] / 1e6}

    return {WEIR: sample}


ROWS = (
    Row(
        "simulate-agrees",
        "a trace sent to a daemon and simulated: maximum difference of 99 % of the requests, or 1 % of their time",
        agreement,
        (AtMost(APART_MS, "apart_ms", "{:.2f} ms".format),),
        columns=("apart_ms",),
        needs_weir=True,
        rounds_factor=0.6,
    ),
    Row(
        "simulate-speed",
        "weir simulate, 10 million requests under one limit that throttles half of them, one core",
        one_disk,
        (AtLeast(WEIR, TARGET_PER_S, "iops", "{:,.0f}".format),),
        needs_weir=True,
        rounds_factor=0.6,
    ),
    Row(
        "simulate-two-devices",
        "weir simulate, 10 million requests of two disks with a limit each: two cores against one",
        two_disks,
        (Faster(TWO, TWO_CORES, (ONE,)),),
        needs_weir=True,
        rounds_factor=0.6,
    ),
    cost(
        "simulate-memory",
        "weir simulate: peak memory with 10 million requests under one limit and with a tenth of them",
        memory,
        (Lower(LONG, MEMORY, (SHORT,), "resident_bytes"),),
        columns=("resident_bytes",),
        needs_weir=True,
    ),
)
