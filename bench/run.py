#!/usr/bin/python3
"""Runs weir and its peers side by side and prints the table: who, how fast, at what cost, against what was asked.

Why interleaved: A, B, C, A, B, C …, so that a slow minute of the machine hits all of them. Read a ratio, not a number.

    bench/run.py                                 everything, about 25 minutes
    bench/run.py --rows 'file-*' --rounds 3      a part of it
    bench/run.py --peers-only                    what the machine gives without weir
    bench/run.py --short                         seconds: only whether everything runs

Exit status: 0 when everything ran, also where a target was missed; 1 when something failed. `--strict` makes it the
judge of the targets: 1 where a row missed one, and the last lines name these rows.
Never builds anything, and leaves nothing behind but the disk file it reuses and the JSON.
"""

import argparse
import contextlib
import fnmatch
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import nbd

import idle
import inprocess
import limits
import machine
import members
import prefetch
import qcow2
import qmp
import report
import rows
import shares
import simulate
import waits
import watermark
from loads import LoadFailed
from results import Results
from servers import ServerFailed

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
SUBJECTS = (rows, inprocess, qcow2, prefetch, limits, idle, shares, members, waits, watermark, simulate)
ROWS = tuple(row for subject in SUBJECTS for row in subject.ROWS)
# What a row may fail with: a client, a server, a monitor, a connection of our own.
FAILURES = (LoadFailed, ServerFailed, qmp.CommandFailed, nbd.Error)
# A fraction of a second is short enough for a busy machine to do nothing at all in it; a fault fails every time.
SHORT_TRIES = 5
MIB = 1 << 20


@dataclass
class Outcome:
    """What became of one row."""

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
    parser.add_argument("--weir", type=Path, default=TARGET / "release" / "weir", help="the binary to measure")
    parser.add_argument("--peers-only", action="store_true", help="measure without weir")
    parser.add_argument("--short", action="store_true", help="one round, a fraction of a second each")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    parser.add_argument("--directory", type=Path, default=TARGET / "bench", help="where the disk file is kept")
    parser.add_argument("--json", type=Path, help="where to write the samples (default: bench/results/TIME.json)")
    args = parser.parse_args()
    if args.strict and (args.short or args.peers_only):
        parser.error("--strict judges the targets, which --short and --peers-only do not measure")
    return args


def chosen(patterns, peers_only):
    """The rows a list of patterns names, in the table's order; ends the program if one names none."""
    patterns = patterns.split(",")
    for pattern in patterns:
        if not any(fnmatch.fnmatch(row.name, pattern) for row in ROWS):
            sys.exit(f"run.py: --rows: no row is called {pattern} (`run.py --list` shows them)")
    wanted = [row for row in ROWS if any(fnmatch.fnmatch(row.name, pattern) for pattern in patterns)]
    return [row for row in wanted if not (peers_only and row.needs_weir)]


def prepare(args):
    """The setup, with the disk file written: 2 GiB, or 64 MiB where only running counts."""
    if not args.peers_only and not args.weir.exists():
        sys.exit(f"run.py: {args.weir}: no such file (build it with `make build`, or pass --peers-only)")
    size = 64 * MIB if args.short else 2048 * MIB
    args.directory.mkdir(parents=True, exist_ok=True)
    disk = args.directory / f"disk-{size // MIB}M.raw"
    if not disk.exists() or disk.stat().st_size != size:
        write_disk(disk, size)
    return rows.Setup(
        program=None if args.peers_only else args.weir,
        disk=disk,
        size_bytes=size,
        seconds=0.3 if args.short else args.seconds,
        limit_seconds=0.5 if args.short else 10,
        exports=100 if args.short else 1000,
    )


def write_disk(disk, size):
    """Writes random bytes throughout: holes and zeroes are answered by some servers without reading."""
    unfinished = disk.with_suffix(".new")
    with open(unfinished, "wb") as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())
    unfinished.rename(disk)


def measure(row, setup, rounds):
    """Runs one row's contenders in turn, round by round."""
    rounds = max(1, round(rounds * row.rounds_factor))
    with contextlib.ExitStack() as stack:
        contenders = row.contenders(setup, stack)
        samples = {name: [] for name in contenders}
        for number in range(rounds):
            for name, sample in contenders.items():
                progress(f"{row.name} {number + 1}/{rounds} {name}")
                samples[name].append(sample())
    return Results(samples)


def outcome_of(row, setup, rounds, judged, tries):
    """One row's outcome. A row that fails in all tries does not end the table: the others may still be what was wanted."""
    for left in reversed(range(tries)):
        try:
            results = measure(row, setup, rounds)
            break
        except FAILURES as error:
            if left == 0:
                return Outcome(row, failure=str(error))
            print(f"\n{row.name}: once more, after: {error}", flush=True)
    verdicts = [asked.judge(results) for asked in row.asked] if judged else []
    return Outcome(row, results, verdicts)


def progress(text):
    """One line on a terminal, redrawn; silence elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main():
    """Measures and prints; the exit status."""
    # The same clean-up as on Ctrl-C: the servers' `with` blocks end them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = arguments()
    if args.list:
        print("\n".join(f"{row.name:<24}{row.title}" for row in ROWS))
        return 0
    wanted = chosen(args.rows, args.peers_only)
    setup = prepare(args)
    facts = machine.describe(setup)
    print(report.header(facts), flush=True)

    start = time.monotonic()
    outcomes = []
    # Samples of a fraction of a second say that everything runs; they are no ground for a verdict.
    judged = not (args.short or args.peers_only)
    for row in wanted:
        outcome = outcome_of(row, setup, 1 if args.short else args.rounds, judged, SHORT_TRIES if args.short else 1)
        outcomes.append(outcome)
        progress("")
        text = f"{row.name}: FAILED: {outcome.failure}" if outcome.failure else report.block(
            row, outcome.results, outcome.verdicts
        )  # fmt: skip
        print(f"\n{text}", flush=True)

    failed = [outcome.row.name for outcome in outcomes if outcome.failure]
    missed = [outcome.row.name for outcome in outcomes if not all(verdict.passed for verdict in outcome.verdicts)]
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
