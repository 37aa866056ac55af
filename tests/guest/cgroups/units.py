"""Limits of a systemd unit: systemd is told the same as the kernel, and where it refuses, nothing has changed.

There is no systemd in the guest; what stands in its place says what it was asked, and refuses when it is to.
"""

from commands import weir
from outcome import contains, fact

UNIT = "weir-test.service"
ASKED = "/tmp/systemctl.log"
STATUS = "/tmp/systemctl.status"


class Units:
    """The case, on one disk."""

    def __init__(self, guest, disk):
        self.guest = guest
        self.disk = disk

    def cases(self):
        """Name and function."""
        yield "a unit of systemd: told as well, and set back where systemd refuses", self.unit

    def unit(self):
        """What systemd was asked, and what the kernel has, when it takes a change and when it does not."""
        guest, node = self.guest, f"/dev/{self.disk.name}"
        command = ("cgroup", "limit", UNIT, "--device", node)
        self.stand_in()
        try:
            weir(guest, *command, "--bps-write", 4_000_000)
            asked, kept = guest.run(f"cat {ASKED}"), self.io_max()
            guest.run(f"echo 1 >{STATUS}")
            refused, status = guest.run_status(" ".join(map(str, ("weir", *command, "--bps-write", 8_000_000, "--iops-read", 100))))
            after, shown = self.io_max(), weir(guest, *command)
            guest.run(f"echo 0 >{STATUS}")
            weir(guest, *command, "--remove")
            removed = self.io_max()
        finally:
            guest.run(f"rm -rf /run/systemd /bin/systemctl; rmdir $cgroups/system.slice/{UNIT} $cgroups/system.slice")
        properties = f"set-property --runtime -- {UNIT} IOReadBandwidthMax={node} infinity IOWriteBandwidthMax={node} 4000000"
        return [
            contains("what systemd was asked", asked, properties),
            contains("io.max", kept, "rbps=max wbps=4000000 riops=max wiops=max"),
            fact("a change that systemd refuses", status == 1, f"status {status}", "status 1"),
            contains("what is said of it", refused, f"systemctl set-property {UNIT}: not now"),
            fact("io.max after it", after == kept, after, "as it was"),
            contains("what is kept after it", shown, "bps-write 4000000"),
            fact("io.max when it is removed", removed.strip() == "", removed, "empty"),
        ]

    def stand_in(self):
        """A systemctl, and the unit's control group."""
        self.guest.run(f"""
            set -e
            mkdir -p /run/systemd/system $cgroups/system.slice/{UNIT}
            echo 0 >{STATUS}
            : >{ASKED}
            printf '%s\\n' '#!/bin/sh' 'echo "$@" >>{ASKED}' 'read -r status <{STATUS}' '[ $status = 0 ] || echo "not now" >&2' 'exit $status' >/bin/systemctl
            chmod +x /bin/systemctl
        """)

    def io_max(self):
        """What the kernel has of the unit."""
        return self.guest.run(f"cat $cgroups/system.slice/{UNIT}/io.max")
