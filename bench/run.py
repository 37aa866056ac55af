#!/usr/bin/python3
"""Runs weir and its peers side by side and prints the table: speed and cost of each, and weir's
targets.

Interleaved: A, B, C, C, B, A …, so that a slow minute of the host affects all contenders, and none
always follows the same one. Read the ratios, not the numbers.

    bench/run.py                                 everything, about 80 minutes
    bench/run.py --rows 'file-*' --rounds 3      a part of it
    bench/run.py --peers-only                    what the machine gives without weir
    bench/run.py --before OLD --rows 'file-*'    this build beside another one, without the peers
    bench/run.py --short                         a minute: every row runs and must have figures

Exit status: 0 if all rows ran, even if a target was missed; 1 if a row failed. `--strict` judges
the targets: 1 if a row missed one, and the last lines name these rows. Never builds anything, and
leaves no files behind except the disk file, which it reuses, and the JSON.
"""

import argparse
import contextlib
import fnmatch
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import nbd

import advise
import ceph
import fuse
import growth
import hostile_clients
import idle
import image_tool
import imitation
import in_guest
import inprocess
import latency_targets
import limits
import machine
import many_hosts
import members
import nbd_storage
import prefetch
import qcow2
import qmp
import report
import rows
import shares
import simulate
import tails
import vhost_user
import waits
import watching
import watermark
from etcd import DeadlineExceeded
from front_end import NotServed
from in_guest import GuestFailed
from loads import LoadFailed
from results import Results, Verdict
from servers import ServerFailed

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
SUBJECTS = (
    rows, inprocess, qcow2, prefetch, nbd_storage, vhost_user, fuse, limits, idle, shares, members, waits, imitation,
    watermark, simulate, advise, hostile_clients, watching, many_hosts, ceph, growth, tails, image_tool, in_guest,
    latency_targets,
)  # fmt: skip
ROWS = tuple(row for subject in SUBJECTS for row in subject.ROWS)
# Expected failures of a row: of a client, a server, a monitor, or a connection.
FAILURES = (
    LoadFailed,
    DeadlineExceeded,
    ServerFailed,
    NotServed,
    GuestFailed,
    qmp.CommandFailed,
    nbd.Error,
    OSError,
)
# Rows in parallel if no figure is judged: every host has two processors.
SHORT_WORKERS = 2
# Minimum speed after a change, relative to the speed before it; and the figures that are speeds.
KEPT = 0.98
SPEEDS = ("iops", "bytes_per_s")
MIB = 1 << 20


