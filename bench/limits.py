"""The rows that ask whether a limit holds: the rate that passes against the rate asked, in real
time.

Why from the time of every completion: a count over a window is wrong by one request at each end,
which at 1 MiB and 10 MB/s is one percent. The rate between the first and the last completion of the
window has no such edge.

The limit's own arithmetic is tested in virtual time, exactly, beside its code; here it is the whole
path (timers, reactor, socket) that could lose time. Never compares with another program.
"""

import loads
import servers
from loads import Load
from results import Within
from rows import WEIR, Row

# What passes at once before a limit binds is a tenth of a second's worth: it is left out.
SKIP_MS = 100
TOLERANCE = 0.005
MIB = 1 << 20


def lasting(seconds, skip_ms):
    """How long a load is put on whose middle is measured for so many seconds; 0 if those are 0, a
    few requests.
    """
    return seconds and seconds + skip_ms / 1000 + 0.1


def passed_per_second(times_ms, skip_ms, window_ms):
    """Completions per second between the first and the last one of `[skip_ms, skip_ms +
    window_ms]`.

    Of a few requests, with a window of 0, between the first and the last of all: some figure, for
    nobody to judge.
    """
    if not window_ms:
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


ROWS = (
    _row("1000-iops-1", "--iops-total", 1000, depth=1),
    _row("1000-iops-32", "--iops-total", 1000, depth=32),
    _row("20000-iops", "--iops-total", 20_000, depth=32),
    _row("50000-iops", "--iops-total", 50_000, depth=32),
    _row("10-MBps-4K", "--bps-total", 10_000_000, depth=32),
    _row("10-MBps-1M", "--bps-total", 10_000_000, depth=32, block_bytes=MIB),
)
