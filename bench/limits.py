"""The rows that ask whether a limit holds: the rate that passes against the rate asked, in real
time.

Why from the time of every completion: a count over a window is wrong by one request at each end,
which at 1 MiB and 10 MB/s is one percent. The rate between the first and the last completion of the
window has no such edge.

The limit's own arithmetic is tested in virtual time, exactly, beside its code; here it is the whole
path (timers, reactor, socket) that could lose time. Never compares with another program.
"""

import threading

import groups
import loads
import servers
from groups import Disk
from loads import Load
from results import About, Within
from rows import WEIR, Row

# What passes at once before a limit binds is a tenth of a second's worth: it is left out.
SKIP_MS = 100
TOLERANCE = 0.005
MIB = 1 << 20
# What passes at once, and then in each second.
BURST, BURST_RATE = 2000, 200
# A limit before and after it is changed under load, and how long after that is left out: its own
# tenth of a second's worth.
CHANGED = (500, 1500)
# What fio may take until its clock begins.
FIO_STARTS_SECONDS = 1


def lasting(seconds, skip_ms):
    """How long a load is put on whose middle is measured for so many seconds; 0 if those are 0, a
    few requests.
    """
    return seconds and seconds + skip_ms / 1000 + 0.1


def passed_per_second(times_ms, skip_ms, window_ms):
    """Completions per second between the first and the last one of `[skip_ms, skip_ms +
    window_ms]`.

    Of a few requests, without a window, between the first and the last of all: some figure, for
    nobody to judge.
    """
    if window_ms <= 0:
        return (len(times_ms) - 1) * 1000 / max(times_ms[-1] - times_ms[0], 1)
    inside = [time for time in times_ms if skip_ms <= time <= skip_ms + window_ms]
    if not inside or inside[0] == inside[-1]:
        raise loads.LoadFailed(f"{len(inside)} of {len(times_ms)} completions lie in the window measured")
    # Several completions may carry the first millisecond: those after the first belong to the
    # window.
    return (len(inside) - 1) * 1000 / (inside[-1] - inside[0])


def _row(name, option, asked, depth, block_bytes=4096):
    per_request = block_bytes if option.startswith("--bps") else 1
    load = Load("randread", depth, block_bytes=block_bytes)

    def contenders(setup, _stack):
        def sample():
            argv = servers.weir(setup.program, f"null:{setup.size_bytes}", option, str(asked))
            with servers.Server(argv) as server:
                seconds = lasting(setup.limit_seconds, SKIP_MS)
                times_ms = loads.completions(load, loads.over_nbd(server.uri), seconds)
            rate = passed_per_second(times_ms, SKIP_MS, setup.limit_seconds * 1000)
            return {"rate": rate * per_request}

        return {WEIR: sample}

    title = f"{option} {asked}, {block_bytes // 1024} KiB, depth {depth}"
    return Row(
        f"limit-{name}",
        title,
        contenders,
        (Within(asked, TOLERANCE),),
        columns=("rate",),
        needs_weir=True,
        # Ten seconds each and no pairs: the worst of two counts, not a median.
        rounds_factor=0.4,
    )


def burst(setup, _stack):
    """How many requests pass from the first on: the burst, and the rate behind it."""
    seconds = min(3, setup.seconds)
    options = ("--iops-total", BURST_RATE, "--iops-total-max", BURST)

    def sample():
        argv = servers.weir(setup.program, f"null:{setup.size_bytes}", *options)
        with servers.Server(argv) as server:
            times_ms = loads.completions(Load("randread", 32), loads.over_nbd(server.uri), seconds)
        return {"passed": sum(time <= seconds * 1000 for time in times_ms) / (BURST + BURST_RATE * seconds)}

    return {WEIR: sample}


def changed(setup, _stack):
    """The rate under a limit, and under another that it is changed to in the middle of the load."""
    before, after = CHANGED
    disk, part = Disk("disk"), setup.seconds / 2

    def sample():
        with groups.weir(setup.program, {"iops-total": before}, [disk]) as daemon:
            where = loads.over_nbd(daemon.uri_of(disk.name))
            loads.run(["nbdinfo", daemon.uri_of(disk.name)], 60)
            with daemon.monitor() as monitor:
                change = {"path": groups.GROUP, "property": "limits", "value": {"iops-total": after}}
                # fio's clock begins a little after this one; what lies between the two windows
                # takes that in.
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
        f"--iops-total {BURST_RATE} --iops-total-max {BURST}, 4 KiB, depth 32: what passes from the beginning on",
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
