"""Rows that repeat the table of io-throttle v16: two streams of writes with limits of 4 and 2 MB/s,
on a disk with 22 MB/s.

The device is slowed to 22 MB/s, the speed of the disk of the table's author; other properties of
his host do not matter here. There are two modes: on his host, the page cache was between a stream
and the limit. A guest's page cache has the same effect on its virtual disk: `cached` is a writer
that keeps many requests in flight, on a disk with cache mode writeback; `direct` has one in flight
at a time, as `dd oflag=direct`, on one with cache mode none.

Never claims the table's absolute figures: the targets are the limits at watermark 0, and above it
the whole disk in their proportion. The table itself did not reach that (14.0 to 11.0 MB/s for
limits of 4:2).
"""

import groups
import loads
from limits import lasting, passed_per_second
from loads import Load
from results import About, Faster
from rows import Row

# As dd's streams: 1 MiB a write. Its 4 and 2 MB/s were multiples of 1024², as are the disk's 22.
BLOCK_BYTES = 1 << 20
SHORT_BLOCK_BYTES = 1 << 16
STREAM_BYTES = 64 << 20
RATE = "bytes=22M,shared=slow"
LIMITS_MIB = (4, 2)
MODES = {"direct": ("none", 1), "cached": ("writeback", 16)}
COLUMNS = ("first_mbps", "second_mbps", "proportion", "total_mbps")
UNLIMITED = "unlimited"
TABLE = "v16"
# MB/s of the two streams, by mode and watermark; None is without limits.
SEED = {
    ("cached", None): (19.7, 21.1),
    ("direct", None): (12.0, 11.7),
    ("cached", 0): (6.3, 2.4),
    ("direct", 0): (4.2, 2.1),
    ("cached", 90): (32.0, 21.4),
    ("direct", 90): (14.0, 11.0),
    ("cached", 100): (28.2, 23.4),
    ("direct", 100): (14.3, 11.7),
}
# Shares of a sample of a limit: excluded while the utilization is being measured, and measured.
SETTLE, MEASURE = 0.2, 0.6


def megabytes(value):
    """A rate in MB/s."""
    return f"{value:.2f} MB/s"


def figures(first, second):
    """A sample of two streams, in MB/s."""
    return {
        "first_mbps": first,
        "second_mbps": second,
        "total_mbps": first + second,
        "proportion": first / second,
    }


def from_table(mode, watermark):
    """The figures of the table, in place of a sample."""
    # Without a total: the streams did not end together, so their sum is not a rate of the disk.
    both = figures(*SEED[mode, watermark])
    return lambda: {key: both[key] for key in COLUMNS if key != "total_mbps"}


def streams(directory):
    """The two images, written once: a stream must not meet a hole or extend a file."""
    for number in (1, 2):
        path = directory / f"stream{number}.raw"
        if not path.exists() or path.stat().st_size != STREAM_BYTES:
            path.write_bytes(bytes(STREAM_BYTES))
        yield path


def config(images, mode, watermark):
    """The two disks on one slow device; without limits if the watermark is None."""
    tables = []
    for number, (image, limit) in enumerate(zip(images, LIMITS_MIB, strict=True), 1):
        keys = {"image": str(image), "format": "raw", "cache": MODES[mode][0], "rate": RATE}
        if watermark is not None:
            tables.append(
                groups.table(f"group.cgrp{number}", {"bps-total": f"{limit}M", "watermark": watermark})
            )
            keys["group"] = f"cgrp{number}"
        tables.append(groups.table(f"disk.dd{number}", keys))
    return "\n".join(tables)


def two_streams(mode, watermark):
    """Contenders: without limits, with them, and the figures of the table."""

    def contenders(setup, _stack):
        images = list(streams(setup.disk.parent))
        # At 2 MB/s a fraction of a second is too short for two writes of a whole MiB.
        block_bytes = BLOCK_BYTES if setup.limit_seconds > 1 else SHORT_BLOCK_BYTES
        load = Load("write", MODES[mode][1], block_bytes=block_bytes)

        def sample(level):
            skip, measured = SETTLE * setup.limit_seconds, MEASURE * setup.limit_seconds
            with groups.weir_from(setup.program, config(images, mode, level)) as daemon:
                jobs = [(load, daemon.uri_of(f"dd{number}")) for number in (1, 2)]
                times_ms = loads.together(jobs, lasting(measured, skip * 1000))
            passed = [passed_per_second(times, skip * 1000, measured * 1000) for times in times_ms]
            return figures(*(rate * block_bytes / 1e6 for rate in passed))

        return {
            UNLIMITED: lambda: sample(None),
            f"{TABLE}, {UNLIMITED}": from_table(mode, None),
            f"watermark {watermark}": lambda: sample(watermark),
            f"{TABLE}, {watermark}": from_table(mode, watermark),
        }

    return contenders


def targets_of(watermark):
    """Targets: the limits at watermark 0; else the whole disk, in their proportion."""
    contender = f"watermark {watermark}"
    if watermark == 0:
        wanted = [limit * 1.048576 for limit in LIMITS_MIB]
        keys = ("first_mbps", "second_mbps")
        return tuple(
            About(contender, rate, 0.01, key, megabytes)
            for rate, key in zip(wanted, keys, strict=True)
        )
    proportion = LIMITS_MIB[0] / LIMITS_MIB[1]
    return (
        Faster(contender, 0.95, (UNLIMITED,), key="total_mbps"),
        About(contender, proportion, 0.05, "proportion", "{:.2f}".format),
    )


def _row(mode, watermark):
    return Row(
        f"watermark-{watermark}-{mode}",
        f"two streams of writes, limits 4 and 2 MB/s, {mode}, a disk of 22 MB/s; v16: io-throttle's own figures",
        two_streams(mode, watermark),
        targets_of(watermark),
        columns=COLUMNS,
        needs_weir=True,
        rounds_factor=0.4,
    )


ROWS = tuple(_row(mode, watermark) for watermark in (0, 90, 100) for mode in MODES)
