"""Rows of `weir bench` beside `qemu-img bench`: equal options, the same file, the figures printed
by each.

Sequential reads of 4 KiB, the default of both. Past the page cache the disk answers, and the
overhead of the programs is compared; in the page cache only the programs matter. tests/bench.rs
asserts that both access the same bytes.

Never writes to the images.
"""

from qcow2 import Image, bench_sample, path_of
from results import Faster
from rows import WEIR, Row, settle, warm

# I/O methods by cache mode; Linux AIO works only past the page cache.
QEMU = {
    "none": ("qemu-img native", "qemu-img io_uring"),
    "writeback": ("qemu-img threads", "qemu-img io_uring"),
}
BLOCK = 4096
# Requests per second that the disk or memory serves, by requests in flight; determines the number
# of requests of a sample.
RATES = {"none": {1: 8_000, 8: 40_000, 64: 60_000}, "writeback": {1: 60_000, 8: 100_000, 64: 150_000}}


def count(setup, cache, depth):
    """Number of requests of a sample, at most the number of blocks."""
    return min(max(256, int(setup.seconds * RATES[cache][depth])), setup.size_bytes // BLOCK)


def side_by_side(form, cache, depth):
    """Both tools, with equal options."""

    def contenders(setup, _stack):
        path = setup.disk if form == "raw" else path_of(setup, Image("random", setup.size_bytes))
        requests = count(setup, cache, depth)
        options = ["-f", form, "-t", cache, "-d", depth, "-c", requests, "-s", BLOCK]

        def on(*tool):
            def sample():
                (settle if cache == "none" else warm)(path)
                return bench_sample([*tool, *options, path], requests)

            return sample

        theirs = {name: on("qemu-img", "bench", "-i", name.split()[1]) for name in QEMU[cache]}
        ours = {WEIR: on(setup.program, "bench")} if setup.program else {}
        return ours | theirs

    return contenders


def _row(form, cache, depth):
    factor = 1.5 if (cache, depth) == ("writeback", 64) else 1.0
    where = "past the page cache" if cache == "none" else "from the page cache"
    return Row(
        f"bench-{form}-{cache}-{depth}",
        f"weir bench and qemu-img bench, 4 KiB reads {where}, {form}, depth {depth}",
        side_by_side(form, cache, depth),
        (Faster(WEIR, factor, QEMU[cache]),),
    )


ROWS = tuple(
    _row(form, cache, depth)
    for form in ("raw", "qcow2")
    for cache in ("none", "writeback")
    for depth in (1, 8, 64)
)
