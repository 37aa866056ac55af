"""Control groups that share one limit: by weight where both want more than there is, all of it for one that is alone."""

import streams
from bursts import soon, took
from commands import Watch, limit, unlimit
from outcome import near

RATE = 6_000_000
WEIGHTS = (200, 100)
TOLERANCE = 0.05


class Sharing:
    """The case, on one disk that is faster than the limit."""

    def __init__(self, guest, disk, full):
        self.guest = guest
        self.disk = disk
        self.full = full

    def cases(self):
        """Name and function."""
        yield "two groups, 6 MB/s together, weights 200 and 100", self.shared

    def shared(self):
        """The rates while both write, and of the first when it is alone."""
        guest, disk = self.guest, self.disk
        try:
            limit(guest, "a", disk, "--bps-write", RATE, "--group", "tenant", "--weight", WEIGHTS[0])
            limit(guest, "b", disk, "--group", "tenant", "--weight", WEIGHTS[1])
            with Watch(guest) as watch:
                guest.run(f"{streams.start(disk, 'direct')}\npause 2")
                both = streams.Rates.of(streams.measure(guest, disk, 6))
                guest.run("kill_group b; pause 1")
                alone = streams.Rates.of(streams.measure(guest, disk, 4, groups=("a",)))
                decisions = took(watch.log())
        finally:
            guest.run("kill_group a b")
            unlimit(guest, disk, "a", "b")
            streams.stop(guest, disk)
        first, second = both.groups
        proportion = WEIGHTS[0] / WEIGHTS[1]
        return [
            near("both together", first + second, RATE, TOLERANCE),
            near("the first to the second", first / max(second, 1), proportion, 0.10, unit="to 1", scale=1),
            near("the first alone", alone.groups[0], RATE, TOLERANCE),
            soon(decisions, self.full),
        ]
