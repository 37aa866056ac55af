"""Limits of units under a real systemd: its operations on units do not remove them, and killing a
service leaves no burst in force.

Any version of systemd will do: its properties for block I/O are of version 230
(systemd.resource-control(5)).
"""

import streams
from bursts import BURST, OPTIONS, RATE, io_max
from commands import limit, weir
from outcome import contains, fact, most, near

UNIT = "load.service"
GROUP = f"system.slice/{UNIT}"
WATCH = "weir-watch.service"
# Time limit for a watch to restore a burst that systemd has reset.
AGAIN_SECONDS = 3
GUARD_SECONDS = 1.0
# Time limit for systemd to learn of a limit that exists only in weir's file.
SYSTEMD_SECONDS = 4
# Maximum length of a burst; the writer is slowed down by systemd's operations.
SPENT_SECONDS = 20
# The kernel's limits of the service; empty if its controller is disabled.
IO_MAX = f"cat $cgroups/{GROUP}/io.max 2>/dev/null || true"
# systemd's limits of the service.
LIMITS = ("IOReadBandwidthMax", "IOWriteBandwidthMax", "IOReadIOPSMax", "IOWriteIOPSMax")
PROPERTIES = f"systemctl show {UNIT} -p {','.join(LIMITS)}"
# Starts a watch as a service.
START_WATCH = f"systemd-run --quiet --unit={WATCH} weir cgroup watch --state $state"


def wait_for(name, rate, longest):
    """Shell code that waits until the kernel has this rate; the part `name` contains the seconds.
    """
    return f"part {name}\nseconds_until {longest} $cgroups/{GROUP}/io.max {io_max(rate)!r}\npart after_{name}"


class Managed:
    """The cases, on one disk that is faster than the burst."""

    def __init__(self, disk):
        self.guest = None  # set by the runner
        self.disk = disk
        self.mount = f"/mnt/{disk.name}"

    def cases(self):
        """Name and function of each case."""
        yield "a service with a limit: reloaded, changed, restarted", self.through_systemd
        yield "a service in a burst while the watch's whole service is killed", self.killed
        yield "a service that is limited from the boot on", self.from_the_start
        yield "a slice and a scope", self.others

    def parts(self, body):
        """Runs a script in parts, with a service that writes all the time and is removed
        afterwards."""
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

    def through_systemd(self):
        """systemd has the limit, keeps it through its own operations, and removes it."""
        command = ("cgroup", "limit", UNIT, "--device", self.mount)
        parts = self.parts(f"""
            {weir(*command, "--bps-write", RATE)}
            part limited
            {IO_MAX}
            part properties
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
            part cleared
            {PROPERTIES}
        """)
        rate, left = streams.Rates.of(parts["window"]).groups[0], parts["left"].strip()
        limit_property = f"IOWriteBandwidthMax=/dev/{self.disk.name} {RATE}"
        return [
            contains("io.max", parts["limited"], io_max(RATE)),
            contains("systemd's limits", parts["properties"], limit_property),
            contains("io.max after a reload", parts["reloaded"], io_max(RATE)),
            contains("io.max after a change of another property", parts["changed"], io_max(RATE)),
            contains("io.max after a restart", parts["restarted"], io_max(RATE)),
            near("bytes counted by the device", rate, RATE, 0.05),
            fact("io.max after the removal", not left, left, "empty"),
            fact(
                "systemd's limits after the removal",
                "/dev/" not in parts["cleared"],
                parts["cleared"],
                "none",
            ),
        ]

    def killed(self):
        """A burst is restored after a reload, and not after the end of the watch."""
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
            most(
                "time until the burst is restored after a reload",
                float(parts["again"]),
                AGAIN_SECONDS,
                unit="s",
            ),
            contains("io.max before the kill", parts["after_again"], io_max(BURST)),
            most(
                "time until the hard limit is in force after the kill",
                float(parts["settled"]),
                GUARD_SECONDS,
                unit="s",
            ),
        ]

    def from_the_start(self):
        """A limit that exists only in weir's file enables the controller, which systemd has not
        enabled for any unit, and stays in force.
        """
        parts = self.parts(f"""
            {limit(GROUP, self.disk, *OPTIONS)}
            # As a shutdown would.
            rm -r /run/systemd/system.control/{UNIT}.d
            systemctl daemon-reload
            systemctl restart {UNIT}
            part lost
            {IO_MAX}
            {START_WATCH}
            {wait_for("granted", BURST, AGAIN_SECONDS)}
            # The watch sets it with a delay.
            pause {SYSTEMD_SECONDS}
            {PROPERTIES}
            {wait_for("spent", RATE, SPENT_SECONDS)}
            systemctl daemon-reload
            pause {AGAIN_SECONDS}
            {IO_MAX}
        """)
        limit_property = f"IOWriteBandwidthMax=/dev/{self.disk.name} {RATE}"
        return [
            fact("io.max before", io_max(RATE) not in parts["lost"], parts["lost"], "without the limit"),
            most("the burst is granted after", float(parts["granted"]), AGAIN_SECONDS, unit="s"),
            contains("systemd's limits", parts["after_granted"], limit_property),
            most("the burst is used up after", float(parts["spent"]), SPENT_SECONDS, unit="s"),
            contains("io.max after a reload", parts["after_spent"], io_max(RATE)),
        ]

    def others(self):
        """Other types of units are recognized by name, and keep their limits."""
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
            contains("the slice's io.max", parts["slice"], io_max(RATE)),
        ]
