"""weir's devices of the kernel's NBD client, in the guest: the differences from ublk.py."""

from device import DISK, DISK_MIB, Device
from outcome import contains, fact

NODE = "/dev/nbd3"
# Cleanup after a case, whatever its result.
CLEAN = f"""
    touch /tmp/stop
    umount /mnt/d 2>/dev/null
    kill -KILL $weir 2>/dev/null
    weir detach --all --force 2>/dev/null
    [ ! -e /sys/block/nbd3/pid ] || nbd-client -d {NODE} >/dev/null 2>&1
    wait
    rm -f {DISK} $log
"""


class Nbd(Device):
    """The cases."""

    node = NODE
    option = f"--nbd-device {NODE}"
    killed_option = f"--nbd-device {NODE},connections=2,timeout=2"
    restart_option = "--nbd-device auto,timeout=2"
    recovery_log = "taking over"
    upgrade_option = f"--nbd-device {NODE},connections=2"
    # The kernel's client does not notice an upgrade.
    observe = """
            part kernel
            dmesg | grep -i nbd3 || echo nothing
            part sockets
            run_qmp '{"execute":"x-weir-query-status"}'
    """
    prologue = f"free() {{ until_free {NODE}; }}; nodes() {{ :; }}"
    clean = CLEAN

    def cases(self):
        """Name and function of each case."""
        yield "nbd: attributes in /sys", self.attributes
        yield "nbd: a limit", self.limit
        yield "nbd: a new size", self.resized
        yield f"nbd: killed {self._kills} times under load", self.killed
        yield f"nbd: upgraded {self._upgrades} times under load", self.upgraded
        yield "nbd: stopped while it is mounted", self.stopped
        yield "nbd: removed under load", self.removed
        yield "nbd: disconnected by another program", self.disconnected
        yield "nbd: errors", self.errors
        yield "nbd: called as qemu-nbd", self.as_qemu

    def upgrade_checks(self, parts):
        return [
            fact(
                "the kernel's log during the upgrades",
                parts["kernel"].strip() == "nothing",
                parts["kernel"],
                "nothing",
            ),
            contains("number of sockets", parts["sockets"], '"sockets":2'),
            contains("replaced sockets", parts["sockets"], '"replaced":0'),
        ]

    def nodes_checks(self, parts):
        return []

    def attributes(self):
        """Attributes of a device in /sys."""
        parts = self.parts(f"""
            serve {DISK} --nbd-device {NODE},connections=3
            part attributes
            cat /sys/block/nbd3/ro /sys/block/nbd3/queue/logical_block_size /sys/block/nbd3/queue/write_cache
            cat /sys/block/nbd3/size /sys/block/nbd3/backend
            part others
            stop
            free
        """)
        attributes = parts["attributes"].split()
        expected = ["0", "512", "write", "back", str(DISK_MIB << 11), f"weir:{DISK}"]
        return [fact("attributes of a device", attributes == expected, attributes, expected)]

    def resized(self):
        """A new size takes effect at once."""
        larger = (DISK_MIB + 20) << 20
        resize = f'{{"execute":"block_resize","arguments":{{"node-name":"disk","size":{larger}}}}}'
        parts = self.parts(f"""
            serve {DISK} --nbd-device {NODE}
            part reply
            run_qmp '{resize}'
            part size
            for try in $(seq 50); do
                size=$(blockdev --getsize64 {NODE})
                [ $size != {larger} ] || break
                pause 0.02
            done
            echo $size
            dd if=/dev/urandom of={NODE} bs=1M count=1 seek={DISK_MIB + 19} oflag=direct
            stop
            free
        """)
        return [
            contains("the reply to block_resize", parts["reply"], "return"),
            contains("size", parts["size"], str(larger)),
        ]

    def stopped(self):
        """weir is stopped while a file system is mounted: it waits for the next weir."""
        parts = self.parts(f"""
            serve {DISK} --nbd-device {NODE}
            mkfs.ext4 -q {NODE}
            mount -t ext4 {NODE} /mnt/d
            rm -f /tmp/stop /tmp/did
            (while ! [ -e /tmp/stop ]; do date >>/mnt/d/dates && sync; done; echo written >/tmp/did) &
            write_files /mnt/d
            stop
            part kept
            ls /sys/block/nbd3/backend
            serve {DISK} --nbd-device {NODE}
            part others
            touch /tmp/stop
            until [ -e /tmp/did ]; do pause 0.02; done
            (cd /mnt/d && md5sum -c sums)
            umount /mnt/d
            e2fsck -fn {NODE}
            stop
            free
        """)
        return [contains("the device after the end of weir", parts["kept"], "backend")]

    def removed(self):
        """Removal over QMP while the device is in use: rejected in safe mode; in hard mode later
        requests fail."""
        remove = '{{"execute":"block-export-del","arguments":{{"id":"disk","mode":"{}"}}}}'
        parts = self.parts(f"""
            serve {DISK} --nbd-device {NODE}
            start_numbers {NODE}
            more_numbers 8
            part safe
            run_qmp '{remove.format("safe")}'
            more_numbers 8
            part hard
            run_qmp '{remove.format("hard")}'
            part client
            wait_for_exit $numbered || echo it failed
            part others
            free
            stop
            part waiting
            for state in $(grep -l '^State:.D' /proc/[0-9]*/status); do
                # Kernel threads, which have no command line, may sleep uninterruptibly.
                tr '\\0' ' ' <${{state%status}}cmdline
            done
            echo none
        """)
        return [
            contains("removal in safe mode", parts["safe"], "numbered"),
            contains("removal in hard mode", parts["hard"], "return"),
            contains("the client after the removal", parts["client"], "it failed"),
            fact(
                "processes that hang", parts["waiting"].strip() == "none", parts["waiting"], "none"
            ),
        ]

    def disconnected(self):
        """Another program disconnects the device, and weir ends, as --exit-when-idle requires."""
        parts = self.parts(f"""
            serve {DISK} --nbd-device {NODE} --exit-when-idle
            dd if={NODE} of=/dev/null bs=4k count=4 iflag=direct
            nbd-client -d {NODE}
            part ended
            wait_for_exit $weir && echo it ended
            cat $log
        """)
        return [
            contains("end of weir", parts["ended"], "it ended"),
            contains("weir's log", parts["ended"], "the device was removed"),
        ]

    def errors(self):
        """Errors: a device in use, and a size that is not a multiple of a sector."""
        parts = self.parts(f"""
            serve {DISK} --nbd-device {NODE}
            truncate -s 1M /tmp/other.raw
            truncate -s 1000 /tmp/odd.raw
            part in_use
            ! weir serve /tmp/other.raw --nbd-device {NODE}
            part odd
            ! weir serve /tmp/odd.raw --nbd-device auto
            part others
            dd if={NODE} of=/dev/null bs=4k count=4 iflag=direct
            stop
            free
            rm -f /tmp/other.raw /tmp/odd.raw
        """)
        return [
            contains("a device in use", parts["in_use"], "/dev/nbd3 is in use by another server"),
            contains("an odd size", parts["odd"], "not a multiple of 512"),
        ]

    def as_qemu(self):
        """Connected and disconnected by a link named qemu-nbd, as scripts for it do."""
        parts = self.parts(f"""
            weir=
            ln -sf "$(command -v weir)" /tmp/qemu-nbd
            ended() {{ until ! [ -e /tmp/qemu.pid ]; do pause 0.02; done; }}
            part connected
            /tmp/qemu-nbd -c {NODE} -f raw --pid-file=/tmp/qemu.pid {DISK}
            cat /sys/block/nbd3/size
            mkfs.ext4 -q {NODE}
            mount -t ext4 {NODE} /mnt/d
            write_files /mnt/d
            part used
            (cd /mnt/d && ! /tmp/qemu-nbd -d {NODE})
            umount /mnt/d
            part disconnected
            /tmp/qemu-nbd -d {NODE}
            free
            ended
            e2fsck -fn {DISK}
            part temporary
            md5sum <{DISK}
            TMPDIR=/tmp /tmp/qemu-nbd --connect={NODE} -s -f raw --pid-file=/tmp/qemu.pid {DISK}
            dd if=/dev/urandom of={NODE} bs=1M count=8 oflag=direct 2>/dev/null
            /tmp/qemu-nbd -d {NODE}
            free
            ended
            md5sum <{DISK}
        """)
        before, after = [line for line in parts["temporary"].splitlines() if line.endswith(" -")]
        return [
            contains("size of the device", parts["connected"], str(DISK_MIB * 2048)),
            contains("disconnecting a device in use", parts["used"], "in use"),
            contains("disconnecting", parts["disconnected"], f"{NODE} disconnected"),
            fact("the image behind a temporary file", before == after, after, before),
        ]
