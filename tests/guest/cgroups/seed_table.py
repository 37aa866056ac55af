"""The eight cases of io-throttle v16's table: two streams of writes with limits of 4 and 2 MB/s,
hard or from a watermark on.

The table's author had a disk of 22 MB/s; here the guest's has a little less than 20. Asserts that
hard limits hold at the device, and that above a watermark the whole disk is used in the proportion
of the limits (the table: 14.0 to 11.0 for limits of 4:2).
"""

import json

import streams
from commands import limit, weir
from outcome import fact, least, near
from watermark import SEED, UNLIMITED  # bench/watermark.py repeats the same table with weir's own disks

LIMITS = (4_000_000, 2_000_000)
TOLERANCE = {"direct": 0.02, "cached": 0.05}
# The tolerance applies to 30 s. In addition, one piece more or less counts: the kernel writes a
# file back in requests of up to 8 MiB, each of which is charged at once.
SECONDS = {"direct": 6, "cached": 12}
FULL_SECONDS = 30
PIECE = {"direct": 0, "cached": 8 << 20}
# 32 requests of 1 MiB are in flight: at 20 MB/s they take 1.7 s, so that one more or less matters
# in two seconds (4 % less was measured, and then a watermark leaves a seventh of the disk unused).
PROBE_SECONDS = 5
# Minimum share of the unlimited throughput with a watermark, and tolerance of the unlimited and the
# probed throughput. The watch finds the permitted rate in steps, which are a larger part of a short
# window.
LEAST_SHARE, LEAST_SHARE_SHORT, SPEED = 0.95, 0.90, 0.05
# Minimum factor of both limits together: the throughput of a buffered stream above the watermark is
# steady only over 30 s.
LIFTED = 1.5
# Omitted in the short form: similar cases cover the same, and buffered ones take the longest.
LONG = (("cached", None), ("cached", 100))
ORDER = [(mode, watermark) for watermark in (None, 0, 90, 100) for mode in ("cached", "direct")]


class SeedTable:
    """The cases and their measurements so far."""

    def __init__(self, disk, full):
        self.guest = None  # set by the runner
        self.disk = disk
        self.full = full
        self.measured = {}
        self.probe_line = weir(
            "probe",
            "--accept",
            f"/mnt/{disk.name}",
            "--seconds",
            PROBE_SECONDS,
            "--size",
            "32M",
            "--state",
            "/run/weir/state",
        )

    def cases(self):
        """Name and function of each case."""
        yield "throughput of the disk, for its watermark", self.probe
        for number, (mode, watermark) in enumerate(ORDER, 1):
            if not self.full and (mode, watermark) in LONG:
                continue
            label = (
                UNLIMITED if watermark is None else f"limits 4 and 2 MB/s, watermark {watermark}"
            )
            yield (
                f"{number}: {mode}, {label}",
                lambda mode=mode, watermark=watermark: self.case(mode, watermark),
            )

    def probe(self):
        """The basis of a watermark: the device's throughput, as measured by weir."""
        throughput = json.loads(self.guest.run(f"{self.probe_line} --json"))["capacity"][
            "write-bps"
        ]
        return [near("throughput measured by `weir probe`", throughput, self.disk.bps, SPEED)]

    def case(self, mode, watermark):
        """Measures one case and checks it."""
        rates, left = self.measure(mode, watermark)
        (first, second), total = rates.groups, rates.disk
        if watermark is None:
            # Otherwise the disk is not the bottleneck, and a watermark on its utilization means
            # nothing.
            return [near("throughput of the disk", total, self.disk.bps, SPEED)]
        removed = fact("limits after their removal", left == "", repr(left), "none left in io.max")
        if watermark == 0:
            return [
                near("dd 1", first, LIMITS[0], self.tolerance(mode, 1, LIMITS[0])),
                near("dd 2", second, LIMITS[1], self.tolerance(mode, 1, LIMITS[1])),
                # The file system's own writes are in addition, and are charged to no group.
                near(
                    "throughput of the disk",
                    total,
                    sum(LIMITS),
                    self.tolerance(mode, 2, sum(LIMITS)) + 0.01,
                ),
                removed,
            ]
        if mode == "cached" and not self.full:
            return [
                least("throughput of the disk above the watermark", total, LIFTED * sum(LIMITS)),
                # Nor is its proportion: a stream may be ahead by some pieces of 8 MiB at both ends
                # of a short window. The direct streams check it.
                *(
                    least(f"dd {number}", rate, (1 - self.tolerance(mode, 1, bps)) * bps)
                    for number, (rate, bps) in enumerate(zip(rates.groups, LIMITS), 1)
                ),
                removed,
            ]
        least_share = LEAST_SHARE if self.full else LEAST_SHARE_SHORT
        return [
            least("throughput of the disk", total, least_share * self.unlimited(mode)),
            near(
                "ratio of dd 1 to dd 2",
                first / max(second, 1),
                LIMITS[0] / LIMITS[1],
                0.10,
                unit="to 1",
                scale=1,
            ),
            removed,
        ]

    def tolerance(self, mode, pieces, limit_bps):
        """Relative tolerance of a rate: the general one, and this number of pieces in the window.
        """
        return TOLERANCE[mode] + pieces * PIECE[mode] / (limit_bps * self.seconds(mode))

    def seconds(self, mode):
        """Length of the window of a case."""
        return FULL_SECONDS if self.full else SECONDS[mode]

    def unlimited(self, mode):
        """Throughput of both streams without limits; measured now if that case did not run."""
        if (mode, None) not in self.measured:
            self.measure(mode, None)
        return self.measured[mode, None].disk

    def measure(self, mode, watermark):
        """The rates of both streams, and the limits left in io.max afterwards."""
        body = streams.two_streams(self.disk, mode, self.seconds(mode))
        end = streams.end(self.disk)
        if watermark is not None:
            limits = (
                limit(group, self.disk, "--bps-write", rate, "--watermark", watermark)
                for group, rate in zip(streams.GROUPS, LIMITS)
            )
            body = "\n".join([*limits, body])
        if watermark:
            # Hard limits need only the kernel: no watch runs. The probe is missing if this case
            # runs alone.
            body = f"ls $state/* >/dev/null 2>&1 || {self.probe_line}\nwatch_start\n{body}\nwatch_stop"
        body = f"{body}\n{end}\npart left\ncat $cgroups/a/io.max $cgroups/b/io.max"
        parts = self.guest.parts(body, end)
        rates = self.measured[mode, watermark] = streams.Rates.of(parts["window"])
        return rates, parts["left"].strip()

    def lines(self):
        """The table, beside the original one."""
        heading = f"{'MB/s':<44} {'dd 1':>7} {'dd 2':>7} {'device':>7} {'dd1:dd2':>8}"
        yield f"{heading}   {'seed: dd 1':>10} {'dd 2':>6} {'dd1:dd2':>8}"
        for number, (mode, watermark) in enumerate(ORDER, 1):
            rates = self.measured.get((mode, watermark))
            if rates is None:
                continue
            label = "unlimited" if watermark is None else f"4 and 2 MB/s, watermark {watermark}"
            first, second = (rate / 1e6 for rate in rates.groups)
            proportion = first / max(second, 1e-9)
            original = SEED[mode, watermark]
            yield (
                f"{number} {mode:<7} {label:<34} {first:7.2f} {second:7.2f} {rates.disk / 1e6:7.2f} {proportion:8.2f}"
                f"   {original[0]:10.1f} {original[1]:6.1f} {original[0] / original[1]:8.2f}"
            )
