"""Rows for the accuracy of limits: the measured rate against the configured one, in real time.

Computed from the time of every completion: a count over a window is wrong by one request at each
end, which at 1 MiB and 10 MB/s is one percent. The rate between the first and the last completion
of the window has no such error.

The arithmetic of limits is tested exactly in virtual time, beside its code; these rows cover the
whole path (timers, reactor, socket), which could lose time. Never compares with another program.
"""

import threading

import groups
import loads
import servers
from groups import Disk
from loads import Load
from results import About, Within
from rows import WEIR, Row

# The work admitted before a limit takes effect, a tenth of a second's worth, is excluded.
SKIP_MS = 100
TOLERANCE = 0.005
MIB = 1 << 20
# The burst, and the rate after it.
BURST, BURST_RATE = 2000, 200
# A limit before and after a change under load; the burst of a tenth of a second's worth after the
# change is excluded.
CHANGED = (500, 1500)
# Maximum delay until fio's clock starts.
FIO_STARTS_SECONDS = 1


def lasting(seconds, skip_ms):
    """Duration of a load in whose middle this number of seconds is measured; 0 for a few requests
    if that is 0.
    """
    return seconds and seconds + skip_ms / 1000 + 0.1


def passed_per_second(times_ms, skip_ms, window_ms):
    """Completions per second between the first and the last one in `[skip_ms, skip_ms +
    window_ms]`.

    Without a window, for a few requests, between the first and the last of all: a figure that is
    not judged.
    """
    if window_ms <= 0:
        return (len(times_ms) - 1) * 1000 / max(times_ms[-1] - times_ms[0], 1)
    inside = [time for time in times_ms if skip_ms <= time <= skip_ms + window_ms]
    if not inside or inside[0] == inside[-1]:
        raise loads.LoadFailed(f"{len(inside)} of {len(times_ms)} completions are in the measured window")
    # Several completions may have the first millisecond; all but the first belong to the window.
    return (len(inside) - 1) * 1000 / (inside[-1] - inside[0])


def _row(name, option, expected, depth, block_bytes=4096):
    per_request = block_bytes if option.startswith("--bps") else 1
    load = Load("randread", depth, block_bytes=block_bytes)

    def contenders(setup, _stack):
        def sample():
            argv = servers.weir(setup.program, f"null:{setup.size_bytes}", option, str(expected))
            with servers.Server(argv) as server:
                seconds = lasting(setup.limit_seconds, SKIP_MS)
                times_ms = loads.completions(load, loads.over_nbd(server.uri), seconds)
            rate = passed_per_second(times_ms, SKIP_MS, setup.limit_seconds * 1000)
            return {"rate": rate * per_request}

        return {WEIR: sample}

    title = f"{option} {expected}, {block_bytes // 1024} KiB, depth {depth}"
    return Row(
        f"limit-{name}",
        title,
        contenders,
        (Within(expected, TOLERANCE),),
        columns=("rate",),
        needs_weir=True,
        # Ten seconds each without pairs: the worse of two runs, not a median.
        rounds_factor=0.4,
    )


def burst(setup, _stack):
    """Number of requests admitted at the start: the burst, and the rate after it."""
    seconds = min(3, setup.seconds)
    options = ("--iops-total", BURST_RATE, "--iops-total-max", BURST)

    def sample():
        argv = servers.weir(setup.program, f"null:{setup.size_bytes}", *options)
        with servers.Server(argv) as server:
            times_ms = loads.completions(Load("randread", 32), loads.over_nbd(server.uri), seconds)
        return {"passed": sum(time <= seconds * 1000 for time in times_ms) / (BURST + BURST_RATE * seconds)}

    return {WEIR: sample}


def changed(setup, _stack):
    """The rate under a limit, and under another that replaces it in the middle of the load."""
    before, after = CHANGED
    disk, part = Disk("disk"), setup.seconds / 2

    def sample():
        with groups.weir(setup.program, {"iops-total": before}, [disk]) as daemon:
            where = loads.over_nbd(daemon.uri_of(disk.name))
            loads.run(["nbdinfo", daemon.uri_of(disk.name)], 60)
            with daemon.monitor() as monitor:
                change = {"path": groups.GROUP, "property": "limits", "value": {"iops-total": after}}
                # fio's clock starts a little after this one; the gap between the two windows covers
                # the difference.
                timer = threading.Timer(part + FIO_STARTS_SECONDS, lambda: monitor.run("qom-set", **change))
                timer.start()
                try:
                    times_ms = loads.completions(Load("randread", 32), where, setup.seconds + FIO_STARTS_SECONDS + 0.5)
                finally:
                    timer.join()
        return {
            "before": passed_per_second(times_ms, SKIP_MS, part * 1000 - SKIP_MS),
            "after": passed_per_second(times_ms, (part + FIO_STARTS_SECONDS + 0.2) * 1000, part * 1000),
        }

    return {WEIR: sample}


ROWS = (
    _row("1000-iops-1", "--iops-total", 1000, depth=1),
    _row("1000-iops-32", "--iops-total", 1000, depth=32),
    _row("20000-iops", "--iops-total", 20_000, depth=32),
    _row("50000-iops", "--iops-total", 50_000, depth=32),
    _row("10-MBps-4K", "--bps-total", 10_000_000, depth=32),
    _row("10-MBps-1M", "--bps-total", 10_000_000, depth=32, block_bytes=MIB),
    Row(
        "limit-burst",
        f"--iops-total {BURST_RATE} --iops-total-max {BURST}, 4 KiB, depth 32: admitted requests from the start on",
        burst,
        (About(WEIR, 1, 0.01, "passed", "{:.1%}".format),),
        columns=("passed",),
        needs_weir=True,
        rounds_factor=0.4,
    ),
    Row(
        "limit-changed",
        f"--iops-total {CHANGED[0]}, changed to {CHANGED[1]} under load, 4 KiB, depth 32",
        changed,
        tuple(
            About(WEIR, rate, 2 * TOLERANCE, key, "{:,.1f}".format)
            for key, rate in zip(("before", "after"), CHANGED, strict=True)
        ),
        columns=("before", "after"),
        needs_weir=True,
        rounds_factor=0.4,
    ),
)
