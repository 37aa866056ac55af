"""A burst, and what becomes of it when the watch that runs it is killed.

The bucket (crates/policy/src/throttle/bucket.rs) holds 5 s of 20M and leaks at 4M meanwhile, so
that a burst lasts 100 / (20 - 4) = 6.25 s. The kernel knows nothing of it: the watch tells it the
burst's rate, and the limit's afterwards.
"""

import re

import streams
from commands import limit
from outcome import Check, contains, fact, most, near

MIB = 1 << 20
RATE, BURST, LENGTH = 4 * MIB, 20 * MIB, 5
BURST_SECONDS = BURST * LENGTH / (BURST - RATE)
OPTIONS = ("--bps-write", "4M", "--bps-write-max", "20M", "--bps-write-max-length", LENGTH)
TOLERANCE = 0.05
# A decision is to be in io.max so soon.
DECISION_SECONDS = 0.05
# The hard limit is to be in io.max so soon after the watch was killed.
GUARD_SECONDS = 1.0
# What the watch says of decisions.
DECISIONS = "grep ' told ' $watch_log || true"


def passed(taken, begin, end):
    """Bytes per second of the first group between two instants."""
    return streams.rate(
        [(sample.seconds, sample.groups[0]) for sample in taken if begin <= sample.seconds <= end]
    )


def length(taken, start):
    """Seconds that passed at the burst's rate, if all the rest passed at the limit's: total = burst
    · length + rate · rest.
    """
    total, whole = taken[-1].groups[0] - taken[0].groups[0], taken[-1].seconds - start
    return (total - RATE * whole) / (BURST - RATE)


def begun(taken):
    """The instant of the last sample before anything passed."""
    return max(sample.seconds for sample in taken if sample.groups[0] == taken[0].groups[0])


def io_max(line_rate):
    """How io.max shows a limit on written bytes."""
    return f"wbps={line_rate} "


def logged(text, log):
    """The line that waits until a log has this text, for 20 seconds at most."""
    return f"turns=400; until grep -q {text!r} {log} || [ $((turns -= 1)) = 0 ]; do pause 0.05; done"


def soon(decisions):
    """The check that each decision is in io.max as soon as it should be, by what the watch says of
    them.
    """
    took = [int(number) / 1e6 for number in re.findall(r" told .*after_us=([0-9]+)", decisions)]
    what = "a decision's way into io.max, the longest"
    if not took:
        return Check(what, False, "none in the watch's log", "at least one")
    return most(what, max(took), DECISION_SECONDS, unit="ms", scale=1e-3)


