"""A burst, and what becomes of it when the watch that runs it is killed.

The bucket (crates/policy/src/throttle/bucket.rs) holds 5 s of 20M and leaks at 4M meanwhile, so that a burst lasts
100 / (20 - 4) = 6.25 s. The kernel knows nothing of it: the watch tells it the burst's rate, and the limit's afterwards.
"""

import re
from statistics import median

import streams
from commands import Watch, limit, unlimit
from outcome import Check, by_now, contains, fact, most, near

MIB = 1 << 20
RATE, BURST, LENGTH = 4 * MIB, 20 * MIB, 5
BURST_SECONDS = BURST * LENGTH / (BURST - RATE)
OPTIONS = ("--bps-write", "4M", "--bps-write-max", "20M", "--bps-write-max-length", LENGTH)
TOLERANCE = 0.05
# A decision is to be in io.max so soon.
DECISION_SECONDS = 0.05
# The hard limit is to be in io.max so soon after the watch was killed.
GUARD_SECONDS = 1.0
# Of one write: direct, one in flight, and 20 MiB/s are 80 of them.
BLOCK = "256k"


def passed(taken, begin, end):
    """Bytes per second of the first group between two instants."""
    return streams.rate([(sample.seconds, sample.groups[0]) for sample in taken if begin <= sample.seconds <= end])


def length(taken, start):
    """Seconds that passed at the burst's rate, if all the rest passed at the limit's: total = burst · length + rate · rest."""
    total, whole = taken[-1].groups[0] - taken[0].groups[0], taken[-1].seconds - start
    return (total - RATE * whole) / (BURST - RATE)


def begun(taken):
    """The instant of the last sample before anything passed."""
    return max(sample.seconds for sample in taken if sample.groups[0] == taken[0].groups[0])


def io_max(line_rate):
    """How io.max shows a limit on written bytes."""
    return f"wbps={line_rate} "


def took(log):
    """How long decisions took to be in io.max, in seconds, as the watch says itself."""
    return [int(number) / 1e6 for number in re.findall(r" told .*after_us=([0-9]+)", log)]


def soon(decisions, full):
    """The check that decisions are in io.max as soon as they should: each of them, or, where the machine may stop for a moment, most.

    One stop of 50 ms among a hundred decisions is nothing that a machine could be seen to stand still by.
    """
    which, of = ("the longest", max) if full else ("the median", median)
    what = f"a decision's way into io.max, {which}"
    if not decisions:
        return Check(what, False, "none in the watch's log", "at least one")
    return most(what, of(decisions), DECISION_SECONDS, unit="ms", scale=1e-3)


