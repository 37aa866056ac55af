"""Speed of `weir simulate`, and its distance from a real daemon.

Speed: requests a second on one core, from the text of a trace to percentiles, with limits and
without. The trace is weir's own CSV, of one disk under a limit that throttles about half of its
requests, so that both paths through the simulation count. The time includes parsing, both
simulations (before and after), the histograms, and the start of the program.

Distance: a trace is simulated, and sent to a daemon at its times. A request that was sent late may
complete as much later. tests/simulate.rs asserts that a daemon is never ahead of the simulation.

Never compares with another program: none replays a trace through these limits.
"""

import os
import random
import socket
import struct
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import servers
from loads import LoadFailed
from results import AtLeast, AtMost
from rows import WEIR, Row

# The project's target, on one core.
TARGET_PER_S = 2_000_000
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
# Much longer than a trace.
REPLAY_PATIENCE_SECONDS = 120
# The header of a request: the NBD specification, doc/proto.md.
REQUEST, REQUEST_MAGIC = ">IHHQQI", 0x25609513


def times_ns():
    """Times of one second's requests."""
    burst = [number * BURST_GAP_NS for number in range(BURST)]
    return burst + [BURST * BURST_GAP_NS + number * REST_GAP_NS for number in range(REST)]


def write_trace(path, seconds):
    """Writes a thousand requests of 4 KiB a second; the file is deterministic and kept between
    runs.
    """
    if path.exists():
        return
    unfinished = path.with_suffix(".new")
    with open(unfinished, "w", encoding="ascii") as file:
        file.write("time_ns,disk,op,offset,length\n")
        for second in range(seconds):
            at = second * SECOND_NS
            ops = ("read", "write")
            file.writelines(
                f"{at + time_ns},vm1,{ops[number % 2]},{(second * 7919 + number * 104_729) % 262_144 * 4096},4096\n"
                for number, time_ns in enumerate(times_ns())
            )
    unfinished.rename(path)


def contenders(setup, _stack):
    """The program alone, on one CPU."""
    # Five million requests; ten thousand if the figures are not judged.
    seconds = 5000 if setup.seconds >= 1 else 10
    trace = setup.disk.parent / f"simulate-{seconds}.csv"
    write_trace(trace, seconds)
    argv = [setup.program, "simulate", trace, "--iops-total", str(LIMIT), "--threads", "1", "--json"]
    requests = seconds * (BURST + REST)

    def sample():
        cpu = min(os.sched_getaffinity(0))
        start = time.monotonic()
        done = subprocess.run(["taskset", "-c", str(cpu), *argv], capture_output=True, text=True, check=False)
        elapsed = time.monotonic() - start
        if done.returncode != 0:
            raise LoadFailed(done.stderr.strip())
        return {"iops": requests / elapsed, "cpu_us": elapsed * 1e6 / requests}

    return {WEIR: sample}


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
        "weir simulate, a trace with half of its requests throttled, one core",
        contenders,
        (AtLeast(WEIR, TARGET_PER_S, "iops", "{:,.0f}".format),),
        needs_weir=True,
        rounds_factor=0.6,
    ),
)
