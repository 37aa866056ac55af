"""weir's block devices over a reboot, where systemd mounts what lies on them: a line of fstab for
the device of a unit, and one of the type `weir`, as docs/containers.md has them.

The order is what is tested: at the boot the images' own file system, weir, the device, its mount,
then services; at the shutdown the opposite. A file system whose device went before it was unmounted
has its journal replayed at the next boot, and the kernel says so.
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
# A service that is ordered like any other: it writes when it is started, and when it is stopped.
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
        self.guest = None  # set when it runs

    def cases(self):
        """Name and function."""
        yield "attach --udev: links by which a file system is found", self.links
        yield "systemd: a mount on a device of weir's, over two reboots", self.reboots

    def links(self):
        """What is there once the device's name is printed, for each way that udev's rules may know."""
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
        """What two file systems have after each."""
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
        turns, sums = parts["files"].count("started\nstopped\nstarted\n"), parts["sums"]
        kernel, failed = parts["kernel"], parts["failed"].strip()
        return [
            *[contains("what is mounted", parts["mounts"], f" {mount} ext4 ") for mount in MOUNTS],
            fact("a service's turns", turns == 2, f"right on {turns}", "started, stopped, started on 2"),
            fact("20 MB that nobody synced", sums.count("large: OK") == 2, sums, "right on both"),
            fact("what the kernel says", not re.search("recovery|rror", kernel), kernel, "clean mounts"),
            fact("failed units", not failed, failed, "none"),
        ]
