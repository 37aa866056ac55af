"""Control groups that share one limit: by weight while both have demand, all of it for a single
busy one.
"""

import streams
from bursts import DECISIONS, in_time
from commands import limit
from outcome import near

RATE = 6_000_000
WEIGHTS = (200, 100)
TOLERANCE = 0.05


class Sharing:
    """The case, on one disk that is faster than the limit."""

    def __init__(self, disk):
        self.guest = None  # set by the runner
        self.disk = disk

    def cases(self):
        """Name and function."""
        yield "two groups, 6 MB/s together, weights 200 and 100", self.shared

    def shared(self):
        """The rates while both write, and that of the first group alone."""
        disk = self.disk
        parts = self.guest.parts(
            f"""
                {limit("a", disk, "--bps-write", RATE, "--group", "tenant", "--weight", WEIGHTS[0])}
                {limit("b", disk, "--group", "tenant", "--weight", WEIGHTS[1])}
                watch_start
                {streams.start(disk, "direct")}
                pause 2
                part both
                {streams.window(disk, 6)}
                kill_group b
                pause 1
                part alone
                {streams.window(disk, 4, ("a",))}
                part decisions
                {DECISIONS}
                watch_stop
            """,
            streams.end(disk),
        )
        both, alone = streams.Rates.of(parts["both"]), streams.Rates.of(parts["alone"])
        first, second = both.groups
        proportion = WEIGHTS[0] / WEIGHTS[1]
        return [
            near("rate of both groups together", first + second, RATE, TOLERANCE),
            near(
                "ratio of the first group to the second",
                first / max(second, 1),
                proportion,
                0.10,
                unit="to 1",
                scale=1,
            ),
            near("rate of the first group alone", alone.groups[0], RATE, TOLERANCE),
            in_time(parts["decisions"]),
        ]
