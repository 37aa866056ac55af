"""weir's block devices under memory pressure: the dirty pages to be written back through them
exceed weir's memory limit, and its images are on a file system of the same kernel.

A deadlock would be weir waiting for memory that only it can free by writing pages. The case then
ends after ten minutes of the guest's clock, which takes no time while all processes wait.
"""

import re
from pathlib import Path

from outcome import fact, least

SHELL = Path(__file__).with_name("devices.sh").read_text()
# The limit that docs/devices.md calls sufficient.
GROUP_MIB = 256
# Files on each device, each with a distinct line before equal bytes, so that no page of one is
# valid at the same offset of another.
FILES, FILE_MIB = 20, 8
# Bits in the flags of /proc/PID/task/TID/stat that PR_SET_IO_FLUSHER sets: PF_MEMALLOC_NOIO and
# PF_LOCAL_THROTTLE (linux/sched.h).
FLUSHER = 0x0008_0000 | 0x0010_0000
NODES = {"ublk": "/dev/ublkb0", "nbd": "/dev/nbd3"}
CONFIG = """
[disk.ublk]
image = "/mnt/image/ublk.raw"
format = "raw"
cache = "{cache}"
export = [{{ type = "ublk", number = 0 }}]

[disk.nbd]
image = "/mnt/image/nbd.raw"
format = "raw"
cache = "{cache}"
export = [{{ type = "nbd-device", device = "/dev/nbd3" }}]
"""
# Limits of dirty pages: above all memory, so that the kernel writes back only on sync.
DIRTY = {"dirty_bytes": 2000000000, "dirty_background_bytes": 1900000000, "dirty_writeback_centisecs": 0}
CLEAN = """
    echo $$ >$cgroups/cgroup.procs
    kill -KILL $weir 2>/dev/null
    # Processes that wait for a device end with it; a ublk device is removed once it is not mounted.
    weir detach --force /dev/ublkb0 2>/dev/null &
    [ ! -e /sys/block/nbd3/pid ] || nbd-client -d /dev/nbd3 >/dev/null 2>&1
    until_removed /dev/ublkb0
    umount /mnt/ublk 2>/dev/null
    umount /mnt/nbd 2>/dev/null
    wait
    restore 2>/dev/null
    rmdir $cgroups/short
    umount /mnt/image && echo 0 >/sys/kernel/config/nullb/image/power
    rmdir /sys/kernel/config/nullb/image
    rm -f /tmp/random /tmp/synced /tmp/config.toml $log
"""


def flags(threads):
    """Flags of weir's I/O threads, from /proc/PID/task/TID/stat."""
    return {
        name: int(rest.split()[6])
        for name, rest in re.findall(r"^\d+ \((.*)\) (.*)$", threads, re.MULTILINE)
        if name.startswith(("worker", "iou-wrk"))
    }


class Memory:
    """The cases."""

    def __init__(self, full):
        self.guest = None  # set by the runner
        # With writeback the images' pages are charged to the group too, with none there are none.
        self._caches = ("writeback", "none") if full else ("writeback",)

    def cases(self):
        """Name and function of each case."""
        for cache in self._caches:
            yield (
                f"memory pressure: ublk and nbd, cache={cache}",
                lambda cache=cache: self.under_pressure(cache),
            )

    def under_pressure(self, cache):
        """Two file systems are written to from outside of weir's group, and synced."""
        save = " ".join(f"{name}=$(cat /proc/sys/vm/{name})" for name in DIRTY)
        restore = "; ".join(f"echo ${name} >/proc/sys/vm/{name}" for name in DIRTY)
        change = "; ".join(f"echo {value} >/proc/sys/vm/{name}" for name, value in DIRTY.items())
        parts = self.guest.parts(
            f"""{SHELL}
            [ -e /dev/ublk-control ] || load ublk_drv
            {save}
            restore() {{ {restore}; }}
            make_disk image 200 128 1024
            mkdir -p /mnt/ublk /mnt/nbd $cgroups/short
            echo {GROUP_MIB}M >$cgroups/short/memory.max
            # Sparse, and large enough that ext4 delays the allocation of pages.
            truncate -s 1G /mnt/image/ublk.raw /mnt/image/nbd.raw
            echo '{CONFIG.format(cache=cache)}' >/tmp/config.toml
            echo $$ >$cgroups/short/cgroup.procs
            serve --config /tmp/config.toml --memory 128M
            echo $$ >$cgroups/cgroup.procs
            mounted() {{
                mount -t ext4 {NODES["ublk"]} /mnt/ublk
                mount -t ext4 {NODES["nbd"]} /mnt/nbd
            }}
            mkfs.ext4 -q {NODES["ublk"]}
            mkfs.ext4 -q {NODES["nbd"]}
            mounted
            dd if=/dev/urandom of=/tmp/random bs=1M count={FILE_MIB} 2>/dev/null
            {change}
            for number in $(seq -w {FILES}); do
                for file in /mnt/ublk/$number /mnt/nbd/$number; do
                    echo $number >$file
                    dd if=/tmp/random of=$file bs=1M oflag=append conv=notrunc 2>/dev/null
                done
            done
            part dirty
            sed -n 's/^Dirty: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo
            part others
            {{ sync; echo >/tmp/synced; }} &
            syncing=$!
            now; until=$((${{now%.*}} + 600))
            until [ -e /tmp/synced ]; do
                pause 0.1
                now
                [ ${{now%.*}} -lt $until ] || {{
                    cat $cgroups/short/memory.events
                    grep . /proc/$weir/task/*/stack /proc/$syncing/stack
                    exit 1
                }}
            done
            umount /mnt/ublk /mnt/nbd
            mounted
            for number in $(seq -w {FILES}); do
                for file in /mnt/ublk/$number /mnt/nbd/$number; do
                    read -r line <$file
                    [ $line = $number ]
                    compare -i 3:0 $file /tmp/random
                done
            done
            umount /mnt/ublk /mnt/nbd
            part events
            cat $cgroups/short/memory.events
            part threads
            cat /proc/$weir/task/*/stat
            part others
            stop
            until_free {NODES["ublk"]}
            until_free {NODES["nbd"]}
            e2fsck -fn /mnt/image/ublk.raw
            e2fsck -fn /mnt/image/nbd.raw
            """,
            CLEAN,
        )
        threads = flags(parts["threads"])
        events = dict(line.split() for line in parts["events"].splitlines())
        is_set = threads and all(word & FLUSHER == FLUSHER for word in threads.values())
        checks = [
            least(
                "dirty pages before the sync",
                int(parts["dirty"]) << 10,
                (GROUP_MIB + 50) << 20,
                "MB",
            ),
            fact(
                "processes killed by the OOM killer",
                events["oom_kill"] == "0",
                events["oom_kill"],
                "0",
            ),
            fact("PR_SET_IO_FLUSHER of weir's I/O threads", is_set, threads, "set for all"),
        ]
        if cache == "writeback":
            reached = int(events["max"])
            checks.append(
                fact(
                    "number of times that weir reached its limit",
                    reached > 0,
                    reached,
                    "at least once",
                )
            )
        return checks