class Bursts:
    """The cases, on one disk that is faster than the burst."""

    def __init__(self, guest, disk, full):
        self.guest = guest
        self.disk = disk
        self.full = full
        self.tried = 0

    def cases(self):
        """Name and function of each."""
        yield "a burst: 4M/s, 20M/s for 5 s", self.burst
        yield "the watch killed in a burst, with all in its group", self.killed
        yield "a group made again under the watch", self.made_again
        yield "a command that steers while no watch does", self.stands_in

    def new_group(self):
        """A control group that has not used its burst: what one has used is remembered for as long as it takes to leak."""
        self.tried += 1
        name = f"burst{self.tried}"
        self.guest.run(f"mkdir $cgroups/{name}")
        limit(self.guest, name, self.disk, *OPTIONS)
        return name

    def remove(self, name):
        """Ends its stream, and removes limit and group."""
        self.guest.run(f"kill_group {name}")
        unlimit(self.guest, self.disk, name)
        streams.stop(self.guest, self.disk, (name,))
        self.guest.run(f"rmdir $cgroups/{name}")

    def burst(self):
        """The rate in the burst and after it."""
        seconds = 11
        name = self.new_group()
        try:
            with Watch(self.guest) as watch:
                begin = streams.start(self.disk, "direct", (name,), BLOCK)
                taken = streams.samples(self.guest.run(f"{begin}\n{self.sampling(name, seconds)}"))
                decisions = took(watch.log())
        finally:
            self.remove(name)
        start = begun(taken)
        rate, after = passed(taken, start, start + LENGTH), passed(taken, start + BURST_SECONDS + 0.3, start + seconds)
        return [
            near("its first 5 s", rate, BURST, TOLERANCE, unit="MiB/s", scale=MIB),
            near("after it", after, RATE, TOLERANCE, unit="MiB/s", scale=MIB),
            near("its length", length(taken, start), BURST_SECONDS, TOLERANCE, unit="s", scale=1),
            soon(decisions, self.full),
        ]

    def killed(self):
        """How soon the hard limit is back, and that the next watch does not begin a burst from the start."""
        name = self.new_group()
        try:
            with Watch(self.guest) as watch:
                self.guest.run(f"{streams.start(self.disk, 'direct', (name,), BLOCK)}\npause 3")
                during = self.guest.run(f"cat $cgroups/{name}/io.max")
                killed = watch.kill()
                settled = self.settled(name, killed)
                hard = streams.samples(self.guest.run(self.sampling(name, 3)))
            with Watch(self.guest):
                taken = streams.samples(self.guest.run(self.sampling(name, 6)))
            after = self.guest.run(f"cat $cgroups/{name}/io.max")
        finally:
            self.remove(name)
        return [
            by_now("io.max in the burst", during, io_max(BURST)),
            most("the hard limit back after", settled - killed, GUARD_SECONDS, unit="s"),
            near("what passes then", streams.Rates.of(hard).groups[0], RATE, TOLERANCE, unit="MiB/s", scale=MIB),
            # Some 3.5 s of it were spent before; what leaked while nobody watched is a second or so.
            most("burst of the next watch", length(taken, taken[0].seconds), BURST_SECONDS - 2, unit="s"),
            by_now("io.max when it has ended", after, io_max(RATE)),
        ]

    def made_again(self):
        """A group of the same name has the limits of the one before, and nobody is warned of it: a service that is started anew."""
        name = self.new_group()
        try:
            with Watch(self.guest) as watch:
                before = self.guest.run(f"pause 1; cat $cgroups/{name}/io.max")
                after = self.guest.run(f"rmdir $cgroups/{name}; mkdir $cgroups/{name}; pause 3; cat $cgroups/{name}/io.max")
                log = watch.log()
        finally:
            self.remove(name)
        warnings = [line for line in log.splitlines() if " WARN " in line]
        return [
            by_now("io.max with a burst to spend", before, io_max(BURST)),
            by_now("io.max of the one made again", after, io_max(BURST)),
            fact("warnings", not warnings, str(warnings), "none"),
        ]

    def stands_in(self):
        """A command with a group's limits steers all, makes way for a watch, and steers again when that has ended."""
        guest, name = self.guest, self.new_group()
        run = f"weir cgroup run --device /dev/{self.disk.name} --group tenant --bps-write 6M -- sleep 60"
        try:
            guest.run(f"{run} >/tmp/run.log 2>&1 & echo $! >/tmp/run.pid; pause 3")
            steered = guest.run(f"cat $cgroups/{name}/io.max /tmp/run.log")
            with Watch(guest):
                watched = guest.run(f"pause 0.5; cat $cgroups/{name}/io.max")
            guest.run("pause 2")
            again = guest.run(f"cat $cgroups/{name}/io.max /tmp/run.log")
            guest.run("kill $(cat /tmp/run.pid); while kill -0 $(cat /tmp/run.pid) 2>/dev/null; do pause 0.05; done")
            after = guest.run(f"cat $cgroups/{name}/io.max")
        finally:
            guest.run("kill $(cat /tmp/run.pid) 2>/dev/null", check=False)
            self.remove(name)
        return [
            by_now("io.max while the command runs", steered, io_max(BURST)),
            by_now("under a watch", watched, io_max(BURST)),
            by_now("when that has ended", again, io_max(BURST)),
            contains("when the command has", after, io_max(RATE)),
        ]

    def sampling(self, name, seconds):
        """The script that samples one group for so long."""
        return f"sample_for {seconds} 0.05 {self.disk.name} {self.guest.number(self.disk.name)} {name}"

    def settled(self, name, killed):
        """The instant from which on io.max has the hard limit; 5 s after the kill if it has not."""
        output = self.guest.run(f"""
            while now && read -r line <$cgroups/{name}/io.max && [ "${{line#*{io_max(RATE)}}}" = "$line" ]; do
                [ ${{now%.*}} -lt {int(killed) + 5} ] || break
            done
            echo $now
        """)
        return float(output)
