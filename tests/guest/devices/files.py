"""File systems on weir's block devices, over ublk and the kernel's NBD client, on raw images, on
qcow2, and on qcow2 with a backing file: created, remounted, trimmed, extended, and checked on the
device and in the image.
"""

import itertools
from pathlib import Path

from outcome import contains, fact

SHELL = Path(__file__).with_name("devices.sh").read_text()
DISK, BASE = "/tmp/disk.image", "/tmp/base.qcow2"
# The content of an image in raw format.
FLAT = "/tmp/flat.raw"
# mkfs.xfs needs at least 300 MB; the image is sparse.
DISK_MIB, MORE_MIB = 400, 100
# Options of weir and the device, for each way.
WAYS = {"ublk": ("--ublk=0", "/dev/ublkb0"), "nbd": ("--nbd-device /dev/nbd3,connections=3", "/dev/nbd3")}
# Commands to create, check and grow a file system.
KINDS = {
    "ext4": ("mkfs.ext4 -q", "e2fsck -fn", "resize2fs $device"),
    "xfs": ("mkfs.xfs -q", "xfs_repair -n", "xfs_growfs /mnt/d"),
}
IMAGES = {"raw": "", "qcow2": " on qcow2", "overlay": " on qcow2 over another"}
# Without --full: each image with both ways, and once with each file system.
SHORT = {
    ("ublk", "ext4", "raw"), ("nbd", "xfs", "raw"),
    ("ublk", "ext4", "qcow2"), ("nbd", "xfs", "qcow2"),
    ("ublk", "xfs", "overlay"), ("nbd", "ext4", "overlay"),
}  # fmt: skip
# Cleanup after a case, whatever its result.
CLEAN = f"""
    umount /mnt/d 2>/dev/null
    kill -KILL $weir 2>/dev/null
    weir detach --force /dev/ublkb0 2>/dev/null
    [ ! -e /sys/block/nbd3/pid ] || nbd-client -d /dev/nbd3 >/dev/null 2>&1
    wait
    rm -f {DISK} {BASE} {FLAT} $log
"""


class Files:
    """The cases."""

    def __init__(self, full):
        self.guest = None  # set by the runner
        self._all = full

    def cases(self):
        """Name and function of each case."""
        for way, kind, image in itertools.product(WAYS, KINDS, IMAGES):
            if self._all or (way, kind, image) in SHORT:
                yield (
                    f"{way}: {kind}{IMAGES[image]}",
                    lambda way=way, kind=kind, image=image: self.files(way, kind, image),
                )
        for way, kind in itertools.product(WAYS, KINDS):
            if self._all or (way, kind) in (("ublk", "xfs"), ("nbd", "ext4")):
                yield f"{way}: {kind} that grows", lambda way=way, kind=kind: self.grown(way, kind)

    def _parts(self, way, kind, body):
        option, node = WAYS[way]
        return self.guest.parts(
            f"""{SHELL}
            [ -d /sys/module/{kind} ] || load {kind}
            [ -e /dev/ublk-control ] || load ublk_drv
            mkdir -p /mnt/d
            device={node}
            serve_image() {{ serve {DISK} --name disk -f $format {option}; }}
            mounted() {{ mount -t {kind} $device /mnt/d; }}
            {body}""",
            CLEAN,
        )

    def files(self, way, kind, image):
        """A file system: remounted, trimmed and checked."""
        make, check, _ = KINDS[kind]
        fresh = f"{make} $device"
        create = {
            "raw": f"format=raw; truncate -s {DISK_MIB}M {DISK}",
            "qcow2": f"format=qcow2; weir image create -q -f qcow2 {DISK} {DISK_MIB}M",
            # The backing file contains a file system with files.
            "overlay": f"""
                format=qcow2
                truncate -s {DISK_MIB}M {FLAT}
                {make} {FLAT}
                mount -t {kind} -o loop {FLAT} /mnt/d
                mkdir /mnt/d/below
                write_files /mnt/d/below
                umount /mnt/d
                weir image convert -O qcow2 {FLAT} {BASE}
                rm {FLAT}
                weir image create -q -f qcow2 -b {BASE} -F qcow2 {DISK}
                part before
                md5sum <{BASE}
                part others
            """,
        }[image]
        has_backing_file = image == "overlay"
        flat, flatten = DISK, ""
        if image != "raw":
            flat = FLAT
            flatten = f"weir image check {DISK}; weir image convert -f qcow2 -O raw {DISK} {FLAT}"
        parts = self._parts(
            way,
            kind,
            f"""
            {create}
            serve_image
            {":" if has_backing_file else fresh}
            mounted
            write_files /mnt/d
            part full
            stat -c %b {DISK}
            part others
            rm -r /mnt/d/gone {"/mnt/d/below/gone" if has_backing_file else ""}
            # xfs frees unlinked files asynchronously, and by now at the latest.
            umount /mnt/d
            mounted
            fstrim /mnt/d
            (cd /mnt/d && md5sum -c sums && cmp kept/1 copied/1)
            {"(cd /mnt/d/below && md5sum -c sums)" if has_backing_file else ""}
            umount /mnt/d
            {check} $device
            stop
            until_free $device
            part freed
            stat -c %b {DISK}
            part image
            {flatten}
            {check} {flat}
            part after
            {f"md5sum <{BASE}" if has_backing_file else ""}
            """,
        )
        freed = (int(parts["full"]) - int(parts["freed"])) * 512
        checks = [fact("bytes freed by fstrim", freed >= 5 << 20, freed, "5 MiB or more of 6")]
        if image != "raw":
            checks.append(contains("check of the image", parts["image"], "No errors were found"))
        if has_backing_file:
            before, after = parts["before"], parts["after"]
            checks.append(fact("content of the backing file", before == after, after, before))
        return checks

    def grown(self, way, kind):
        """A file system grows after its device, which follows the disk at once, except for ublk
        before Linux 6.16.
        """
        make, check, grow = KINDS[kind]
        size = (DISK_MIB + MORE_MIB) << 20
        parts = self._parts(
            way,
            kind,
            f"""
            format=qcow2
            weir image create -q -f qcow2 {DISK} {DISK_MIB}M
            serve_image
            {make} $device
            mounted
            write_files /mnt/d
            part before
            stat -f -c '%b %S' /mnt/d
            part others
            WEIR_QMP=unix:$qmp weir image resize -f qcow2 {DISK} {size}
            pause 0.5
            [ "$(blockdev --getsize64 $device)" = {size} ] || {{
                umount /mnt/d
                stop
                serve_image
                mounted
            }}
            {grow}
            part after
            stat -f -c '%b %S' /mnt/d
            part others
            # Mostly beyond the old end.
            fallocate -l {DISK_MIB}M /mnt/d/large
            dd if=/mnt/d/kept/6 of=/mnt/d/large bs=100k seek=$(({DISK_MIB} * 10)) conv=notrunc,fsync
            umount /mnt/d
            mounted
            (cd /mnt/d && md5sum -c sums)
            umount /mnt/d
            {check} $device
            stop
            until_free $device
            part image
            weir image check {DISK}
            """,
        )

        def total(text):
            blocks, block = map(int, text.split())
            return blocks * block

        more = total(parts["after"]) - total(parts["before"])
        return [
            fact(
                "bytes added to the file system",
                more >= (MORE_MIB - 10) << 20,
                more,
                f"{MORE_MIB} MiB, nearly",
            ),
            contains("check of the image", parts["image"], "No errors were found"),
        ]
