"""Limits of what a real systemd manages: what it does with its units takes none away, and what
kills a service leaves no burst.

One systemd is as good as another here: its properties for block I/O are of version 230
(systemd.resource-control(5)).
"""

import streams
from bursts import BURST, OPTIONS, RATE, io_max
from commands import limit, weir
from outcome import contains, fact, most, near

UNIT = "load.service"
GROUP = f"system.slice/{UNIT}"
WATCH = "weir-watch.service"
# How soon a watch has told a burst again that systemd has taken back.
AGAIN_SECONDS = 3
GUARD_SECONDS = 1.0
# How soon systemd has heard of a limit that is only in weir's file.
HEARD_SECONDS = 4
# How long a burst may last, the writer being slowed by what systemd does meanwhile.
SPENT_SECONDS = 20
# What the kernel has of the service; nothing, if nobody asks for the controller any more.
IO_MAX = f"cat $cgroups/{GROUP}/io.max 2>/dev/null || true"
# What systemd has of it.
LIMITS = ("IOReadBandwidthMax", "IOWriteBandwidthMax", "IOReadIOPSMax", "IOWriteIOPSMax")
PROPERTIES = f"systemctl show {UNIT} -p {','.join(LIMITS)}"
# A watch as a service of its own.
START_WATCH = f"systemd-run --quiet --unit={WATCH} weir cgroup watch --state $state"


def wait_for(name, rate, longest):
    """The lines that wait until the kernel has this rate; the part of that name is the seconds."""
    return f"part {name}\nseconds_until {longest} $cgroups/{GROUP}/io.max {io_max(rate)!r}\npart after_{name}"