class Bursts:
    """The cases, on one disk that is faster than the burst."""

    def __init__(self, disk):
        self.guest = None  # set when it runs
        self.disk = disk
        self.used = 0

    def cases(self):
        """Name and function of each."""
        yield "a burst: 4M/s, 20M/s for 5 s", self.burst
        yield "the watch killed in a burst, with all in its group", self.killed
        yield "a group made again under the watch", self.made_again
        yield "a command that steers while no watch does", self.stands_in
        yield "a daemon that steers, taken over", self.taken_over

    def parts(self, body, finally_=""):
        """The parts of a script in which `body`, a function, has the name of a new group with the
        burst's limits.

        A new one each time: what a group has used of its burst is remembered for as long as it
        takes to leak.
        """
        self.used += 1
        name = f"burst{self.used}"
        begin = f"mkdir $cgroups/{name}\n{limit(name, self.disk, *OPTIONS)}"
        end = f"{streams.end(self.disk, (name,))}\nrmdir $cgroups/{name}"
        return self.guest.parts(f"{begin}\n{body(name)}", f"{finally_}\n{end}")

    def window(self, name, seconds):
        """The script that samples one group for so long."""
        return streams.window(self.disk, seconds, (name,), interval=0.05)

    def burst(self):
        """The rate in the burst and after it."""
        seconds = 11
        parts = self.parts(
            lambda name: (
                f"""
            watch_start
            stream {self.disk.name} direct {name}
            part window
            {self.window(name, seconds)}
            part decisions
            {DECISIONS}
            watch_stop
        """
            )
        )
        taken = streams.samples(parts["window"])
        start = begun(taken)
        rate = passed(taken, start, start + LENGTH)
        after = passed(taken, start + BURST_SECONDS + 0.3, start + seconds)
        return [
            near("its first 5 s", rate, BURST, TOLERANCE, unit="MiB/s", scale=MIB),
            near("after it", after, RATE, TOLERANCE, unit="MiB/s", scale=MIB),
            near("its length", length(taken, start), BURST_SECONDS, TOLERANCE, unit="s", scale=1),
            soon(parts["decisions"]),
        ]

    def killed(self):
        """How soon the hard limit is back, and that the next watch does not begin a burst from the
        start.
        """
        parts = self.parts(
            lambda name: (
                f"""
            watch_start
            stream {self.disk.name} direct {name}
            pause 3
            part during
            cat $cgroups/{name}/io.max
            part settled
            kill_group watch
            seconds_until 5 $cgroups/{name}/io.max {io_max(RATE)!r}
            part hard
            {self.window(name, 3)}
            part again
            watch_start
            {self.window(name, 6)}
            watch_stop
            part after
            cat $cgroups/{name}/io.max
        """
            )
        )
        again = streams.samples(parts["again"])
        return [
            contains("io.max in the burst", parts["during"], io_max(BURST)),
            most("the hard limit back after", float(parts["settled"]), GUARD_SECONDS, unit="s"),
            near(
                "what passes then",
                streams.Rates.of(parts["hard"]).groups[0],
                RATE,
                TOLERANCE,
                unit="MiB/s",
                scale=MIB,
            ),
            # Some 3.5 s of it were spent before; what leaked while nobody watched is a second or
            # so.
            most("burst of the next watch", length(again, again[0].seconds), BURST_SECONDS - 2, unit="s"),
            contains("io.max when it has ended", parts["after"], io_max(RATE)),
        ]

    def made_again(self):
        """A group of the same name has the limits of the one before, and nobody is warned of it: a
        service started anew.
        """
        parts = self.parts(
            lambda name: (
                f"""
            watch_start
            pause 1
            part before
            cat $cgroups/{name}/io.max
            part again
            rmdir $cgroups/{name}
            mkdir $cgroups/{name}
            pause 3
            cat $cgroups/{name}/io.max
            part warnings
            grep ' WARN ' $watch_log || true
            watch_stop
        """
            )
        )
        return [
            contains("io.max with a burst to spend", parts["before"], io_max(BURST)),
            contains("io.max of the one made again", parts["again"], io_max(BURST)),
            fact("warnings", not parts["warnings"].strip(), parts["warnings"], "none"),
        ]

    def stands_in(self):
        """A command with a group's limits steers all, makes way for a watch, and steers again when
        that has ended.
        """
        run = f"weir cgroup run --device /dev/{self.disk.name} --group tenant --bps-write 6M -- sleep 600"
        end = "kill $command 2>/dev/null\nwhile kill -0 $command 2>/dev/null; do pause 0.05; done"
        parts = self.parts(
            lambda name: (
                f"""
            {run} >/tmp/run.log 2>&1 &
            command=$!
            pause 3
            part steered
            cat $cgroups/{name}/io.max /tmp/run.log
            watch_start
            pause 0.5
            part watched
            cat $cgroups/{name}/io.max
            watch_stop
            pause 2
            part again
            cat $cgroups/{name}/io.max /tmp/run.log
            {end}
            part after
            cat $cgroups/{name}/io.max
        """
            ),
            end,
        )
        return [
            contains("io.max while the command runs", parts["steered"], io_max(BURST)),
            contains("under a watch", parts["watched"], io_max(BURST)),
            contains("when that has ended", parts["again"], io_max(BURST)),
            contains("when the command has", parts["after"], io_max(RATE)),
        ]

    def taken_over(self):
        """A daemon steers as a watch does, and the one that takes its place goes on with it."""
        serve = (
            "weir serve /tmp/taken.raw --nbd unix:/tmp/taken.sock --cgroup-limits /run/weir/cgroups.json "
            "--state $state"
        )
        end = "kill $first $second 2>/dev/null\nwait $first $second 2>/dev/null\nrm /tmp/taken.*"
        parts = self.parts(
            lambda name: (
                f"""
            truncate -s 1M /tmp/taken.raw
            second=
            {serve} >/tmp/taken.first 2>&1 &
            first=$!
            {logged("ready", "/tmp/taken.first")}
            seconds_until 5 $cgroups/{name}/io.max {io_max(BURST)!r}
            part before
            cat $cgroups/{name}/io.max
            {serve} --takeover >/tmp/taken.second 2>&1 &
            second=$!
            wait $first
            {logged("control groups are watched", "/tmp/taken.second")}
            seconds_until 5 $cgroups/{name}/io.max {io_max(BURST)!r}
            part after
            cat $cgroups/{name}/io.max /tmp/taken.second
            kill $second
            wait $second
            part ended
            cat $cgroups/{name}/io.max /tmp/taken.second
        """
            ),
            end,
        )
        return [
            contains("io.max under the first", parts["before"], io_max(BURST)),
            contains("under the one in its place", parts["after"], io_max(BURST)),
            contains("io.max at its end", parts["ended"], io_max(RATE)),
        ]
