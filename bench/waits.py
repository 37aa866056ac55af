"""Rows for the wait of a request that should not wait: behind huge requests of a neighbour, and
when a limit is lifted.

libnbd directly and not fio: the rows need the time of a single request and the requests in flight
when it was sent, which only the sender knows.

Never measures a rate; never leaves a request behind: the connections end with the sample, with
requests still in flight.
"""

import contextlib
import multiprocessing
import time
from statistics import median

import nbd

import groups
import loads
from groups import Disk
from results import AtMost
from rows import WEIR, Row
from shares import QSD

KIB, MIB = 1 << 10, 1 << 20
MB = 1_000_000
SMALL = 4 * KIB
# Maximum wait of a small request behind a large one, service included.
SLICE_MS = 100
LIFT_MS = 10
LIFT_BYTES = 8 * MIB
WAITING_SECONDS = 1
ARRIVAL_SECONDS = 0.1
# Longer than any request takes: 32 MiB at 1 MB/s.
PATIENCE_SECONDS = 60
# Precision of the client's loop.
SHORTEST_PAUSE_SECONDS = 0.002


def milliseconds(value):
    """A time in milliseconds."""
    return f"{value:,.1f} ms"


class Reader:
    """One connection that reads `size_bytes` at a time, with one read in flight."""

    def __init__(self, uri, size_bytes):
        self._handle = nbd.NBD()
        # Zeroing the buffer first would add to the client's time.
        self._handle.set_pread_initialize(False)
        self._handle.connect_uri(uri)
        self._buffer = nbd.Buffer(size_bytes)
        self._cookie = None

    def send(self):
        """Sends a read; returns once it is in the socket."""
        self._cookie = self._handle.aio_pread(self._buffer, 0)
        self.step(0)

    def step(self, timeout_ms):
        """Processes replies, waiting for at most this time."""
        self._handle.poll(timeout_ms)

    def done(self):
        """True if the read was answered; an error is raised."""
        return self._handle.aio_command_completed(self._cookie)


def wait(reader, other=None):
    """Waits until `reader` is answered, also processing replies of the second one."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not reader.done():
        if time.monotonic() > end:
            raise loads.LoadFailed(f"a read was not answered within {PATIENCE_SECONDS} s")
        reader.step(1)
        if other:
            other.step(0)


def read_on(uri, size_bytes, begun):
    """A neighbour: sequential reads until its process ends; `begun` is set once the first was sent.
    """
    reader = Reader(uri, size_bytes)
    reader.send()
    begun.set()
    while True:
        wait(reader)
        reader.send()


@contextlib.contextmanager
def neighbour_of(uri, size_bytes):
    """A neighbour in a separate process: receiving 32 MiB would delay the client's own replies."""
    begun = multiprocessing.Event()
    process = multiprocessing.Process(target=read_on, args=(uri, size_bytes, begun), daemon=True)
    process.start()
    try:
        if not begun.wait(PATIENCE_SECONDS):
            raise loads.LoadFailed(f"{uri}: no read could be sent within {PATIENCE_SECONDS} s")
        time.sleep(ARRIVAL_SECONDS)
        yield
    finally:
        process.kill()
        process.join()


