"""weir's ublk devices in the guest's own kernel: limits, and the devices after different ends of
weir.

Each case is one script in the guest, with checks of its output.
"""

import json
import re

from device import DISK, DISK_MIB, LIMIT, Device
from outcome import contains, fact

NODE = "/dev/ublkb0"
# Seconds for which requests wait for a restart of weir, and the additional time until they fail,
# including the kernel's own delay on 6.1.
DEAD_TIMEOUT, MARGIN = 3, 6
# Cleanup after a case, whatever its result.
CLEAN = f"""
    touch /tmp/stop
    umount /mnt/d 2>/dev/null
    kill -KILL $weir 2>/dev/null
    [ ! -e {NODE} ] || {{ serve {DISK} --ublk && kill -TERM $weir; }}
    wait
    rm -f {DISK} $log
"""


def version(release):
    """Major and minor version of a kernel."""
    return [int(number) for number in release.split(".")[:2]]


class Ublk(Device):
    """The cases."""

    node = NODE
    option = "--ublk"
    killed_option = upgrade_option = "--ublk=0,queues=2"
    restart_option = "--ublk"
    recovery_log = "took over"
    observe = """
            part log
            grep 'recovered the devices of ublk' $log
    """
    prologue = "[ -e /dev/ublk-control ] || load ublk_drv; free() { :; }; nodes() { ls /dev/ublk*; }"
    clean = CLEAN

    def cases(self):
        """Name and function of each case."""
        yield "ublk: attributes in /sys", self.attributes
        yield "ublk: a limit", self.limit
        yield "ublk: a new size", self.resized
        yield f"ublk: killed {self._kills} times under load", self.killed
        yield f"ublk: upgraded {self._upgrades} times under load", self.upgraded
        yield "ublk: zero copy", self.zero_copy
        yield "ublk: stopped while it is mounted", self.stopped
        yield "ublk: orphaned by a kill", self.orphaned
        yield "ublk: killed, and not recovered in time", self.given_up
        yield "ublk: killed, and recovered in time", self.in_time
        yield "ublk: removed under load", self.removed
        yield "ublk: an unprivileged user", self.unprivileged
        yield "ublk: errors", self.errors

    def upgrade_checks(self, parts):
        return [contains("log of the new process", parts["log"], "pause_us=")]

    def nodes_checks(self, parts):
        nodes = parts["nodes"]
        return [fact("nodes afterwards", nodes.split() == ["/dev/ublk-control"], nodes, "none")]

    def _waits_for_users(self):
        """True if the driver of this kernel blocks all commands while a removed device has openers:
        then the process that removes it cannot be killed either.
        """
        return self.guest.run("uname -r").startswith("6.1.")

    def attributes(self):
        """Attributes of a device in /sys."""
        shown = "ro queue/logical_block_size queue/physical_block_size queue/write_cache queue/fua size"
        parts = self.parts(f"""
            read_all() {{ for name in {shown}; do cat /sys/block/ublkb0/$name; done; }}
            serve {DISK} --ublk=0,queues=2
            part writable
            read_all
            part queues
            ls /sys/block/ublkb0/mq | wc -l
            part erases
            cat /sys/block/ublkb0/queue/discard_max_bytes /sys/block/ublkb0/queue/write_zeroes_max_bytes
            blkdiscard {NODE}
            stop
            part read_only
            serve {DISK} --ublk --read-only
            read_all
            ! dd if=/dev/zero of={NODE} bs=4k count=1 oflag=direct
            dd if={NODE} of=/dev/null bs=64k count=16 iflag=direct
            stop
            part through
            serve {DISK} --ublk=0,discard=off,write-zeroes=off --cache writethrough
            cat /sys/block/ublkb0/queue/write_cache
            cat /sys/block/ublkb0/queue/discard_max_bytes /sys/block/ublkb0/queue/write_zeroes_max_bytes
            stop
        """)
        sectors = str(DISK_MIB << 11)
        writable = ["0", "512", "4096", "write", "back", "1", sectors]
        read_only = parts["read_only"].split()
        return [
            fact(
                "attributes of a device",
                parts["writable"].split() == writable,
                parts["writable"],
                writable,
            ),
            fact(
                "number of queues",
                parts["queues"].strip() in "12",
                parts["queues"],
                "at most the number of processors",
            ),
            fact(
                "maximum discard",
                parts["erases"].split() == [str(1 << 30)] * 2,
                parts["erases"],
                "1 GiB",
            ),
            fact(
                "attributes of a read-only device",
                read_only[:3] == ["1", "512", "4096"],
                read_only,
                "1 512 4096",
            ),
            fact(
                "attributes without a cache and without discards",
                parts["through"].split() == ["write", "through", "0", "0"],
                parts["through"],
                "write through 0 0",
            ),
        ]

    def resized(self):
        """A new size takes effect at once from Linux 6.16 on; earlier, it is rejected with a
        message."""
        larger = (DISK_MIB + 20) << 20
        parts = self.parts(f"""
            part kernel
            uname -r
            part others
            serve {DISK} --ublk
            part reply
            name=$(run_qmp '{{"execute":"query-block-exports"}}' | sed 's/.*"node-name": *"\\([^"]*\\)".*/\\1/')
            run_qmp '{{"execute":"block_resize","arguments":{{"node-name":"'$name'","size":{larger}}}}}'
            part now
            pause 0.5
            blockdev --getsize64 {NODE}
            cat $log
            stop
            part restarted
            serve {DISK} --ublk
            blockdev --getsize64 {NODE}
            dd if=/dev/urandom of={NODE} bs=1M count=1 seek={DISK_MIB + 19} oflag=direct
            stop
        """)
        is_supported = version(parts["kernel"]) >= [6, 16]
        now = str(larger) if is_supported else "keeps its length"
        return [
            fact("the reply to block_resize", "return" in parts["reply"], parts["reply"], "return"),
            contains("size" if is_supported else "log", parts["now"], now),
            contains("size after a restart of weir", parts["restarted"], str(larger)),
        ]

    def zero_copy(self):
        """Zero copy for raw images from Linux 6.16 on, through kills, file systems and discards;
        data that was prefetched, or that might be a header, is copied. On earlier kernels, and if
        it is switched off, memory is mapped.
        """
        parts = self.parts(f"""
            part kernel
            uname -r
            part others
            query_status() {{ run_qmp '{{"execute":"x-weir-query-status"}}'; }}
            serve {DISK} -f raw --prefetch off --ublk
            start_numbers {NODE}
            more_numbers 8
            for time in 1 2; do
                kill_weir
                serve {DISK} -f raw --prefetch off --ublk
                grep 'took over' $log
                more_numbers 4
            done
            end_numbers
            mkfs.ext4 -q {NODE}
            mount -t ext4 {NODE} /mnt/d
            write_files /mnt/d
            rm -r /mnt/d/gone
            fstrim /mnt/d
            umount /mnt/d
            mount -t ext4 {NODE} /mnt/d
            (cd /mnt/d && md5sum -c sums && cmp kept/1 copied/1)
            umount /mnt/d
            e2fsck -fn {NODE}
            part direct
            query_status
            part others
            run_qmp '{{"execute":"x-weir-set","arguments":{{"name":"disk","prefetch":"on"}}}}'
            head -c 8388608 {DISK} >/tmp/first
            dd if={NODE} bs=16k count=512 iflag=direct 2>/dev/null | compare - /tmp/first
            part prefetched
            query_status
            part others
            stop
            mount -t ext4 -o loop {DISK} /mnt/d
            (cd /mnt/d && md5sum -c sums)
            umount /mnt/d
            serve {DISK} --prefetch off --ublk
            dd if={NODE} of=/tmp/first bs=64k count=1 iflag=direct
            dd if=/tmp/first of={NODE} bs=64k count=1 oflag=direct
            printf 'QFI\\373' | dd of=/tmp/first conv=notrunc 2>/dev/null
            ! dd if=/tmp/first of={NODE} bs=64k count=1 oflag=direct
            rm /tmp/first
            part header
            query_status
            part others
            upgrade {DISK} --prefetch off --ublk
            part upgraded
            query_status
            part others
            stop
            serve {DISK} -f raw --prefetch off --ublk=0,zero-copy=off
            dd if={NODE} bs=64k count=128 iflag=direct 2>/dev/null | compare - {DISK} -n 8388608
            part off
            query_status
            part others
            stop
            e2fsck -fn {DISK}
        """)

        def export_counters(name):
            export = json.loads(parts[name])["return"]["exports"][0]
            return export["zero-copy"], export["copied-bytes"]

        is_supported = version(parts["kernel"]) >= [6, 16]
        prefetched, header = export_counters("prefetched"), export_counters("header")
        return [
            fact(
                "zero copy under load",
                export_counters("direct") == (is_supported, 0),
                export_counters("direct"),
                (is_supported, 0),
            ),
            fact(
                "reads of prefetched data",
                prefetched[0] == is_supported and (prefetched[1] > 1 << 20) == is_supported,
                prefetched,
                "copied",
            ),
            fact(
                "data that may be a qcow2 header",
                header == (is_supported, is_supported * (128 << 10)),
                header,
                "copied, twice",
            ),
            fact(
                "counters after the upgrade",
                export_counters("upgraded") == header,
                export_counters("upgraded"),
                header,
            ),
            fact(
                "zero copy switched off",
                export_counters("off") == (False, 0),
                export_counters("off"),
                (False, 0),
            ),
        ]

    def stopped(self):
        """weir is stopped while a file system is mounted: it waits for the next weir."""
        parts = self.parts(f"""
            serve {DISK} --ublk
            mkfs.ext4 -q {NODE}
            mount -t ext4 {NODE} /mnt/d
            rm -f /tmp/stop /tmp/did
            (while ! [ -e /tmp/stop ]; do date >>/mnt/d/dates && sync; done; echo written >/tmp/did) &
            write_files /mnt/d
            part log
            stop
            cat $log
            part failed
            timeout 60 weir serve {DISK} -f raw --qmp none --ublk --record /nowhere 2>&1 || echo ended by $?
            part nodes
            ls /dev/ublkb*
            serve {DISK} --ublk
            part others
            touch /tmp/stop
            until [ -e /tmp/did ]; do pause 0.02; done
            (cd /mnt/d && md5sum -c sums)
            umount /mnt/d
            e2fsck -fn {NODE}
            stop
            part after
            ls /dev/ublk*
        """)
        return [
            contains("log", parts["log"], "the device is in use and is kept"),
            contains(
                "log of a start that fails", parts["failed"], "the device is in use and is kept"
            ),
            contains("exit status of a start that fails", parts["failed"], "ended by 1"),
            contains("nodes after a start that fails", parts["nodes"], NODE),
            fact(
                "nodes afterwards",
                parts["after"].split() == ["/dev/ublk-control"],
                parts["after"],
                "none",
            ),
        ]

    def orphaned(self):
        """An orphaned device is listed, and can be removed."""
        stays_open = f"""
            part stays_open
            serve {DISK} --ublk
            exec 3<{NODE}
            kill_weir
            ! weir detach --force {NODE} 2>&1 3<&-
            exec 3<&-
        """
        stays_open = "" if self._waits_for_users() else stays_open
        parts = self.parts(f"""
            serve {DISK} --ublk=0,dead-timeout=600
            kill_weir
            part listed
            weir attach --list
            part used
            exec 3<{NODE}
            ! weir detach {NODE} 2>&1
            exec 3<&-
            dd if={NODE} of=/dev/null bs=4k iflag=direct & waiting=$!
            part forced
            weir detach --force {NODE}
            ! wait $waiting
            part guards
            guards
            part others
            serve {DISK} --ublk
            mkfs.ext4 -q {NODE}
            mount -t ext4 {NODE} /mnt/d
            dd if=/dev/urandom of=/mnt/d/file bs=64k count=16
            kill_weir
            part mounted
            weir detach --force {NODE}
            ! grep /mnt/d /proc/mounts
            {stays_open}
            part after
            ls /dev/ublk*
            weir attach --list
        """)
        checks = (
            [
                contains(
                    "removal of a device that stays open",
                    parts["stays_open"],
                    "when its last user closes it (in use: open in ",
                )
            ]
            if stays_open
            else []
        )
        return [
            *checks,
            contains("the list of devices", parts["listed"], "ublk, orphaned"),
            contains("detaching a device in use", parts["used"], "in use: "),
            fact(
                "guards after the removal", parts["guards"].strip() == "0", parts["guards"], "none"
            ),
            fact(
                "removal of a mounted device",
                not parts["mounted"].strip(),
                parts["mounted"],
                "unmounted",
            ),
            contains("nodes afterwards", parts["after"].split()[0], "/dev/ublk-control"),
            fact("devices afterwards", NODE not in parts["after"], parts["after"], "none"),
        ]

    def given_up(self):
        """Requests fail after `dead-timeout`, and the device is removed; its number stays while it
        has openers, for which the next weir does not wait.
        """
        another = f"""
            part others
            serve {DISK} --ublk=0,dead-timeout=1
            exec 3<{NODE}
            kill_weir
            until_removed {NODE}
            part another
            serve {DISK} --ublk 3<&-
            ls /dev/ublkb*
            part others
            exec 3<&-
            stop
        """
        another = "" if self._waits_for_users() else another
        parts = self.parts(f"""
            read_on() {{
                while dd if={NODE} of=/dev/null bs=64k iflag=direct 2>/dev/null; do :; done
                now; echo $now >/tmp/failed
            }}
            serve {DISK} --ublk=0,dead-timeout={DEAD_TIMEOUT}
            read_on & reader=$!
            pause 0.5
            part guards
            guards
            part failed
            now; echo $now
            kill_weir
            wait_for_exit $reader
            cat /tmp/failed
            until_removed {NODE}
            # The node is removed after it.
            until_removed /dev/ublkc0
            part left
            leftovers
            stuck
            weir attach --list | grep ublkb || :
            part log
            cat $log
            {another}
            rm /tmp/failed
            part after
            leftovers
            ls /dev/ublk*
        """)
        # The shell may print that it has killed weir.
        died, failed = map(float, re.findall(r"^[\d.]+$", parts["failed"], re.MULTILINE))
        checks = (
            [
                contains(
                    "number of the next device beside an open one", parts["another"], "/dev/ublkb1"
                )
            ]
            if another
            else []
        )
        return [
            fact("guards", parts["guards"].strip() == "1", parts["guards"], "one"),
            fact(
                "the reader gets an error",
                DEAD_TIMEOUT <= failed - died <= DEAD_TIMEOUT + MARGIN,
                f"after {failed - died:.2f} s",
                f"after {DEAD_TIMEOUT} s, at most {MARGIN} s later",
            ),
            contains("log", parts["log"], f"no process has served it for {DEAD_TIMEOUT} s"),
            fact("leftovers", not parts["left"].strip(), parts["left"], "nothing"),
            *checks,
            fact("nodes afterwards", parts["after"].split() == ["/dev/ublk-control"], parts["after"], "none"),
        ]

    def in_time(self):
        """A weir that recovers the device in time keeps it: twice, the second time when the first
        weir's timeout would have expired, and in an upgrade. Without `dead-timeout` the device
        waits forever.
        """
        # The limit reduces the work of the emulator.
        option = f"--ublk=0,dead-timeout={DEAD_TIMEOUT} --iops-total {LIMIT}"
        parts = self.parts(f"""
            serve {DISK} {option}
            start_numbers {NODE}
            more_numbers 8
            for time in 1 2; do
                kill_weir
                pause {DEAD_TIMEOUT - 1}
                serve {DISK} {option}
                grep 'took over' $log
                more_numbers 1
            done
            pause {DEAD_TIMEOUT + 1}
            more_numbers 4
            part killed
            guards
            part others
            upgrade {DISK} {option}
            more_numbers 4
            pause {DEAD_TIMEOUT + 1}
            more_numbers 4
            part upgraded
            guards
            part others
            upgrade {DISK} --ublk=0
            part unguarded
            guards
            part others
            kill_weir
            pause {DEAD_TIMEOUT + 1}
            serve {DISK} {option}
            more_numbers 4
            part ended
            end_numbers
            part rest
            stop
            check_numbers {DISK}
            part after
            leftovers
            ls /dev/ublk*
        """)
        guard_counts = [parts[name].strip() for name in ("killed", "upgraded", "unguarded")]
        return [
            fact("guards", guard_counts == ["1", "1", "0"], guard_counts, ["1", "1", "0"]),
            contains("the client", parts["ended"], "ok "),
            fact("nodes afterwards", parts["after"].split() == ["/dev/ublk-control"], parts["after"], "none"),
        ]

    def removed(self):
        """Removal over QMP while the device is in use: rejected in safe mode; in hard mode later
        requests fail."""
        remove = '{{"execute":"block-export-del","arguments":{{"id":"disk","mode":"{}"}}}}'
        parts = self.parts(f"""
            serve {DISK} --ublk
            start_numbers {NODE}
            more_numbers 8
            part safe
            run_qmp '{remove.format("safe")}'
            more_numbers 8
            part hard
            run_qmp '{remove.format("hard")}'
            part client
            wait_for_exit $numbered || echo it failed
            cat /tmp/numbered
            part others
            # Its number is free once the export is removed, which is after its node.
            until ! run_qmp '{{"execute":"query-block-exports"}}' | grep -q disk; do pause 0.02; done
            run_qmp '{{"execute":"block-export-add","arguments":{{"type":"x-ublk","id":"again","node-name":"disk","writable":true}}}}'
            start_numbers {NODE}
            more_numbers 8
            end_numbers
            stop
            part waiting
            # Kernel threads have no VmSize and may sleep uninterruptibly.
            for process in /proc/[0-9]*/status; do
                ! grep -qs '^VmSize' $process || grep -s '^State:.D' $process || :
            done
        """)
        return [
            contains("removal in safe mode", parts["safe"], "numbered"),
            contains("removal in hard mode", parts["hard"], "return"),
            contains("the client after the removal", parts["client"], "it failed"),
            fact("processes that hang", not parts["waiting"].strip(), parts["waiting"], "none"),
        ]

    def unprivileged(self):
        """An unprivileged user serves a device, removes an orphaned one, and gets an error without
        access. udev would give the devices to the user; here the test does.
        """
        serve = f"weir serve {DISK} --ublk=0,unprivileged --qmp unix:/run/user/qmp"
        parts = self.parts(f"""
            part kernel
            uname -r
            part others
            mkdir -p /etc /run/user
            printf '%s\\n' root:x:0:0::/:/bin/sh user:x:1000:1000::/:/bin/sh >/etc/passwd
            chown user {DISK} /run/user
            chmod 666 /dev/ublk-control
            as_user() {{ XDG_RUNTIME_DIR=/run/user su user -c "$1"; }}
            given() {{
                until [ -e "$1" ]; do pause 0.02; done
                chown user "$1"
            }}
            part rejected
            ! as_user "{serve}" 2>&1
            ! weir detach {NODE} 2>/dev/null
            part others
            {{ given /dev/ublkc0 && given {NODE}; }} &
            giving=$!
            : >$log
            su user -c "exec {serve}" >$log 2>&1 &
            weir=$!
            until grep -q ' ready' $log; do
                pause 0.02
                kill -0 $weir 2>/dev/null || break
            done
            part served
            [ ! -e {NODE} ] || {{
                wait $giving
                as_user "dd if=/dev/urandom of={NODE} bs=64k count=4 oflag=direct && head -c 256k {NODE} | md5sum"
                head -c 256k {DISK} | md5sum
                kill_weir
                until_removed {NODE}
                as_user "weir attach --list; weir detach {NODE}"
            }}
            part nodes
            chmod 600 /dev/ublk-control
            kill $giving 2>/dev/null || :
            ls /dev/ublk*
        """)
        nodes = fact(
            "nodes afterwards", parts["nodes"].split() == ["/dev/ublk-control"], parts["nodes"], "none"
        )
        if version(parts["kernel"]) < [6, 5]:
            return [
                contains("before Linux 6.5", parts["rejected"], "may not use the ublk driver"),
                nodes,
            ]
        sums = re.findall(r"^\w{32}(?=  -$)", parts["served"], re.MULTILINE)
        return [
            contains(
                "error of a user without access",
                parts["rejected"],
                "udev did not give it to this user within 10 s",
            ),
            fact(
                "bytes read from the device",
                len(sums) == 2 and sums[0] == sums[1],
                sums,
                "equal to the disk's",
            ),
            contains("device of a killed weir", parts["served"], "ublk, orphaned"),
            nodes,
        ]

    def errors(self):
        """Errors: a number in use, an image in use, a device that was never started."""
        parts = self.parts(f"""
            serve {DISK} --ublk=0
            part same
            ! weir serve {DISK} --ublk
            truncate -s 1M /tmp/other.raw
            part number
            ! weir serve /tmp/other.raw --ublk=0
            truncate -s 1000 /tmp/odd.raw
            part odd
            ! weir serve /tmp/odd.raw --ublk
            part memory
            ! weir serve /tmp/other.raw --ublk=1,queues=2,queue-depth=4096 --memory 128M
            ls /dev/ublkb*
            stop
            part after
            ls /dev/ublk*
            rm -f /tmp/other.raw /tmp/odd.raw
        """)
        return [
            contains("an image in use", parts["same"], "locked for writing by another process"),
            contains(
                "a number in use", parts["number"], "there is a device of this number already"
            ),
            contains("an odd size", parts["odd"], "not a multiple of 512"),
            contains(
                "queues that exceed the memory limit",
                parts["memory"],
                "request buffers of a block device",
            ),
            fact(
                "nodes afterwards",
                parts["after"].split() == ["/dev/ublk-control"],
                parts["after"],
                "none",
            ),
        ]
