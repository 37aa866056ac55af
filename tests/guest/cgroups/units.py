"""Limits of a systemd unit: systemd gets the same limits as the kernel, and if it rejects them,
nothing changes.

The guest has no systemd; a stand-in records the requests, and rejects them on demand.
"""

from commands import weir
from outcome import contains, fact

UNIT = "weir-test.service"
REQUESTS = "/tmp/systemctl.log"
STATUS = "/tmp/systemctl.status"
# The stand-in for systemctl, and the unit's control group.
STAND_IN = f"""
    mkdir -p /run/systemd/system $cgroups/system.slice/{UNIT}
    echo 0 >{STATUS}
    : >{REQUESTS}
    printf '%s\\n' '#!/bin/sh' 'echo "$@" >>{REQUESTS}' 'read -r status <{STATUS}' \\
        '[ $status = 0 ] || echo "not now" >&2' 'exit $status' >/bin/systemctl
    chmod +x /bin/systemctl
"""
CLEAN = (
    f"rm -rf /run/systemd /bin/systemctl; rmdir $cgroups/system.slice/{UNIT} $cgroups/system.slice"
)


class Units:
    """The case, on one disk."""

    def __init__(self, disk):
        self.guest = None  # set by the runner
        self.disk = disk

    def cases(self):
        """Name and function."""
        yield "a systemd unit: systemd gets the limit, and a rejection is rolled back", self.unit

    def unit(self):
        """The requests to systemd and the kernel's limits, for an accepted and for a rejected
        change.
        """
        node = f"/dev/{self.disk.name}"
        command = ("cgroup", "limit", UNIT, "--device", node)
        io_max = f"cat $cgroups/system.slice/{UNIT}/io.max"
        parts = self.guest.parts(
            f"""
                {STAND_IN}
                {weir(*command, "--bps-write", 4_000_000)}
                part requests
                cat {REQUESTS}
                part accepted
                {io_max}
                echo 1 >{STATUS}
                part rejected
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
            CLEAN,
        )
        limits = f"IOReadBandwidthMax={node} infinity IOWriteBandwidthMax={node} 4000000"
        status, removed = parts["status"].strip(), parts["removed"].strip()
        return [
            contains(
                "requests to systemd",
                parts["requests"],
                f"set-property --runtime -- {UNIT} {limits}",
            ),
            contains("io.max", parts["accepted"], "rbps=max wbps=4000000 riops=max wiops=max"),
            fact(
                "exit status of a change that systemd rejects",
                status == "1",
                f"status {status}",
                "status 1",
            ),
            contains(
                "its error message", parts["rejected"], f"systemctl set-property {UNIT}: not now"
            ),
            fact(
                "io.max after the rejected change",
                parts["after"] == parts["accepted"],
                parts["after"],
                "unchanged",
            ),
            contains(
                "limits in weir's file after the rejected change",
                parts["shown"],
                "bps-write 4000000",
            ),
            fact("io.max after the removal", not removed, removed, "empty"),
        ]
