"""weir's block devices over a reboot, where systemd mounts their file systems: a line of fstab for
the device of a unit, and one of the type `weir`, as in docs/containers.md.

The order is tested: at the boot the images' own file system, weir, the device, its mount, then
services; at the shutdown the reverse. If a device is removed before its file system is unmounted,
the journal is replayed at the next boot, and the kernel logs that.
"""

import re
from pathlib import Path

from outcome import contains, fact

ROOT = Path(__file__).resolve().parent.parent.parent.parent
UNIT = (ROOT / "packaging/systemd/weir-attach@.service").read_text()
RULES = (ROOT / "packaging/udev/61-weir.rules").read_text()
FSTAB = """\
LABEL=db        /srv/db   ext4  x-systemd.requires=weir-attach@db.service  0 2
/srv/vm1.qcow2  /mnt/vm1  weir  iops-total=2000,noatime                    0 0
"""
MOUNTS = ("/srv/db", "/mnt/vm1")
# A service with default ordering: it writes when it is started, and when it is stopped.
SERVICE = """\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'for mount in /srv/db /mnt/vm1; do echo started >>$mount/service; done'
ExecStop=/bin/sh -c 'for mount in /srv/db /mnt/vm1; do echo stopped >>$mount/service; done'

[Install]
WantedBy=multi-user.target
"""
SEEN = f"""
    part mounts
    grep -E ' ({"|".join(MOUNTS)}) ' /proc/mounts
    part files
    cat {" ".join(f"{mount}/service {mount}/large.sum" for mount in MOUNTS)}
    part sums
    for mount in {" ".join(MOUNTS)}; do (cd $mount && md5sum -c large.sum); done
    part kernel
    dmesg | grep -E 'EXT4-fs|I/O error' || true
    part failed
    systemctl --failed --no-legend --plain
"""
WRITE = f"""
    for mount in {" ".join(MOUNTS)}; do
        head -c 20000000 /dev/urandom >$mount/large
        (cd $mount && md5sum large >large.sum)
    done
"""


INSTALL_RULES = f"""
    cat >/etc/udev/rules.d/61-weir.rules <<'RULES'
{RULES}RULES
    udevadm control --reload
"""


class Boot:
    """The case."""

    def __init__(self):
        self.guest = None  # set by the runner

    def cases(self):
        """Name and function of each case."""
        yield "attach --udev: links by which a file system is found", self.links
        yield "systemd: a mount on a device of weir, over two reboots", self.reboots

    def links(self):
        """Links that exist when the device's name is printed, for each way that udev's rules
        support."""
        checks = []
        self.guest.run(INSTALL_RULES)
        for way, option in (("ublk", "ublk"), ("nbd", "nbd-device")):
            label = f"on-{way}"
            parts = self.guest.parts(
                f"""
                weir image create -q -f qcow2 /srv/{label}.qcow2 64M
                device=$(weir attach --{option} /srv/{label}.qcow2)
                mkfs.ext4 -q -L {label} $device
                weir detach $device
                part device
                weir attach --udev --{option} /srv/{label}.qcow2 2>/dev/null
                part link
                readlink -f /dev/disk/by-label/{label} || ls -R /dev/disk
                """,
                f"weir detach --all; rm -f /srv/{label}.qcow2",
            )
            checks.append(contains(f"the label by {way}", parts["link"], parts["device"].strip()))
        return checks

    def reboots(self):
        """Contents of two file systems after each reboot."""
        self.guest.run(f"""
            set -e
            mkdir -p /etc/weir/attach /var/lib/weir {" ".join(MOUNTS)}
            ln -sf ../bin/weir /usr/sbin/mount.weir
            cat >/etc/systemd/system/weir-attach@.service <<'UNIT'
{UNIT}UNIT
            cat >/etc/systemd/system/writes.service <<'UNIT'
{SERVICE}UNIT
{INSTALL_RULES}
            cat >/etc/fstab <<'FSTAB'
{FSTAB}FSTAB
            printf '%s\\n' IMAGE=/srv/db.qcow2 'OPTIONS=--ublk=7 --iops-total 2000' >/etc/weir/attach/db.conf
            for image in db vm1; do
                weir image create -q -f qcow2 /srv/$image.qcow2 256M
                device=$(weir attach /srv/$image.qcow2)
                mkfs.ext4 -q -L $image $device
                weir detach $device
            done
            systemctl daemon-reload
            systemctl enable --quiet weir-attach@db.service writes.service
        """)
        self.guest.reboot()
        self.guest.run(WRITE)
        self.guest.reboot()
        parts = self.guest.parts(SEEN)
        starts_and_stops, sums = parts["files"].count("started\nstopped\nstarted\n"), parts["sums"]
        kernel, failed = parts["kernel"], parts["failed"].strip()
        return [
            *[contains("mounts", parts["mounts"], f" {mount} ext4 ") for mount in MOUNTS],
            fact(
                "starts and stops of the service on both file systems",
                starts_and_stops == 2,
                f"right on {starts_and_stops}",
                "started, stopped, started on 2",
            ),
            fact("20 MB without a sync", sums.count("large: OK") == 2, sums, "right on both"),
            fact("kernel log", not re.search("recovery|rror", kernel), kernel, "clean mounts"),
            fact("failed units", not failed, failed, "none"),
        ]
