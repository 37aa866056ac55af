"""How fast `weir simulate` is: requests a second of one core, from the text of a trace to
percentiles, with limits and without.

The trace is weir's own CSV, of one disk under a limit that about half of its requests wait for, so
that both ways through the simulation count. Reading it, both simulations of it (before and after)
and the histograms are in the time; starting the program is too.

Never compares with another program: none replays a trace through these limits.
"""

import os
import subprocess
import time

from loads import LoadFailed
from results import AtLeast
from rows import WEIR, Row

# What the project promises, on one core.
ASKED = 2_000_000
LIMIT = 1000
# Of each second: a burst at twice the limit for a fifth of it, then what is left until there are as
# many as the limit lets pass. A tenth of a second's worth passes at once, so of the 400 of the
# burst 200 wait, and of those behind it 300 until the queue is empty.
BURST, BURST_GAP_NS = 400, 500_000
REST, REST_GAP_NS = 600, 1_333_333
SECOND_NS = 1_000_000_000


def times_ns():
    """The instants of one second's requests."""
    burst = [number * BURST_GAP_NS for number in range(BURST)]
    return burst + [BURST * BURST_GAP_NS + number * REST_GAP_NS for number in range(REST)]


def write_trace(path, seconds):
    """A thousand requests a second, each of 4 KiB; kept between runs, since it is the same each
    time.
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
    # Five million requests; ten thousand where only running counts.
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


ROWS = (
    Row(
        "simulate-speed",
        "weir simulate, a trace half of whose requests wait for a limit, one core",
        contenders,
        (AtLeast(WEIR, ASKED, "iops", "{:,.0f}".format),),
        needs_weir=True,
        rounds_factor=0.6,
    ),
)
