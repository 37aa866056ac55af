"""Limits of a systemd unit: systemd is told the same as the kernel, and where it refuses, nothing
has changed.

There is no systemd in the guest; what stands in its place says what it was asked, and refuses when
it is to.
"""

from commands import weir
from outcome import contains, fact

UNIT = "weir-test.service"
ASKED = "/tmp/systemctl.log"
STATUS = "/tmp/systemctl.status"
# A systemctl, and the unit's control group.
STAND_IN = f"""
    mkdir -p /run/systemd/system $cgroups/system.slice/{UNIT}
    echo 0 >{STATUS}
    : >{ASKED}
    printf '%s\\n' '#!/bin/sh' 'echo "$@" >>{ASKED}' 'read -r status <{STATUS}' \\
        '[ $status = 0 ] || echo "not now" >&2' 'exit $status' >/bin/systemctl
    chmod +x /bin/systemctl
"""
AWAY = f"rm -rf /run/systemd /bin/systemctl; rmdir $cgroups/system.slice/{UNIT} $cgroups/system.slice"


class Units:
    """The case, on one disk."""

    def __init__(self, disk):
        self.guest = None  # set when it runs
        self.disk = disk

    def cases(self):
        """Name and function."""
        yield "a unit of systemd: told as well, and set back where systemd refuses", self.unit

    def unit(self):
        """What systemd was asked, and what the kernel has, when it takes a change and when it does
        not.
        """
        node = f"/dev/{self.disk.name}"
        command = ("cgroup", "limit", UNIT, "--device", node)
        io_max = f"cat $cgroups/system.slice/{UNIT}/io.max"
        parts = self.guest.parts(
            f"""
                {STAND_IN}
                {weir(*command, "--bps-write", 4_000_000)}
                part asked
                cat {ASKED}
                part kept
                {io_max}
                echo 1 >{STATUS}
                part refused
                status=0
                {weir(*command, "--bps-write", 8_000_000, "--iops-read", 100)} || status=$?
                part status
                echo $status
                part after
                {io_max}
                part shown
                {weir(*command)}
                echo 0 >{STATUS}
                {weir(*command, "--remove")}
                part removed
                {io_max}
            """,
            AWAY,
        )
        limits = f"IOReadBandwidthMax={node} infinity IOWriteBandwidthMax={node} 4000000"
        status, removed = parts["status"].strip(), parts["removed"].strip()
        return [
            contains("what systemd was asked", parts["asked"], f"set-property --runtime -- {UNIT} {limits}"),
            contains("io.max", parts["kept"], "rbps=max wbps=4000000 riops=max wiops=max"),
            fact("a change that systemd refuses", status == "1", f"status {status}", "status 1"),
            contains("what is said of it", parts["refused"], f"systemctl set-property {UNIT}: not now"),
            fact("io.max after it", parts["after"] == parts["kept"], parts["after"], "as it was"),
            contains("what is kept after it", parts["shown"], "bps-write 4000000"),
            fact("io.max when it is removed", not removed, removed, "empty"),
        ]
