"""A thousand control groups watched: what that takes of a processor.

The guest's processor is emulated: computing takes several times as long there, and system calls
still longer. How much longer is measured with what is the same on both: a simulation by weir
itself, the same kind of work, for its own time; and a copy byte by byte (busybox), which is nothing
but system calls, for the kernel's. The watch's own time and its time in the kernel, each divided by
its factor, are what it takes here.
"""

import json
import re
import shlex
import subprocess

import streams
from commands import limit
from outcome import Check, most

GROUPS = 1000
OPTIONS = ("--bps-write", "1M", "--bps-write-max", "4M", "--bps-write-max-length", 10)
# How many of them write all the time.
BUSY = 10
SECONDS = 10
SHARE = 0.02
KEPT = "/run/weir/cgroups.json"
# Of each, one or two tenths of a second here.
COMPUTE = ("user", "weir simulate --workload random:iops=5000,size=4K,seconds=40 --iops-total 4000")
CALL = ("sys", "busybox dd if=/dev/zero of=/dev/null bs=1 count=500000")


def seconds_of(kind, output):
    """User or system time as busybox's `time` prints them."""
    minutes, rest = re.search(rf"{kind}\s+(\d+)m ([0-9.]+)s", output).groups()
    return 60 * int(minutes) + float(rest)


def processor_seconds(stat):
    """What a process has used so far, of its own and in system calls, by its /proc/PID/stat (steps
    of 10 ms).
    """
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) / 100, int(fields[12]) / 100


class Crowd:
    """The case, on one disk."""

    def __init__(self, disk):
        self.guest = None  # set when it runs
        self.disk = disk

    def cases(self):
        """Name and function."""
        yield f"the watch of {GROUPS} groups with bursts, {BUSY} of them writing", self.crowd

    def crowd(self):
        """The watch's share of a processor."""
        busy = [f"crowd/{number}" for number in range(BUSY)]
        self.make()
        parts = self.guest.parts(
            f"""
                mkdir -p /mnt/{self.disk.name}/crowd
                watch_start info
                {streams.start(self.disk, "direct", busy)}
                pause 3
                part before
                cat /proc/$watch/stat
                pause {SECONDS}
                part after
                cat /proc/$watch/stat
                watch_stop
            """,
            f"""
                end_streams {self.disk.name} {" ".join(busy)}
                rm -f {KEPT}
                cd $cgroups && rmdir crowd/*/ && rmdir crowd
            """,
        )
        before, after = processor_seconds(parts["before"]), processor_seconds(parts["after"])
        own, kernel = (late - early for early, late in zip(before, after))
        computing, calling = self.slower(*COMPUTE), self.slower(*CALL)
        share = (own / computing + kernel / calling) / SECONDS
        there = f"{own / SECONDS:.1%} and {kernel / SECONDS:.1%} in the kernel"
        slower = f"where those take {computing:.1f} and {calling:.1f} times as long"
        return [
            Check("of the guest's processor", True, f"{there}, {slower}", "nothing"),
            most("of a processor as here", share, SHARE, unit="%", scale=0.01),
        ]

    def make(self):
        """The groups, and their limits: one set by weir, whose like is then written for all others,
        as 1,000 commands would take minutes.
        """
        guest = self.guest
        kept = json.loads(
            guest.run(f"""
            mkdir -p $cgroups/crowd
            echo "+io +memory" >$cgroups/crowd/cgroup.subtree_control
            cd $cgroups/crowd && mkdir $(seq 0 {GROUPS - 1})
            {limit("crowd/0", self.disk, *OPTIONS)} >&2
            cat {KEPT}
        """)
        )
        (first,) = [entry for entry in kept["limits"] if entry["cgroup"].endswith("crowd/0")]
        kept["limits"] = [first | {"cgroup": first["cgroup"][:-1] + str(number)} for number in range(GROUPS)]
        text = json.dumps(kept)
        guest.run(f"cat >{KEPT}.new <<'END'\n{text}\nEND\nmv {KEPT}.new {KEPT}")

    def slower(self, kind, command):
        """How many times longer this takes in the guest than here."""
        there = seconds_of(kind, self.guest.run(f"time {command} >/dev/null"))
        program, *words = shlex.split(command)
        here = ["/bin/busybox", "time", {"weir": self.guest.program}.get(program, program), *words]
        timed = subprocess.run(here, capture_output=True, text=True, check=True)
        return there / max(seconds_of(kind, timed.stderr), 0.01)
