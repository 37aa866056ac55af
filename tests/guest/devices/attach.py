"""`weir attach` and `weir detach` in the guest: over ublk and the kernel's NBD client, with limits,
detached under load, killed and recovered.
"""

import re
from pathlib import Path

from outcome import contains, fact, near

SHELL = Path(__file__).with_name("devices.sh").read_text()
DISK = "/tmp/disk.raw"
DISK_MIB = 64
WAYS = ("ublk", "nbd")
# Options of `weir attach`.
OPTIONS = {"ublk": "ublk", "nbd": "nbd-device"}
# Number of kills of weir's processes, and with --full.
KILLS, FULL_KILLS = 3, 20
# Operations per second, before and after a change, and the number of requests; a tenth of a
# second's worth is admitted at once.
LIMIT, LATER_LIMIT, REQUESTS = 200, 400, 400
# Operations per second while a disk is detached, without --full: the search for its users takes
# seconds.
LOAD = 1000
# Cleanup after a case, whatever its result.
CLEAN = f"""
    touch /tmp/stop
    umount /mnt/d 2>/dev/null
    weir detach --all --force 2>/dev/null
    kill -KILL $weir 2>/dev/null
    wait
    rm -f {DISK} /tmp/small.raw /tmp/daemon.sock $log
"""


def rounds(text):
    """The first number of the last line about each thread: its round."""
    return {thread: int(last) for thread, last in re.findall(r"^(\d+) (\d+)", text, re.MULTILINE)}


def acknowledged(reports, found):
    """Checks that a disk has each round that was acknowledged to a client, or a later one."""
    reported, in_image = rounds(reports), rounds(found)
    lost = {thread: last for thread, last in reported.items() if in_image.get(thread, -1) < last}
    seen = (
        f"{lost} differs from {in_image}"
        if lost
        else f"{sum(reported.values())} rounds of {len(reported)} threads"
    )
    return fact("acknowledged rounds", reported and not lost, seen, "all in the image")


def empty(what, text):
    """Checks that a part is empty."""
    return fact(what, not text.strip(), text.strip() or "none", "none")


