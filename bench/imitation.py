"""Rows for the accuracy of an imitated device: latency, bandwidth.

Users plan with it. tests/imitated_devices.rs asserts that it is never faster, and the tests beside its
code check its arithmetic in virtual time. These rows cover the whole path, which could add time.

Never compares with another program.
"""

import loads
import servers
from limits import SKIP_MS, passed_per_second
from loads import Load
from results import About
from rows import WEIR, Row

KIB, MIB = 1 << 10, 1 << 20
TOLERANCE = 0.02


def _row(name, title, option, expected, load):
    """One option, and the requests per second that it should yield."""

    def contenders(setup, _stack):
        def sample():
            argv = servers.weir(setup.program, f"null:{setup.size_bytes}", *option)
            with servers.Server(argv) as server:
                seconds = setup.seconds + SKIP_MS / 1000 + 0.1
                times_ms = loads.completions(load, loads.over_nbd(server.uri), seconds)
            return {"rate": passed_per_second(times_ms, SKIP_MS, setup.seconds * 1000)}

        return {WEIR: sample}

    return Row(
        name,
        title,
        contenders,
        (About(WEIR, expected, TOLERANCE, "rate", "{:,.0f}".format),),
        columns=("rate",),
        needs_weir=True,
        rounds_factor=0.6,
    )


ROWS = (
    _row(
        "imitated-delay",
        "--delay read=50ms,parallel=4, 4 KiB, depth 32: four in flight, twenty times a second",
        ("--delay", "read=50ms,parallel=4"),
        80,
        Load("randread", 32),
    ),
    _row(
        "imitated-rate",
        "--rate bytes=10M, 64 KiB, depth 8",
        ("--rate", "bytes=10M"),
        10 * MIB / (64 * KIB),
        Load("randread", 8, block_bytes=64 * KIB),
    ),
)