def attend(readers, seconds):
    """Processes their replies for this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for reader in readers:
            reader.step(1)


def reading(uri, rate, seconds):
    """Waits of 4 KiB reads at their fair rate, half the group's, one in flight at a time; in
    milliseconds.
    """
    reader = Reader(uri, SMALL)
    pause = max(SMALL / (rate / 2), SHORTEST_PAUSE_SECONDS)
    waits = []
    start = time.monotonic()
    # At least one read.
    while (sent := time.monotonic()) < start + seconds or not waits:
        reader.send()
        wait(reader)
        answered = time.monotonic()
        waits.append((answered - sent) * 1000)
        time.sleep(max(0, sent + pause - answered))
    return waits


def neighbour(weir_cases, qsd_case):
    """Contenders that read beside a neighbour; a case is `(rate, size of the neighbour's reads)`.
    """

    def contenders(setup, _stack):
        disks = [Disk("quiet"), Disk("noisy")]

        def sample(start, rate, large_bytes):
            with start({"bps-total": rate}, disks) as daemon:
                with neighbour_of(daemon.uri_of("noisy"), large_bytes):
                    waits = reading(daemon.uri_of("quiet"), rate, setup.seconds)
            return {"longest_ms": max(waits), "typical_ms": median(waits)}

        def weir(limits, members):
            return groups.weir(setup.program, limits, members)

        cases = [(WEIR, weir, *case) for case in weir_cases] if setup.program else []
        cases.append(("QEMU", groups.storage_daemon, *qsd_case))
        return {
            case_name(contender, rate, large): lambda start=start, rate=rate, large=large: sample(
                start, rate, large
            )
            for contender, start, rate, large in cases
        }

    return contenders


def case_name(contender, rate, large_bytes):
    """Name of a contender."""
    return f"{contender}, {large_bytes // MIB} MiB, {rate // MB} MB/s"


def lifting(setup, _stack):
    """A 4 KiB read that waits behind 8 MiB at 1 MB/s, and the limit lifted: time until both are
    answered.
    """
    limits, disk = {"bps-total": MB}, [Disk("disk")]

    def sample(start):
        with start() as daemon:
            large, small = Reader(daemon.uri_of("disk"), LIFT_BYTES), Reader(daemon.uri_of("disk"), SMALL)
            with daemon.monitor() as monitor:
                large.send()
                # They use two connections, so only a delay ensures their order.
                attend((large,), ARRIVAL_SECONDS)
                small.send()
                attend((large, small), min(WAITING_SECONDS, setup.seconds))
                # A stalled host could cause this; raised only if the figures are judged.
                if small.done() and setup.seconds:
                    raise loads.LoadFailed("a read passed a limit that should throttle it")
                return released(monitor, large, small)

    starts = {QSD: lambda: groups.storage_daemon(limits, disk)}
    if setup.program:
        starts = {WEIR: lambda: groups.weir(setup.program, limits, disk)} | starts
    return {name: lambda start=start: sample(start) for name, start in starts.items()}


def released(monitor, large, small):
    """Lifts the limit with a command that both daemons support; returns the milliseconds from then
    to both replies.
    """
    start = time.monotonic()
    monitor.run("qom-set", path=groups.GROUP, property="limits", value={"bps-total": 0})
    wait(small, large)
    small_ms = (time.monotonic() - start) * 1000
    wait(large, small)
    return {"small_ms": small_ms, "large_ms": (time.monotonic() - start) * 1000}


SIZES = tuple((MB, size * MIB) for size in (4, 8, 16, 32))
RATES = tuple((rate * MB, 32 * MIB) for rate in (5, 10, 100))


def _at_most_a_slice(cases):
    return tuple(AtMost(SLICE_MS, "longest_ms", milliseconds, case_name(WEIR, *case)) for case in cases)


ROWS = (
    Row(
        "neighbour-sizes",
        "4 KiB reads at their fair rate in a group of 1 MB/s, beside a neighbour's reads of 4 to 32 MiB",
        neighbour(SIZES, (MB, 4 * MIB)),
        _at_most_a_slice(SIZES),
        columns=("longest_ms", "typical_ms"),
        rounds_factor=0.2,
    ),
    Row(
        "neighbour-rates",
        "4 KiB reads at their fair rate beside a neighbour's reads of 32 MiB, groups of 5 to 100 MB/s",
        neighbour(RATES, (10 * MB, 32 * MIB)),
        _at_most_a_slice(RATES),
        columns=("longest_ms", "typical_ms"),
        rounds_factor=0.2,
    ),
    Row(
        "lift",
        "a 4 KiB read behind 8 MiB at 1 MB/s: its wait after the limit is lifted",
        lifting,
        (AtMost(LIFT_MS, "small_ms", milliseconds, WEIR), AtMost(LIFT_MS, "large_ms", milliseconds, WEIR)),
        columns=("small_ms", "large_ms"),
        rounds_factor=0.4,
    ),
)