@dataclass
class Outcome:
    """The outcome of one row."""

    row: rows.Row
    results: Results = None
    verdicts: list = field(default_factory=list)
    failure: str = None


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(description="weir and its peers, side by side", allow_abbrev=False)
    parser.add_argument("--rows", default="*", help="names or patterns, separated by commas (default: all)")
    parser.add_argument("--list", action="store_true", help="print the rows' names and end")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each contender (default: 5)")
    parser.add_argument("--seconds", type=float, default=4, help="length of one random load (default: 4)")
    parser.add_argument(
        "--weir", type=Path, default=TARGET / "release" / "weir", help="the binary to measure"
    )
    parser.add_argument("--peers-only", action="store_true", help="measure without weir")
    parser.add_argument(
        "--before",
        type=Path,
        help="another build of weir: measure it and this one in turn;"
        f" the target is {KEPT:.2f} × its speed",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="one round of a few requests: checks that all rows run, two at a time",
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    parser.add_argument(
        "--directory", type=Path, default=TARGET / "bench", help="where the disk file is kept"
    )
    parser.add_argument(
        "--json", type=Path, help="where to write the samples (default: bench/results/TIME.json)"
    )
    args = parser.parse_args()
    if args.strict and (args.short or args.peers_only):
        parser.error("--strict judges the targets, which --short and --peers-only do not measure")
    if args.before and (args.short or args.peers_only):
        parser.error("--before compares speeds, which --short and --peers-only do not measure")
    return args


def beside(row, before):
    """The row with weir's contenders, each followed by the same contender of another build."""

    def contenders(setup, stack):
        peers = set()
        if not row.needs_weir:
            with contextlib.ExitStack() as only_names:
                peers = set(row.contenders(replace(setup, program=None), only_names))
        new = row.contenders(setup, stack)
        old = row.contenders(replace(setup, program=before), stack)
        pairs = [{name: new[name], f"{name} before": old[name]} for name in new if name not in peers]
        return {name: sample for pair in pairs for name, sample in pair.items()}

    return replace(row, contenders=contenders, targets=(NotSlower(row.columns[0]),))


@dataclass(frozen=True)
class NotSlower:
    """Target: each contender keeps the speed of the earlier build."""

    key: str

    def judge(self, results):
        pairs = [(name, f"{name} before") for name in results.samples if f"{name} before" in results.samples]
        ratios = {name: results.ratio(name, before, self.key) for name, before in pairs}
        measured = ", ".join(f"{name} {ratio:.3f} ×" for name, ratio in ratios.items())
        return Verdict(f"≥ {KEPT:.2f} × before", measured, all(ratio >= KEPT for ratio in ratios.values()))


def chosen(patterns, peers_only):
    """The rows that match a list of patterns, in the table's order; exits if a pattern matches
    none.
    """
    patterns = patterns.split(",")
    for pattern in patterns:
        if not any(fnmatch.fnmatch(row.name, pattern) for row in ROWS):
            sys.exit(f"run.py: --rows: no row matches {pattern} (`run.py --list` shows them)")
    wanted = [row for row in ROWS if any(fnmatch.fnmatch(row.name, pattern) for pattern in patterns)]
    return [row for row in wanted if not (peers_only and row.needs_weir)]


def prepare(args, directory):
    """The setup, with the disk file written: 2 GiB, or 16 MiB if the figures are not judged."""
    size = 16 * MIB if args.short else 2048 * MIB
    directory.mkdir(parents=True, exist_ok=True)
    disk = directory / f"disk-{size // MIB}M.raw"
    if not disk.exists() or disk.stat().st_size != size:
        write_disk(disk, size)
    return rows.Setup(
        program=None if args.peers_only else args.weir,
        generator=args.weir,
        disk=disk,
        size_bytes=size,
        seconds=0 if args.short else args.seconds,
        limit_seconds=0 if args.short else 10,
        exports=20 if args.short else 1000,
    )


def write_disk(disk, size):
    """Writes random bytes everywhere: some servers answer holes and zeroes without reading."""
    unfinished = disk.with_suffix(".new")
    with open(unfinished, "wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    unfinished.rename(disk)


def measure(row, setup, rounds):
    """Runs one row's contenders alternately, round by round."""
    rounds = max(1, round(rounds * row.rounds_factor))
    with contextlib.ExitStack() as stack:
        contenders = row.contenders(setup, stack)
        samples = {name: [] for name in contenders}
        for number in range(rounds):
            order = list(contenders.items())
            for name, sample in order if number % 2 == 0 else reversed(order):
                progress(f"{row.name} {number + 1}/{rounds} {name}")
                samples[name].append(sample())
    return Results(samples)


def outcome_of(row, setup, rounds, judged):
    """One row's outcome. A failed row does not end the table: later rows may be of interest."""
    try:
        results = measure(row, setup, rounds)
    except FAILURES as error:
        return Outcome(row, failure=str(error))
    return Outcome(
        row, results, [target.judge(results) for target in row.targets] if judged else []
    )


def one_by_one(wanted, setup, rounds, judged):
    """Yields the outcome of each row as soon as it is available."""
    for row in wanted:
        yield outcome_of(row, setup, rounds, judged)


def samples_of(name, setup):
    """In a separate process: one row's samples of one round, and the reason if it failed."""
    (row,) = (row for row in ROWS if row.name == name)
    own = setup.disk.parent / f"worker-{os.getpid()}"
    # A server locks its image, so each process has its own.
    if not own.exists():
        own.mkdir()
        shutil.copyfile(setup.disk, own / setup.disk.name)
    outcome = outcome_of(row, replace(setup, disk=own / setup.disk.name), 1, judged=False)
    if outcome.failure:
        return None, outcome.failure
    return outcome.results.samples, unreadable(row, outcome.results.samples)


def unreadable(row, samples):
    """The reason why a row's samples are invalid, if they are: each column must have a numeric
    figure.
    """
    all_samples = [sample for contender in samples.values() for sample in contender]
    for column in row.columns:
        figures = [sample[column] for sample in all_samples if column in sample]
        if not figures or not all(
            isinstance(figure, (int, float)) and math.isfinite(figure) for figure in figures
        ):
            return f"{column}: no figures, but {figures}"
    return None


def all_short(wanted, setup):
    """The outcome of each row, in their order, two in parallel: only that they run is judged."""
    with ProcessPoolExecutor(SHORT_WORKERS) as pool:
        try:
            futures = [pool.submit(samples_of, row.name, setup) for row in wanted]
            for row, future in zip(wanted, futures, strict=True):
                samples, failure = future.result()
                yield Outcome(row, Results(samples) if samples else None, failure=failure)
        finally:
            # Also on a signal: running rows are awaited, pending ones are cancelled.
            pool.shutdown(cancel_futures=True)


def progress(text):
    """One line on a terminal, redrawn; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main():
    """The exit status."""
    with contextlib.ExitStack() as stack:
        return measured(stack)


def measured(stack):
    """Measures and prints; returns the exit status. Clean-up is entered into `stack`."""
    # The same clean-up as on Ctrl-C: the servers' `with` blocks end them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = arguments()
    if args.list:
        width = max(len(row.name) for row in ROWS) + 2
        print("\n".join(f"{row.name:<{width}}{row.title}" for row in ROWS))
        return 0
    wanted = chosen(args.rows, args.peers_only)
    if args.before:
        slow = [row.name for row in wanted if row.columns[0] not in SPEEDS]
        wanted = [beside(row, args.before) for row in wanted if row.name not in slow]
        if slow:
            print(f"omitted, as they have no speed to compare: {', '.join(slow)}")
        if not wanted:
            sys.exit("run.py: --before: no row is left to compare")
    if not args.peers_only and not args.weir.exists():
        sys.exit(f"run.py: {args.weir}: no such file (build it with `make build`, or pass --peers-only)")
    if args.before and not args.before.exists():
        sys.exit(f"run.py: --before {args.before}: no such file")
    if args.short:
        args.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench.", dir=TARGET)))
    setup = prepare(args, args.directory)
    facts = machine.describe(setup)
    if args.before:
        facts |= {"this build": str(args.weir), "before": str(args.before)}
    print(report.header(facts), flush=True)

    start = time.monotonic()
    outcomes = []
    # A few requests prove that everything runs; they do not suffice for a verdict.
    judged = not (args.short or args.peers_only)
    for outcome in all_short(wanted, setup) if args.short else one_by_one(wanted, setup, args.rounds, judged):
        outcomes.append(outcome)
        progress("")
        row = outcome.row
        text = f"{row.name}: FAILED: {outcome.failure}" if outcome.failure else report.block(
            row, outcome.results, outcome.verdicts
        )  # fmt: skip
        print(f"\n{text}", flush=True)

    failed = [outcome.row.name for outcome in outcomes if outcome.failure]
    missed = [
        outcome.row.name for outcome in outcomes if not all(verdict.passed for verdict in outcome.verdicts)
    ]
    if judged:
        print(f"\n{report.summary(outcomes)}")
    if args.json or not args.short:
        path = args.json or ROOT / "bench" / "results" / f"{datetime.now():%Y-%m-%d-%H%M%S}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.as_json(facts, setup, outcomes))
        print(f"\nsamples: {path}  ({time.monotonic() - start:.0f} s)")
    if failed:
        print(f"failed: {', '.join(failed)}")
    if args.strict and missed:
        print(f"missed a target: {', '.join(missed)}")
    return 1 if failed or (args.strict and missed) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
