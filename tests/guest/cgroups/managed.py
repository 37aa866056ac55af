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

    def kept(self):
        """That systemd knows the limit, keeps it through what it does, and forgets it."""
        self.start()
        try:
            self.guest.run(weir("cgroup", "limit", UNIT, "--device", self.mount, "--bps-write", RATE))
            told = self.io_max()
            known = self.properties()
            self.guest.run("systemctl daemon-reload")
            reloaded = self.io_max()
            self.guest.run(f"systemctl set-property --runtime {UNIT} MemoryMax=500M")
            changed = self.io_max()
            self.guest.run(f"systemctl restart {UNIT} && pause 1")
            restarted = self.io_max()
            rate = streams.Rates.of(self.guest.run(streams.window(self.disk, 5, (GROUP,)))).groups[0]
            self.guest.run(weir("cgroup", "limit", UNIT, "--device", self.mount, "--remove"))
            self.guest.run("systemctl daemon-reload")
            left, forgotten = self.io_max(), self.properties()
        finally:
            self.clear()
        return [
            contains("io.max", told, io_max(RATE)),
            contains("what systemd knows", known, f"IOWriteBandwidthMax=/dev/{self.disk.name} {RATE}"),
            contains("after a reload", reloaded, io_max(RATE)),
            contains("after another property", changed, io_max(RATE)),
            contains("after a restart", restarted, io_max(RATE)),
            near("what the device counts", rate, RATE, 0.05),
            fact("io.max when it is removed", left.strip() == "", left, "empty"),
            fact("what systemd knows then", "/dev/" not in forgotten, forgotten, "nothing"),
        ]

    def killed(self):
        """That a burst comes back after a reload, and not after the end of who grants it."""
        self.start()
        try:
            self.guest.run(f"systemctl stop {UNIT}; systemctl start {UNIT}")
            self.guest.run(limit(GROUP, self.disk, *OPTIONS))
            self.watch()
            granted = self.waited_for(BURST, AGAIN_SECONDS)
            self.guest.run("systemctl daemon-reload")
            again = self.waited_for(BURST, AGAIN_SECONDS)
            during = self.guest.run(f"cat $cgroups/{GROUP}/io.max; systemctl kill -s KILL {WATCH}")
            settled = self.waited_for(RATE, AGAIN_SECONDS)
        finally:
            self.clear()
        return [
            most("the burst is granted after", granted, AGAIN_SECONDS, unit="s"),
            most("and again after a reload", again, AGAIN_SECONDS, unit="s"),
            contains("io.max before the kill", during, io_max(BURST)),
            most("the hard limit after the kill", settled, GUARD_SECONDS, unit="s"),
        ]

    def from_the_start(self):
        """That a limit which is only in weir's file has the controller that systemd has given to
        nobody, and keeps it.
        """
        self.start()
        try:
            self.guest.run(limit(GROUP, self.disk, *OPTIONS))
            # As the machine's end would.
            self.guest.run(
                f"rm -r /run/systemd/system.control/{UNIT}.d; systemctl daemon-reload; systemctl restart {UNIT}"
            )
            lost = self.io_max()
            self.watch()
            granted = self.waited_for(BURST, AGAIN_SECONDS)
            # The watch tells it when it has time.
            self.guest.run(f"pause {HEARD_SECONDS}")
            known = self.properties()
            spent = self.waited_for(RATE, SPENT_SECONDS)
            self.guest.run(f"systemctl daemon-reload; pause {AGAIN_SECONDS}")
            reloaded = self.io_max()
        finally:
            self.clear()
        return [
            fact("io.max before", io_max(RATE) not in lost, lost, "without the limit"),
            most("the burst is granted after", granted, AGAIN_SECONDS, unit="s"),
            contains("what systemd knows", known, f"IOWriteBandwidthMax=/dev/{self.disk.name} {RATE}"),
            most("the burst is spent after", spent, SPENT_SECONDS, unit="s"),
            contains("after a reload", reloaded, io_max(RATE)),
        ]

    def others(self):
        """That other kinds of units are known by their names, and keep their limits."""
        units, device = ("weir-test.scope", "system.slice"), ("--device", f"/dev/{self.disk.name}")
        self.guest.run(
            "systemd-run --quiet --scope --unit=weir-test.scope sleep 60 >/dev/null 2>&1 & pause 1"
        )
        try:
            for unit in units:
                self.guest.run(weir("cgroup", "limit", unit, *device, "--bps-write", RATE))
            self.guest.run("systemctl daemon-reload")
            scope = self.guest.run("cat $cgroups/system.slice/weir-test.scope/io.max")
            above = self.guest.run("cat $cgroups/system.slice/io.max")
        finally:
            for unit in units:
                self.guest.run(weir("cgroup", "limit", unit, *device, "--remove"), check=False)
            self.guest.run("systemctl stop weir-test.scope")
        return [
            contains("the scope's io.max", scope, io_max(RATE)),
            contains("the slice's", above, io_max(RATE)),
        ]

    def start(self):
        """A service that writes all the time."""
        loop = f"while :; do dd if=/dev/zero of={self.mount}/load bs=256k count=400 oflag=direct; done"
        self.guest.run(f"""
            set -e
            printf '%s\\n' '[Service]' 'ExecStart=/bin/sh -c "{loop}"' 'StandardError=null' >/run/systemd/system/{UNIT}
            systemctl daemon-reload
            systemctl start {UNIT}
        """)

    def watch(self):
        """A watch as a service of its own."""
        self.guest.run(f"systemd-run --quiet --unit={WATCH} weir cgroup watch --state $state")

    def clear(self):
        """Ends it and the watch, and forgets what is left of the limit."""
        self.guest.run(f"""
            weir cgroup limit {UNIT} --device /dev/{self.disk.name} --remove
            systemctl stop {WATCH} {UNIT}
            systemctl reset-failed
            rm -rf /run/systemd/system/{UNIT} /run/systemd/system.control/{UNIT}.d {self.mount}/load
            systemctl daemon-reload
            true
        """)

    def io_max(self):
        """What the kernel has of the service; nothing, if nobody asks for the controller any more.
        """
        return self.guest.run(f"cat $cgroups/{GROUP}/io.max 2>/dev/null || true")

    def properties(self):
        """What systemd has of it."""
        return self.guest.run(
            f"systemctl show {UNIT} -p IOReadBandwidthMax -p IOWriteBandwidthMax -p IOReadIOPSMax -p IOWriteIOPSMax"
        )

    def waited_for(self, rate, longest):
        """How many seconds passed until the kernel had this rate; a second more than the longest if
        it never had.
        """
        line = f"seconds_until {longest} $cgroups/{GROUP}/io.max {io_max(rate)!r}"
        return float(self.guest.run(line).splitlines()[-1])
