#!/usr/bin/python3
"""The demonstration: a real disk with a limit and a burst under the load of another process, shown
as it runs.

weir serves a raw image over NBD with 1000 operations a second, bursts of 5000, and a bucket that
holds five seconds of burst. fio reads as fast as it can. The completed operations are printed
second by second, then as a table and a chart: expected against measured.

Usage: bench/demo.py [WEIR] (`make demo` builds the binary and installs the clients first)

Exit status 0 if every phase is within two percent of the expected rate, else 1. Leaves no files
behind, also on Ctrl-C. Needs 1 GiB of disk for half a minute.
"""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import chart
import servers
from loads import LoadFailed, Load, fio_argv, over_nbd

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
MIB = 1 << 20
IMAGE_BYTES = 1024 * MIB
RATE, BURST, LENGTH = 1000, 5000, 5
SECONDS = 24
TOLERANCE = 0.02
LIMIT = ("--iops-total", RATE, "--iops-total-max", BURST, "--iops-total-max-length", LENGTH)

# The bucket holds LENGTH seconds of burst and leaks at the rate meanwhile, so a burst lasts a
# little longer than LENGTH. A tenth of a second of burst is admitted at once, before its own bucket
# takes effect; that part of the bucket is used up.
BURST_SECONDS = (BURST * LENGTH - BURST / 10) / (BURST - RATE)


@dataclass(frozen=True)
class Phase:
    """A part of the run with one expected rate, without its edges, where the rate changes."""

    name: str
    expected: int
    start_s: float
    end_s: float


PHASES = (
    Phase("burst", BURST, 0.1, BURST_SECONDS - 0.2),
    Phase("limit", RATE, BURST_SECONDS + 0.2, SECONDS),
)


def expected_in(second):
    """Expected operations in one whole second, including a change in the middle of it."""
    burst = min(max(BURST_SECONDS - second, 0), 1)
    return burst * BURST + (1 - burst) * RATE + (BURST / 10 if second == 0 else 0)


def write_image(path):
    """Writes the image completely: a hole would be answered without the disk."""
    block = os.urandom(MIB)
    with open(path, "wb") as file:
        for _ in range(IMAGE_BYTES // MIB):
            file.write(block)
        os.fsync(file.fileno())


def drive(uri, directory):
    """Runs fio to its end and shows each second; returns the completion times of requests in
    milliseconds.
    """
    load = Load("randread", 32)
    argv = [
        *fio_argv(load, over_nbd(uri), SECONDS),
        "--disable_clat=1", "--disable_slat=1", f"--write_lat_log={directory}/completions",
        "--output-format=terse", "--terse-version=3", "--status-interval=1",
    ]  # fmt: skip
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        try:
            show_live(client.stdout)
            error = client.stderr.read()
        except BaseException:
            client.terminate()
            raise
    if client.returncode != 0:
        raise LoadFailed(f"fio ended with {client.returncode}: {error}")
    lines = Path(directory, "completions_lat.1.log").read_text().splitlines()
    return [int(line.split(",", 1)[0]) for line in lines]


def show_live(lines):
    """Prints a line for each of fio's status lines, which count from its start."""
    shown_ms, shown_kib = 0, 0
    for line in lines:
        fields = line.split(";")
        # fio's NBD engine also prints that it is connected.
        if fields[0] != "3":
            continue
        # fio's terse format, version 3: total KiB read is field 6, the elapsed time in ms field 9.
        kib, now_ms = int(fields[5]), int(fields[8])
        # The last line repeats the sum at the end of the run.
        if now_ms - shown_ms < 500:
            continue
        rate = (kib - shown_kib) / 4 * 1000 / (now_ms - shown_ms)
        shown_ms, shown_kib = now_ms, kib
        print(f"  {now_ms / 1000:>4.0f} s {rate:>7,.0f} IOPS  {chart.bar(rate, BURST * 1.1, 50)}", flush=True)


def table(times_ms):
    """The lines of the table, and True if every phase is close enough."""
    lines, good = (
        [f"  {'phase':<8}{'from':>8}{'to':>8}{'expected':>10}{'measured':>12}{'off by':>9}"],
        True,
    )
    for phase in PHASES:
        inside = [time for time in times_ms if phase.start_s * 1000 <= time < phase.end_s * 1000]
        measured = len(inside) / (phase.end_s - phase.start_s)
        off = measured / phase.expected - 1
        good = good and abs(off) <= TOLERANCE
        span = f"{phase.start_s:>6.1f} s{phase.end_s:>6.1f} s"
        lines.append(f"  {phase.name:<8}{span}{phase.expected:>10,}{measured:>12,.1f}{off:>+9.2%}")
    return lines, good


def picture(times_ms):
    """The lines of the chart."""
    counts = [0] * SECONDS
    for time in times_ms:
        if time < SECONDS * 1000:
            counts[time // 1000] += 1
    expected = [expected_in(second) for second in range(SECONDS)]
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return chart.columns(counts, expected, step=500, height=13, colour=colour)


def demonstrate(program):
    """Runs the demonstration; returns the exit status."""
    # Beside the build, not in /tmp, which may be in memory.
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="demo.", dir=TARGET) as directory:
        image = Path(directory, "disk.raw")
        print("Writing a disk of 1 GiB …", flush=True)
        write_image(image)
        options = [str(word) for word in LIMIT]
        print(f"Serving: weir serve disk.raw --format raw --cache none \\\n    {' '.join(options)}")
        with servers.Server(servers.weir_file(program, image, *options)) as server:
            print(f"Loading it for {SECONDS} s: fio, 4 KiB random reads over NBD, 32 in flight\n", flush=True)
            times_ms = drive(server.uri, directory)

    lines, good = table(times_ms)
    print(
        "\n".join(
            [
                "",
                *lines,
                "",
                "  IOPS: measured █, expected ▁ (a bar that meets it ends under the line)",
            ]
        )
    )
    print("\n".join(picture(times_ms)))
    print(
        f"\n  The bucket holds {LENGTH} s of {BURST}/s and leaks {RATE}/s meanwhile: the burst lasts {BURST_SECONDS:.1f} s."
    )
    print(f"  {'The limit holds.' if good else 'The limit does NOT hold within 2 %.'}")
    return 0 if good else 1


def main():
    """Runs the demonstration; every exit runs the clean-up of the `with` blocks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    program = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET / "release" / "weir"
    if not program.exists():
        print(f"demo: {program}: no such file (run `make demo`, which builds it)", file=sys.stderr)
        return 1
    try:
        return demonstrate(program)
    except KeyboardInterrupt:
        print("\ndemo: interrupted, all files are removed", file=sys.stderr)
        return 130
    except (LoadFailed, servers.ServerFailed) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
