"""The eight cases of io-throttle v16's table: two streams of writes, 4 and 2 MB/s asked, hard or from a watermark on.

The table's author had a disk of 22 MB/s; here QEMU gives 20. What is asked: hard limits are kept at the device; with a watermark,
which the streams pass, the whole disk is used in the limits' proportion (the table: 14.0 to 11.0 where 4:2 was asked).
"""

import json
import shlex

import streams
from commands import STATE, Watch, limit, unlimit, weir
from outcome import fact, least, near
from watermark import SEED, UNLIMITED  # bench/watermark.py repeats the same table with weir's own disks

ASKED = (4_000_000, 2_000_000)
TOLERANCE = {"direct": 0.02, "cached": 0.05}
# Promised for 30 s. A shorter window is compared with the same figures: it is long enough beside the pieces that pass.
SECONDS = {"direct": 6, "cached": 12}
FULL_SECONDS = 30
# Of the unlimited throughput with a watermark, and what the unlimited and the probed disk may be off. In the short form, which has to pass
# on a machine that does other work too, the limits and their proportion are judged as in the full one, and of the speed only that it is there.
LEAST_SHARE, LEAST_SHARE_SHORT = 0.95, 0.5
SPEED, SPEED_SHORT = 0.05, 0.5
# 32 requests of 1 MiB are in flight: at 20 MB/s they take 1.7 s, so that in one second few end.
PROBE_SECONDS, PROBE_SECONDS_FULL = 2, 5
# A watermark is as right as what it goes by. On a busy machine the guest is at times too slow to be answered: then it is measured again.
PROBES, PROBED_WELL = 4, 0.02
ORDER = [(mode, watermark) for watermark in (None, 0, 90, 100) for mode in ("cached", "direct")]


class SeedTable:
    """The cases, and what they have measured so far."""

    def __init__(self, guest, disk, full):
        self.guest = guest
        self.disk = disk
        self.full = full
        self.measured = {}

    def cases(self):
        """Name and function of each."""
        yield "what the disk can do, for its watermark", self.probe
        for number, (mode, watermark) in enumerate(ORDER, 1):
            named = UNLIMITED if watermark is None else f"limits 4 and 2 MB/s, watermark {watermark}"
            yield f"{number}: {mode}, {named}", lambda mode=mode, watermark=watermark: self.case(mode, watermark)

    def probe(self):
        """What a watermark goes by: QEMU's figure, as weir measures it."""
        for _ in range(PROBES):
            told = json.loads(weir(self.guest, *self.probing(), "--json"))["capacity"]["write-bps"]
            if abs(told / self.disk.bps - 1) <= PROBED_WELL:
                break
        return [near("bytes written per second", told, self.disk.bps, self.speed())]

    def probing(self):
        """The words of that command."""
        seconds = PROBE_SECONDS_FULL if self.full else PROBE_SECONDS
        return ("probe", self.disk.mount, "--seconds", seconds, "--size", "32M", "--state", STATE)

    def case(self, mode, watermark):
        """Measures one, and judges it."""
        rates = self.measured[mode, watermark] = self.measure(mode, watermark)
        (first, second), total = rates.groups, rates.disk
        if watermark is None:
            # Otherwise the disk is not what limits, and a watermark on its use says nothing.
            return [near("the whole disk", total, self.disk.bps, self.speed())]
        if watermark == 0:
            tolerance = TOLERANCE[mode]
            return [
                near("dd 1", first, ASKED[0], tolerance),
                near("dd 2", second, ASKED[1], tolerance),
                # What the file system writes for both comes on top, and is charged to nobody.
                near("the disk", total, sum(ASKED), tolerance + 0.01),
            ]
        if (mode, None) not in self.measured:
            self.measured[mode, None] = self.measure(mode, None)
        unlimited = self.measured[mode, None].disk
        return [
            least("the whole disk", total, (LEAST_SHARE if self.full else LEAST_SHARE_SHORT) * unlimited),
            near("dd 1 to dd 2", first / max(second, 1), ASKED[0] / ASKED[1], 0.10, unit="to 1", scale=1),
        ]

    def speed(self):
        """How far off the disk's speed may be."""
        return SPEED if self.full else SPEED_SHORT

    def measure(self, mode, watermark):
        """The rates of both streams."""
        seconds = FULL_SECONDS if self.full else SECONDS[mode]
        if watermark is None:
            return streams.two_streams(self.guest, self.disk, mode, seconds)
        for group, rate in zip(streams.GROUPS, ASKED):
            limit(self.guest, group, self.disk, "--bps-write", rate, "--watermark", watermark)
        try:
            if watermark == 0:
                # Hard limits are the kernel's alone: they hold with nobody watching.
                return streams.two_streams(self.guest, self.disk, mode, seconds, before_stop=self.unlimit)
            # Not there if this case is run alone, or in a machine that was started again.
            probing = shlex.join(map(str, ("weir", *self.probing())))
            self.guest.run(f"ls {STATE}/* >/dev/null 2>&1 || {probing}")
            with Watch(self.guest):
                return streams.two_streams(self.guest, self.disk, mode, seconds, before_stop=self.unlimit)
        finally:
            self.unlimit()

    def unlimit(self):
        """Takes both limits away: what a buffered stream left behind would else take as long as it was limited to."""
        unlimit(self.guest, self.disk, *streams.GROUPS)

    def after_unlimit(self):
        """That nothing is left in the kernel."""
        left = self.guest.run("cat $cgroups/a/io.max $cgroups/b/io.max").strip()
        return [fact("limits that were removed", left == "", repr(left), "none left in io.max")]

    def lines(self):
        """The table, beside the seed's."""
        yield f"{'MB/s':<44} {'dd 1':>7} {'dd 2':>7} {'device':>7} {'dd1:dd2':>8}   {'seed: dd 1':>10} {'dd 2':>6} {'dd1:dd2':>8}"
        for number, (mode, watermark) in enumerate(ORDER, 1):
            rates = self.measured.get((mode, watermark))
            if rates is None:
                continue
            named = "unlimited" if watermark is None else f"4 and 2 MB/s, watermark {watermark}"
            first, second = (rate / 1e6 for rate in rates.groups)
            theirs = SEED[mode, watermark]
            yield (
                f"{number} {mode:<7} {named:<34} {first:7.2f} {second:7.2f} {rates.disk / 1e6:7.2f} {first / max(second, 1e-9):8.2f}"
                f"   {theirs[0]:10.1f} {theirs[1]:6.1f} {theirs[0] / theirs[1]:8.2f}"
            )
