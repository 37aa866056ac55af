"""Bursts, and the limits in force after the watch that grants them is killed.

The bucket (crates/policy/src/throttle/bucket.rs) holds 5 s of 20M and leaks at 4M meanwhile, so
that a burst lasts 100 / (20 - 4) = 6.25 s. The kernel has no bursts: the watch writes the burst's
rate, and the limit's rate afterwards.
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
# Time limit for a decision to reach io.max.
DECISION_SECONDS = 0.05
# Time limit for the hard limit to reach io.max after the watch was killed.
GUARD_SECONDS = 1.0
# The watch's log lines about decisions.
DECISIONS = "grep 'rates written' $watch_log || true"


def passed(samples, begin, end):
    """Bytes per second of the first group between two instants."""
    return streams.rate(
        [(sample.seconds, sample.groups[0]) for sample in samples if begin <= sample.seconds <= end]
    )


def length(samples, start):
    """Length of the burst in seconds, if everything after it passed at the limit's rate: total =
    burst · length + rate · rest.
    """
    total, whole = samples[-1].groups[0] - samples[0].groups[0], samples[-1].seconds - start
    return (total - RATE * whole) / (BURST - RATE)


def start_of(samples):
    """Time of the last sample before any byte was written."""
    return max(sample.seconds for sample in samples if sample.groups[0] == samples[0].groups[0])


def io_max(line_rate):
    """The entry of io.max for a limit on written bytes."""
    return f"wbps={line_rate} "


def logged(text, log):
    """Shell code that waits until a log contains this text, for at most 20 seconds."""
    return f"turns=400; until grep -q {text!r} {log} || [ $((turns -= 1)) = 0 ]; do pause 0.05; done"


def in_time(decisions):
    """Check that each decision reached io.max in time, according to the watch's log."""
    took = [
        int(number) / 1e6 for number in re.findall(r"rates written.*after_us=([0-9]+)", decisions)
    ]
    what = "longest time from a decision to io.max"
    if not took:
        return Check(what, False, "none in the watch's log", "at least one")
    return most(what, max(took), DECISION_SECONDS, unit="ms", scale=1e-3)


class Bursts:
    """The cases, on one disk that is faster than the burst."""

    def __init__(self, disk):
        self.guest = None  # set by the runner
        self.disk = disk
        self.used = 0

    def cases(self):
        """Name and function of each case."""
        yield "a burst: 4M/s, 20M/s for 5 s", self.burst
        yield "the watch and its whole group killed during a burst", self.killed
        yield "a group recreated under the watch", self.recreated
        yield "a command controls groups without a watch", self.without_a_watch
        yield "a daemon with control groups, upgraded", self.upgraded

    def parts(self, body, finally_=""):
        """Runs a script in parts; `body` is a function of the name of a new group with the burst's
        limits.

        Each run has a new group: weir remembers the used part of a group's burst until it has
        leaked.
        """
        self.used += 1
        name = f"burst{self.used}"
        begin = f"mkdir $cgroups/{name}\n{limit(name, self.disk, *OPTIONS)}"
        end = f"{streams.end(self.disk, (name,))}\nrmdir $cgroups/{name}"
        return self.guest.parts(f"{begin}\n{body(name)}", f"{finally_}\n{end}")

    def window(self, name, seconds):
        """Shell code that samples one group for this time."""
        return streams.window(self.disk, seconds, (name,), interval=0.05)

    def burst(self):
        """Rates during the burst and after it."""
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
        samples = streams.samples(parts["window"])
        start = start_of(samples)
        rate = passed(samples, start, start + LENGTH)
        after = passed(samples, start + BURST_SECONDS + 0.3, start + seconds)
        return [
            near(
                "rate in the first 5 s of the burst",
                rate,
                BURST,
                TOLERANCE,
                unit="MiB/s",
                scale=MIB,
            ),
            near("rate after the burst", after, RATE, TOLERANCE, unit="MiB/s", scale=MIB),
            near(
                "length of the burst",
                length(samples, start),
                BURST_SECONDS,
                TOLERANCE,
                unit="s",
                scale=1,
            ),
            in_time(parts["decisions"]),
        ]

    def killed(self):
        """Time until the hard limit is back, and the remaining burst under the next watch."""
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
            contains("io.max during the burst", parts["during"], io_max(BURST)),
            most("the hard limit is restored after", float(parts["settled"]), GUARD_SECONDS, unit="s"),
            near(
                "rate under the hard limit",
                streams.Rates.of(parts["hard"]).groups[0],
                RATE,
                TOLERANCE,
                unit="MiB/s",
                scale=MIB,
            ),
            # About 3.5 s of it were used before; about a second leaked without a watch.
            most("burst of the next watch", length(again, again[0].seconds), BURST_SECONDS - 2, unit="s"),
            contains("io.max after the end of the watch", parts["after"], io_max(RATE)),
        ]

    def recreated(self):
        """A new group of the same name gets the limits of the previous one, without a warning: a
        restarted service.
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
            contains("io.max with an unused burst", parts["before"], io_max(BURST)),
            contains("io.max of the recreated group", parts["again"], io_max(BURST)),
            fact("warnings", not parts["warnings"].strip(), parts["warnings"], "none"),
        ]

    def without_a_watch(self):
        """A command with limits for a group controls all groups, yields to a watch, and resumes
        control after its end.
        """
        run = f"weir cgroup run --device /dev/{self.disk.name} --group tenant --bps-write 6M -- sleep 600"
        end = "kill $command 2>/dev/null\nwhile kill -0 $command 2>/dev/null; do pause 0.05; done"
        parts = self.parts(
            lambda name: (
                f"""
            {run} >/tmp/run.log 2>&1 &
            command=$!
            pause 3
            part controlled
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
            contains("io.max while the command runs", parts["controlled"], io_max(BURST)),
            contains("io.max under a watch", parts["watched"], io_max(BURST)),
            contains("io.max after the end of the watch", parts["again"], io_max(BURST)),
            contains("io.max after the end of the command", parts["after"], io_max(RATE)),
        ]

    def upgraded(self):
        """A daemon controls groups as a watch does, and the upgraded daemon continues."""
        serve = (
            "weir serve /tmp/upgrade.raw --nbd unix:/tmp/upgrade.sock "
            "--cgroup-limits /run/weir/cgroups.json "
            "--state $state"
        )
        end = "kill $first $second 2>/dev/null\nwait $first $second 2>/dev/null\nrm /tmp/upgrade.*"
        parts = self.parts(
            lambda name: (
                f"""
            truncate -s 1M /tmp/upgrade.raw
            second=
            {serve} >/tmp/upgrade.first 2>&1 &
            first=$!
            {logged("ready", "/tmp/upgrade.first")}
            seconds_until 5 $cgroups/{name}/io.max {io_max(BURST)!r}
            part before
            cat $cgroups/{name}/io.max
            {serve} --takeover >/tmp/upgrade.second 2>&1 &
            second=$!
            wait $first
            {logged("control groups are watched", "/tmp/upgrade.second")}
            seconds_until 5 $cgroups/{name}/io.max {io_max(BURST)!r}
            part after
            cat $cgroups/{name}/io.max /tmp/upgrade.second
            kill $second
            wait $second
            part ended
            cat $cgroups/{name}/io.max /tmp/upgrade.second
        """
            ),
            end,
        )
        return [
            contains("io.max under the first daemon", parts["before"], io_max(BURST)),
            contains("io.max under the upgraded daemon", parts["after"], io_max(BURST)),
            contains("io.max at its end", parts["ended"], io_max(RATE)),
        ]
