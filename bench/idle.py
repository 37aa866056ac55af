"""The row that asks what many idle exports cost: resident memory, and the time until all can be
reached.

Why: one daemon for all of a host's disks is only an option if a disk nobody uses costs next to
nothing.

Never puts load on them: one client looks at the last export, so that the figure is of a daemon that
works.
"""

import signal
import subprocess
import tempfile
import time
from pathlib import Path

import loads
import servers
from results import AtMost
from rows import WEIR, Row

READY_SECONDS = 120
MIB = 1 << 20


def write_config(path, socket, exports):
    """Writes a configuration of `exports` disks behind one socket."""
    disks = (
        f'[disk.idle{number}]\nimage = "null:1G"\nexport = [{{ type = "nbd", listen = "unix:{socket}" }}]\n'
        for number in range(exports)
    )
    path.write_text("".join(disks))


def wait_ready(process):
    """Reads the daemon's log until it says `ready`."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "ready" in line:
            return
    raise servers.ServerFailed(f"weir ended before it was ready:\n{''.join(lines[-20:])}")


def contenders(setup, _stack):
    """Starts the daemon, times it until it says it is ready, and reads its memory."""

    def sample():
        with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
            config, socket = Path(directory, "weir.toml"), Path(directory, "nbd.sock")
            write_config(config, socket, setup.exports)
            start = time.monotonic()
            process = subprocess.Popen(
                [setup.program, "serve", "--config", config],
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            try:
                wait_ready(process)
                started = time.monotonic() - start
                loads.run(["nbdinfo", f"nbd+unix:///idle{setup.exports - 1}?socket={socket}"], READY_SECONDS)
                return {"start_s": started, "resident_bytes": servers.resident_bytes(process.pid)}
            finally:
                process.send_signal(signal.SIGTERM)
                # The log is read to its end: a full pipe would keep the daemon from stopping.
                process.communicate(timeout=servers.STOP_SECONDS)

    return {WEIR: sample}


ROWS = (
    Row(
        "idle-exports",
        "1000 idle exports in one daemon",
        contenders,
        (
            AtMost(64 * MIB, "resident_bytes", lambda value: f"{value / MIB:.1f} MiB"),
            AtMost(1.0, "start_s", lambda value: f"{value:.2f} s"),
        ),
        columns=("start_s", "resident_bytes"),
        needs_weir=True,
        rounds_factor=0.4,
    ),
)
