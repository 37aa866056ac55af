"""The row that asks what it costs to record all that a disk is asked, and how large that becomes.

Why in memory: no request is shorter, so nothing hides what recording adds to one; and the thread
that writes takes its processor time from the same machine.

Never judges what is in a recording: that is for the tests.
"""

import time

import groups
import loads
import rows
import servers
from loads import Load
from results import AtMost, Faster
from rows import WEIR, Row

LOAD = Load("randread", 32)
NONE, RECORDING = WEIR, f"{WEIR}, recording"
# A block is written a second after its first request, at most.
WRITTEN_SECONDS = 1.2
# What a change may cost that nobody is to notice, and bytes of a request at a random place.
KEPT, BYTES = 0.97, 12


def recorder(setup):
    """weir's memory disk, and all that it is asked in a directory that ends with it."""

    def command(directory, monitor):
        (directory / "day").mkdir()
        options = ("--qmp", f"unix:{monitor}", "--record", directory / "day")
        return servers.weir(setup.program, f"memory:{setup.size_bytes}", *options)

    return groups.Daemon(command)


def recording(setup, stack):
    """weir's memory disk that is not recorded, and one that is."""
    plain = rows.in_memory(setup, stack, servers.weir(setup.program, f"memory:{setup.size_bytes}"))
    daemon = stack.enter_context(recorder(setup))
    loads.fill(daemon.uri, setup.disk)
    monitor = stack.enter_context(daemon.monitor())

    def progress():
        time.sleep(WRITTEN_SECONDS)
        return monitor.run("x-weir-query-recordings")[0]

    def recorded():
        before = progress()
        figures = rows.under_load(daemon, LOAD, setup.seconds)
        after = progress()
        lost = after["lost"] - before["lost"]
        requests = after["requests"] - before["requests"]
        figures["bytes"] = (after["bytes"] - before["bytes"]) / requests
        figures["lost"] = lost / (requests + lost)
        return figures

    def unrecorded():
        return rows.under_load(plain, LOAD, setup.seconds) | {"bytes": 0, "lost": 0}

    return {NONE: unrecorded, RECORDING: recorded}


ROWS = (
    Row(
        "recording",
        "4 KiB randread, depth 32, one connection, memory: all of it recorded, and none",
        recording,
        (
            Faster(RECORDING, KEPT, (NONE,)),
            AtMost(BYTES, "bytes", lambda bytes_each: f"{bytes_each:.1f} bytes a request", RECORDING),
            AtMost(0, "lost", lambda part: f"{part:.2%}", RECORDING),
        ),
        columns=("iops", "cpu_us", "bytes", "lost"),
        needs_weir=True,
        # Three percent is close to this machine's noise: more pairs.
        rounds_factor=2,
    ),
)