class Managed:
    """The cases, on one disk that is faster than the burst."""

    def __init__(self, disk):
        self.guest = None  # set when it runs
        self.disk = disk
        self.mount = f"/mnt/{disk.name}"

    def cases(self):
        """Name and function of each."""
        yield "a service with a limit: reloaded, changed, started anew", self.kept
        yield "a service in a burst, and all of the watch's service killed", self.killed
        yield "a service that is limited from the machine's start on", self.from_the_start
        yield "a slice and a scope", self.others

    def parts(self, body):
        """The parts of a script with a service that writes all the time, which is gone after it."""
        loop = f"while :; do dd if=/dev/zero of={self.mount}/load bs=256k count=400 oflag=direct; done"
        begin = f"""
            printf '%s\\n' '[Service]' 'ExecStart=/bin/sh -c "{loop}"' 'StandardError=null' \\
                >/run/systemd/system/{UNIT}
            systemctl daemon-reload
            systemctl start {UNIT}
        """
        end = f"""
            weir cgroup limit {UNIT} --device /dev/{self.disk.name} --remove
            systemctl stop {WATCH} {UNIT}
            systemctl reset-failed
            rm -rf /run/systemd/system/{UNIT} /run/systemd/system.control/{UNIT}.d {self.mount}/load
            systemctl daemon-reload
        """
        return self.guest.parts(begin + body, end)

    def kept(self):
        """That systemd knows the limit, keeps it through what it does, and forgets it."""
        command = ("cgroup", "limit", UNIT, "--device", self.mount)
        parts = self.parts(f"""
            {weir(*command, "--bps-write", RATE)}
            part told
            {IO_MAX}
            part known
            {PROPERTIES}
            systemctl daemon-reload
            part reloaded
            {IO_MAX}
            systemctl set-property --runtime {UNIT} MemoryMax=500M
            part changed
            {IO_MAX}
            systemctl restart {UNIT}
            pause 1
            part restarted
            {IO_MAX}
            part window
            {streams.window(self.disk, 5, (GROUP,))}
            {weir(*command, "--remove")}
            systemctl daemon-reload
            part left
            {IO_MAX}
            part forgotten
            {PROPERTIES}
        """)
        rate, left = streams.Rates.of(parts["window"]).groups[0], parts["left"].strip()
        known = f"IOWriteBandwidthMax=/dev/{self.disk.name} {RATE}"
        return [
            contains("io.max", parts["told"], io_max(RATE)),
            contains("what systemd knows", parts["known"], known),
            contains("after a reload", parts["reloaded"], io_max(RATE)),
            contains("after another property", parts["changed"], io_max(RATE)),
            contains("after a restart", parts["restarted"], io_max(RATE)),
            near("what the device counts", rate, RATE, 0.05),
            fact("io.max when it is removed", not left, left, "empty"),
            fact("what systemd knows then", "/dev/" not in parts["forgotten"], parts["forgotten"], "nothing"),
        ]

    def killed(self):
        """That a burst comes back after a reload, and not after the end of who grants it."""
        parts = self.parts(f"""
            systemctl restart {UNIT}
            {limit(GROUP, self.disk, *OPTIONS)}
            {START_WATCH}
            {wait_for("granted", BURST, AGAIN_SECONDS)}
            systemctl daemon-reload
            {wait_for("again", BURST, AGAIN_SECONDS)}
            {IO_MAX}
            systemctl kill -s KILL {WATCH}
            {wait_for("settled", RATE, AGAIN_SECONDS)}
        """)
        return [
            most("the burst is granted after", float(parts["granted"]), AGAIN_SECONDS, unit="s"),
            most("and again after a reload", float(parts["again"]), AGAIN_SECONDS, unit="s"),
            contains("io.max before the kill", parts["after_again"], io_max(BURST)),
            most("the hard limit after the kill", float(parts["settled"]), GUARD_SECONDS, unit="s"),
        ]

    def from_the_start(self):
        """That a limit which is only in weir's file has the controller that systemd has given to
        nobody, and keeps it.
        """
        parts = self.parts(f"""
            {limit(GROUP, self.disk, *OPTIONS)}
            # As the machine's end would.
            rm -r /run/systemd/system.control/{UNIT}.d
            systemctl daemon-reload
            systemctl restart {UNIT}
            part lost
            {IO_MAX}
            {START_WATCH}
            {wait_for("granted", BURST, AGAIN_SECONDS)}
            # The watch tells it when it has time.
            pause {HEARD_SECONDS}
            {PROPERTIES}
            {wait_for("spent", RATE, SPENT_SECONDS)}
            systemctl daemon-reload
            pause {AGAIN_SECONDS}
            {IO_MAX}
        """)
        known = f"IOWriteBandwidthMax=/dev/{self.disk.name} {RATE}"
        return [
            fact("io.max before", io_max(RATE) not in parts["lost"], parts["lost"], "without the limit"),
            most("the burst is granted after", float(parts["granted"]), AGAIN_SECONDS, unit="s"),
            contains("what systemd knows", parts["after_granted"], known),
            most("the burst is spent after", float(parts["spent"]), SPENT_SECONDS, unit="s"),
            contains("after a reload", parts["after_spent"], io_max(RATE)),
        ]

    def others(self):
        """That other kinds of units are known by their names, and keep their limits."""
        units, device = ("weir-test.scope", "system.slice"), ("--device", f"/dev/{self.disk.name}")
        limits = "\n".join(weir("cgroup", "limit", unit, *device, "--bps-write", RATE) for unit in units)
        end = "\n".join(weir("cgroup", "limit", unit, *device, "--remove") for unit in units)
        parts = self.guest.parts(
            f"""
                systemd-run --quiet --scope --unit=weir-test.scope sleep 600 >/dev/null 2>&1 &
                pause 1
                {limits}
                systemctl daemon-reload
                part scope
                cat $cgroups/system.slice/weir-test.scope/io.max
                part slice
                cat $cgroups/system.slice/io.max
            """,
            f"{end}\nsystemctl stop weir-test.scope",
        )
        return [
            contains("the scope's io.max", parts["scope"], io_max(RATE)),
            contains("the slice's", parts["slice"], io_max(RATE)),
        ]
