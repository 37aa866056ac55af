"""CPU time of a watch over a thousand control groups.

The guest's processor is emulated: computation takes several times as long as on the host, and
system calls even longer. Both factors are measured with the same work on both: a simulation by weir
for user time, and a copy byte by byte (busybox), which consists of system calls, for system time.
The watch's user and system time, each divided by its factor, are its cost on the host.
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
# Number of groups that write all the time.
BUSY = 10
SECONDS = 10
SHARE = 0.02
LIMITS_FILE = "/run/weir/cgroups.json"
# Each takes one or two tenths of a second on the host.
COMPUTE = ("user", "weir simulate --workload random:iops=5000,size=4K,seconds=40 --iops-total 4000")
CALL = ("sys", "busybox dd if=/dev/zero of=/dev/null bs=1 count=500000")


def seconds_of(kind, output):
    """User or system time as printed by busybox's `time`."""
    minutes, rest = re.search(rf"{kind}\s+(\d+)m ([0-9.]+)s", output).groups()
    return 60 * int(minutes) + float(rest)


def processor_seconds(stat):
    """User and system time of a process so far, from its /proc/PID/stat (in steps of 10 ms)."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) / 100, int(fields[12]) / 100


class Crowd:
    """The case, on one disk."""

    def __init__(self, disk):
        self.guest = None  # set by the runner
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
                rm -f {LIMITS_FILE}
                cd $cgroups && rmdir crowd/*/ && rmdir crowd
            """,
        )
        before, after = processor_seconds(parts["before"]), processor_seconds(parts["after"])
        own, kernel = (late - early for early, late in zip(before, after))
        computing, calling = self.slowdown(*COMPUTE), self.slowdown(*CALL)
        share = (own / computing + kernel / calling) / SECONDS
        in_guest = f"{own / SECONDS:.1%} and {kernel / SECONDS:.1%} in the kernel"
        slowdown = f"which is {computing:.1f} and {calling:.1f} times slower than the host"
        return [
            Check("share of the guest's processor", True, f"{in_guest}, {slowdown}", "no bound"),
            most("share of a host processor", share, SHARE, unit="%", scale=0.01),
        ]

    def make(self):
        """Creates the groups and their limits: one by weir, whose entry is then copied for all
        groups, because 1,000 commands would take minutes.
        """
        guest = self.guest
        content = json.loads(
            guest.run(f"""
            mkdir -p $cgroups/crowd
            echo "+io +memory" >$cgroups/crowd/cgroup.subtree_control
            cd $cgroups/crowd && mkdir $(seq 0 {GROUPS - 1})
            {limit("crowd/0", self.disk, *OPTIONS)} >&2
            cat {LIMITS_FILE}
        """)
        )
        (first,) = [entry for entry in content["limits"] if entry["cgroup"].endswith("crowd/0")]
        content["limits"] = [
            first | {"cgroup": first["cgroup"][:-1] + str(number)} for number in range(GROUPS)
        ]
        text = json.dumps(content)
        guest.run(
            f"cat >{LIMITS_FILE}.new <<'END'\n{text}\nEND\nmv {LIMITS_FILE}.new {LIMITS_FILE}"
        )

    def slowdown(self, kind, command):
        """The factor by which the guest is slower than the host for this command."""
        in_guest = seconds_of(kind, self.guest.run(f"time {command} >/dev/null"))
        program, *words = shlex.split(command)
        here = ["/bin/busybox", "time", {"weir": self.guest.program}.get(program, program), *words]
        timed = subprocess.run(here, capture_output=True, text=True, check=True)
        return in_guest / max(seconds_of(kind, timed.stderr), 0.01)
