"""Rows for latency targets: how many windows of a quiet disk keep one beside a busy disk of the same
file system, over NBD and over vhost-user-blk, and the cost of a target that is met.

The target is the geometric mean of the 99th percentiles alone and beside the busy disk, both measured
first, so that it is neither impossible nor always met. A window is a run of `weir bench` at depth 1.
The client's latency contains its transport, which the target excludes: hence the tolerance.

Never judges a few requests.
"""

import contextlib
import math
import subprocess
import tempfile
import time
from pathlib import Path

import groups
import loads
import vhost_user
from loads import Load
from qcow2 import raw_copy
from results import AtLeast, Faster
from rows import WEIR, Row, settle, with_options

QUIET, BUSY = "quiet", "busy"
QUIET_LOAD, BUSY_LOAD = Load("randread", 1, free=True), Load("randread", 64, free=True)
WINDOWS, WINDOW_SECONDS, SETTLE_SECONDS = 8, 2, 2
# Until the socket of a machine exists; the one of NBD is passed to the server.
START_SECONDS = 60
KEPT, TOLERANCE = 0.95, 1.1
# Cost of a target that is met, relative to none: one percent at most.
COST = 0.99
NO_TARGET = "no target"


def percent(value):
    """A share as a percentage."""
    return f"{value:.1%}"


def weir(setup, paths, machine, target_us):
    """weir with both disks over NBD, or the quiet one at the socket `machine` if there is one."""
    tables = []
    for name, path in paths.items():
        keys = {"image": str(path), "format": "raw", "cache": "none"}
        if name == QUIET and target_us:
            keys["latency-target"] = f"{target_us:.0f}us"
        table = groups.table(f"disk.{name}", keys)
        # Without a list of exports, the disk is at the passed socket.
        if name == QUIET and machine:
            table += f'export = [{{ type = "vhost-user-blk", listen = "unix:{machine}" }}]\n'
        tables.append(table)
    return groups.weir_from(setup.program, "\n".join(tables))


@contextlib.contextmanager
def busy(setup, target):
    """The busy load, for as long as the block."""
    argv = loads.fio_argv(BUSY_LOAD, loads.over_nbd(target), 1000 if setup.seconds else 0)
    client = subprocess.Popen([str(word) for word in argv], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        client.kill()
        client.wait()


def p99_us(setup, target, seconds):
    """The 99th percentile of one window."""
    argv = vhost_user.argv_of(setup, QUIET_LOAD, target, seconds)
    job = loads.jobs_of(loads.run(argv, seconds + 300))[0]
    return loads.latencies(job["read"])["p99_us"]


def kept_windows(over_vhost_user):
    """weir with the target, and without."""

    def contenders(setup, stack):
        paths = {QUIET: setup.disk, BUSY: raw_copy(setup)}
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-bench.")))
        machine = directory / "quiet.sock" if over_vhost_user else None
        seconds = WINDOW_SECONDS if setup.seconds else 0

        @contextlib.contextmanager
        def running(target_us):
            for path in paths.values():
                settle(path)
            with weir(setup, paths, machine, target_us) as server:
                deadline = time.monotonic() + START_SECONDS
                while machine and not machine.exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                quiet = f"vhost-user:{machine}" if machine else server.uri_of(QUIET)
                yield server, quiet

        def target():
            with running(None) as (server, quiet):
                alone = p99_us(setup, quiet, seconds)
                with busy(setup, server.uri_of(BUSY)):
                    time.sleep(SETTLE_SECONDS if seconds else 0)
                    return math.sqrt(alone * p99_us(setup, quiet, seconds))

        def sample(with_target):
            target_us = max(target(), 10)
            with running(target_us if with_target else None) as (server, quiet):
                with busy(setup, server.uri_of(BUSY)):
                    time.sleep(SETTLE_SECONDS if seconds else 0)
                    windows = [p99_us(setup, quiet, seconds) for _ in range(WINDOWS if seconds else 1)]
            kept = sum(window <= TOLERANCE * target_us for window in windows) / len(windows)
            return {"kept": kept, "p99_us": max(windows), "target_us": target_us}

        return {WEIR: lambda: sample(True), NO_TARGET: lambda: sample(False)}

    return contenders


def _kept(transport, over_vhost_user):
    return Row(
        f"latency-target-{transport}",
        f"4 KiB randread at depth 1 over {transport} with a latency target, beside depth 64 on another "
        "file: windows of 2 s that keep it",
        kept_windows(over_vhost_user),
        (AtLeast(WEIR, KEPT, "kept", percent),),
        columns=("kept", "p99_us", "target_us"),
        needs_weir=True,
    )


def _cost():
    return Row(
        "latency-target-cost-free",
        "4 KiB randread, depth 32, memory: a latency target that is met against none, not pinned",
        with_options(Load("randread", 32, free=True), none=(), target=("--latency-target", "1s")),
        (Faster("target", COST, ("none",)),),
        needs_weir=True,
        rounds_factor=4,
    )


ROWS = (_kept("nbd", False), _kept("vhost-user", True), _cost())