class Attach:
    """The cases."""

    def __init__(self, full):
        self.guest = None  # set by the runner
        self._full = full
        self._kills = FULL_KILLS if full else KILLS
        self._load = 0 if full else LOAD

    def cases(self):
        """Name and function of each case."""
        yield "attach: over ublk and NBD", self.attached
        # Limits use the same code for both.
        for way in WAYS if self._full else WAYS[:1]:
            yield f"attach: a limit, over {way}", lambda way=way: self.limit(way)
        for way, word in (("ublk", "disk"), ("nbd", "$device")):
            yield (
                f"attach: detached under load, over {way}",
                lambda way=way, word=word: self.detached(way, word),
            )
        for way in WAYS:
            yield f"attach: detached while it is mounted, over {way}", lambda way=way: self.mounted(way)
        for way in WAYS:
            yield (
                f"attach: killed {self._kills} times under load, over {way}",
                lambda way=way: self.killed(way),
            )
        yield "attach: killed, and not recovered in time", self.given_up
        for way in WAYS:
            yield f"attach: its daemon killed, over {way}", lambda way=way: self.daemon_killed(way)

    def _parts(self, body):
        return self.guest.parts(
            f"""{SHELL}
            [ -e /dev/ublk-control ] || load ublk_drv
            mkdir -p /mnt/d
            truncate -s {DISK_MIB}M {DISK}
            weir= place=/run/weir/attached/disk
            kill_keeper() {{
                kill -KILL "$(sed -n 's/.*"keeper": \\([0-9]*\\).*/\\1/p' $place/attached.json)"
            }}
            {body}""",
            CLEAN,
        )

    def attached(self):
        """Each way that the kernel supports, from the file system to the removal."""
        parts = self._parts(f"""
            mkfs.ext4 -q {DISK}
            part first
            weir attach {DISK} -f raw 2>&1
            weir attach --list
            weir detach disk
            for way in ublk nbd-device; do
                part ${{way%-device}}
                weir attach {DISK} -f raw --$way --mount /mnt/d
                write_files /mnt/d
                ! weir attach {DISK} -f raw --name other
                (cd /mnt/d && ! weir detach disk)
                part ${{way%-device}}_left
                umount /mnt/d
                weir attach --list
                weir detach disk 2>/dev/null || :
                ! ls /run/weir/attached/disk
                rm -f /tmp/other
                e2fsck -fn {DISK} && mkfs.ext4 -q {DISK}
            done
            part partitions
            table() {{
                head -c 446 /dev/zero
                # A Linux partition: start 2048, length 2048 sectors.
                printf '\\0\\0\\0\\0\\203\\0\\0\\0\\0\\010\\0\\0\\0\\010\\0\\0'
                head -c 48 /dev/zero
                printf '\\125\\252'
            }}
            table | dd of={DISK} conv=notrunc 2>/dev/null
            for way in ublk nbd-device; do
                device=$(weir attach {DISK} -f raw --$way 2>/dev/null)
                cat /sys/block/${{device#/dev/}}/${{device#/dev/}}p1/size
                weir detach disk
            done
        """)
        partitions = parts["partitions"].split()
        return [
            fact(
                "partitions",
                partitions == ["2048"] * 2,
                partitions,
                "one of 2048 sectors, over both",
            ),
            contains("the device by default", parts["first"], "/dev/ublkb0"),
            contains("the list of attachments", parts["first"], "a ublk block device"),
            contains("the device over ublk", parts["ublk"], "/dev/ublkb0"),
            contains("a second attachment of the image", parts["ublk"], "lock"),
            contains("the device over NBD", parts["nbd"], "/dev/nbd"),
            contains("detaching a device in use", parts["nbd"], "in use: open in "),
        ]

    def limit(self, way):
        """A limit, measured with the guest's clock, and changed while the disk is attached."""
        parts = self._parts(f"""
            device=$(weir attach {DISK} -f raw --{OPTIONS[way]} --iops-total {LIMIT})
            reads() {{
                # Until its burst has recovered.
                pause 1
                now; echo $now
                dd if=$device of=/dev/null bs=4k count={REQUESTS} iflag=direct 2>/dev/null
                now; echo $now
            }}
            part first
            reads
            part others
            weir throttle disk --iops-total {LATER_LIMIT} --qmp unix:/run/weir/attached/disk/qmp
            part later
            reads
            part others
            weir detach disk
        """)

        def duration(name, rate):
            begin, end = map(float, parts[name].split())
            return near(
                f"reads at {rate} a second",
                end - begin,
                (REQUESTS - rate / 10) / rate,
                0.05,
                "s",
                1,
            )

        return [duration("first", LIMIT), duration("later", LATER_LIMIT)]

    def detached(self, way, word):
        """While numbers are written: rejected by name and by device, and forced by one of them.
        Acknowledged writes are in the image, and nothing else is left.
        """
        parts = self._parts(f"""
            device=$(weir attach {DISK} -f raw --{OPTIONS[way]} --iops-total {LIMIT})
            start_numbers $device
            more_numbers 8
            part name
            ! weir detach disk
            part device
            ! weir detach $device
            part others
            weir throttle disk --iops-total {self._load} --qmp unix:/run/weir/attached/disk/qmp
            more_numbers 8
            part forced
            weir detach --force {word}
            ! wait_for_exit $numbered
            part left
            leftovers
            stuck
            part acknowledged
            cat /tmp/reports
            part found
            check_numbers {DISK}
        """)
        return [
            contains("weir detach NAME", parts["name"], "in use: open in numbered"),
            contains("weir detach DEVICE", parts["device"], "in use: open in numbered"),
            empty("output of weir detach --force", parts["forced"]),
            empty("leftovers", parts["left"]),
            acknowledged(parts["acknowledged"], parts["found"]),
        ]

    def mounted(self, way):
        """While files are written to a file system: rejected by name and by device, and forced. The
        next attachment has all data that was written back.
        """
        parts = self._parts(f"""
            mkfs.ext4 -q {DISK}
            device=$(weir attach {DISK} -f raw --{OPTIONS[way]})
            mount -t ext4 $device /mnt/d
            write_files /mnt/d
            rm -f /tmp/did
            (
                trap 'echo it failed >/tmp/did' EXIT
                cd /mnt/d
                while dd if=kept/6 of=load conv=fsync && cp load load.copied; do :; done 2>/dev/null
            ) &
            writer=$!
            until [ -e /mnt/d/load.copied ]; do pause 0.02; done
            part rejected
            ! weir detach disk
            part by_device
            ! weir detach $device
            part others
            kill -0 $writer
            part forced
            weir detach --force $device
            wait_for_exit $writer || :
            cat /tmp/did
            part left
            leftovers
            stuck
            part others
            device=$(weir attach {DISK} -f raw --{OPTIONS[way]} --mount /mnt/d)
            (cd /mnt/d && md5sum -c sums)
            weir detach /mnt/d
            e2fsck -fn {DISK}
            part after
            leftovers
        """)
        return [
            contains("weir detach NAME", parts["rejected"], "mounted at /mnt/d"),
            contains("weir detach DEVICE", parts["by_device"], "mounted at /mnt/d"),
            contains("the writer", parts["forced"], "it failed"),
            empty("leftovers", parts["left"]),
            empty("leftovers of the next attachment", parts["after"]),
        ]

    def killed(self, way):
        """Kills the server, which its keeper restarts, then the keeper, then both; after a kill of
        the keeper, --recover continues. No write is lost or repeated.
        """
        parts = self._parts(f"""
            device=$(weir attach {DISK} -f raw --{OPTIONS[way]})
            start_numbers $device
            more_numbers 8
            for time in $(seq {self._kills}); do
                pause 0.0$((time % 7))
                case $((time % 3)) in
                    0) kill_keeper ;;
                    1) kill -KILL $(pidof_server) ;;
                    2) kill_keeper; kill -KILL $(pidof_server) ;;
                esac
                [ $((time % 3)) = 1 ] || weir attach --recover
                # Enough that one of the eight threads has begun a round since.
                more_numbers $((time % 5 + 9))
            done
            part ended
            end_numbers
            part others
            weir detach disk
            part left
            leftovers
            stuck
            part acknowledged
            cat /tmp/reports
            part found
            check_numbers {DISK}
        """)
        return [
            contains("the client", parts["ended"], "ok "),
            empty("leftovers", parts["left"]),
            acknowledged(parts["acknowledged"], parts["found"]),
        ]

    def given_up(self):
        """All processes are killed: the device is removed after its `dead-timeout`, and --recover
        creates a new one with the same options.
        """
        parts = self._parts(f"""
            device=$(weir attach {DISK} -f raw --ublk=0,dead-timeout=2,zero-copy=off)
            dd if=$device of=/dev/null bs=64k count=4 iflag=direct
            kill_keeper
            kill -KILL $(pidof_server)
            dd if=$device of=/dev/null bs=64k iflag=direct || :
            until_removed $device
            weir attach --recover
            start_numbers $device
            more_numbers 8
            part ended
            end_numbers
            part served
            tr '\\0' ' ' </proc/$(pidof_server)/cmdline
            part others
            weir detach disk
            part left
            leftovers
            stuck
        """)
        return [
            contains("the client", parts["ended"], "ok "),
            contains("the server", parts["served"], "--ublk=0,dead-timeout=2,zero-copy=off"),
            empty("leftovers", parts["left"]),
        ]

    def daemon_killed(self, way):
        """A daemon that serves an attachment is killed and restarted: the device has waited, and
        --recover makes the daemon serve it.
        """
        parts = self._parts(f"""
            truncate -s 1M /tmp/small.raw
            serve /tmp/small.raw --nbd unix:/tmp/daemon.sock --sandbox off
            device=$(weir attach {DISK} -f raw --{OPTIONS[way]} --qmp unix:$qmp)
            start_numbers $device
            more_numbers 8
            kill_weir
            serve /tmp/small.raw --nbd unix:/tmp/daemon.sock --sandbox off
            weir attach --recover
            more_numbers 8
            part ended
            end_numbers
            part others
            weir detach disk
            stop
            part left
            leftovers
            stuck
            part acknowledged
            cat /tmp/reports
            part found
            check_numbers {DISK}
        """)
        return [
            contains("the client", parts["ended"], "ok "),
            empty("leftovers", parts["left"]),
            acknowledged(parts["acknowledged"], parts["found"]),
        ]
