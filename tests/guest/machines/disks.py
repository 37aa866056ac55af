"""Ordinary use of disks by a guest: files, a reset, settings, resizing, hotplug."""

import json
import subprocess

from load import BLOCKS, FILES_MIB, THREADS, Load, Wrong, check_files, make_files
from stage import MIB, Skipped, allocated
from virtual_machine import Drive

# weir's log message.
SWITCHED = "the guest switched the write cache"


def same(what, seen, expected):
    """Raises Wrong unless both are equal."""
    if seen != expected:
        raise Wrong(f"{what}: {seen!r} (expected: {expected!r})")


def files(stage):
    """Files on a raw and on a qcow2 image."""
    kinds = {"vda": "raw", "vdb": "qcow2"}
    images = {disk: stage.image("files", kind) for disk, kind in kinds.items()}
    servers = {disk: stage.serve(images[disk], kind) for disk, kind in kinds.items()}
    machine = stage.machine([Drive(server.socket) for server in servers.values()])

    def files_over_a_reset():
        full = {}
        for disk in kinds:
            _write_files(machine, disk)
            full[disk] = allocated(images[disk])
            machine.run(f"rm -r /mnt/{disk}/gone && sync && fstrim /mnt/{disk}")
            check_files(machine, disk)
        machine.reset()
        for disk in kinds:
            machine.run(f"mkdir /mnt/{disk}; mount -t ext4 /dev/{disk} /mnt/{disk}")
            machine.run(f"cd /mnt/{disk} && md5sum -c sums && cmp kept/1 copied/1")
            check_files(machine, disk)
        for server in servers.values():
            server.stop()
        # After the flush: a qcow2 image frees discarded clusters when its metadata is durable.
        for disk, image in images.items():
            freed = full[disk] - allocated(image)
            if freed < 4 * MIB:
                raise Wrong(
                    f"{disk}: fstrim has freed {freed} bytes of the image (expected: 4 MiB or more)"
                )
        # An image that the guest has flushed is consistent for other programs.
        subprocess.run(["qemu-img", "check", "-q", images["vdb"]], check=True)
        subprocess.run(["/sbin/e2fsck", "-fn", images["vda"]], check=True, capture_output=True)

    stage.case("files", files_over_a_reset)


def _write_files(machine, disk):
    """Writes files that stay, with their checksums, and 6 MiB that are deleted."""
    make_files(machine, disk)
    machine.run(f"""
        set -e
        cd /mnt/{disk}
        mkdir kept gone
        for number in 1 2 3 4 5 6; do
            dd if=/dev/urandom of=kept/$number bs=50000 count=$((number * 4)) 2>/dev/null
            dd if=/dev/urandom of=gone/$number bs=1M count=1 oflag=direct 2>/dev/null
        done
        cp -r kept copied
        md5sum kept/* copied/* >sums
        sync
    """)


def settings(stage):
    """One machine with two processors, and disks with different options."""
    daemon = stage.features
    servers = [
        stage.serve(stage.image("two"), queues=2, serial="first-of-all"),
        stage.serve(stage.image("four", "qcow2"), "qcow2", queues=4),
        stage.serve(stage.image("read"), read_only=True, serial="twenty-letters-long-"),
    ]
    # One of each format, to be switched and resized.
    changed = {"vda": servers[0], "vdb": servers[1]}
    hotplugged = [stage.serve(stage.image("hotplugged", kind), kind) for kind in ("raw", "qcow2")]
    queues = (2, 4, 1)
    drives = [Drive(server.socket, number) for server, number in zip(servers, queues)]
    # The last disks are identified by name, because they are behind bridges.
    drives += [Drive(server.socket, slot=slot) for slot, server in enumerate(hotplugged)]
    pluggable = ("vdd", "vde")
    if daemon.CONNECTS:
        connecting = stage.serve(stage.image("connecting"), connects=True)
        drives.append(Drive(connecting.socket, listens=True))
        pluggable = ("vde", "vdf")
    machine = stage.machine(drives, processors=2)

    def several_queues():
        for disk, number in (("vda", 2), ("vdb", 4)):
            # Linux uses at most one queue per processor.
            seen = machine.run(f"ls /sys/block/{disk}/mq | wc -l").strip()
            same(f"{disk}: queues in use", seen, str(min(number, 2)))
            load = Load(disk, files=False)
            load.begin(machine)
            load.more(machine, 3)
            load.end(machine)
            # From each of its processors, so that both queues are used.
            for processor in (0, 1):
                read = f"dd if=/dev/{disk} of=/dev/null bs=64k count=32 iflag=direct"
                machine.run(f"taskset {1 << processor:x} {read}")

    def serial_number():
        for disk, server in zip(("vda", "vdc"), (servers[0], servers[2])):
            expected = server.offer.serial if daemon.SERIALS else "vhost_user_blk"
            same(f"{disk}: serial", machine.run(f"cat /sys/block/{disk}/serial").strip(), expected)
        if daemon.SERIALS:
            same("vdb: serial", machine.run("cat /sys/block/vdb/serial").strip(), "disk")

    def read_only():
        same("/sys/block/vdc/ro", machine.run("cat /sys/block/vdc/ro").strip(), "1")
        output, status = machine.run_status(
            "dd if=/dev/zero of=/dev/vdc bs=4k count=1 oflag=direct"
        )
        if status == 0:
            raise Wrong(f"a read-only disk was written to: {output}")
        machine.run("dd if=/dev/vdc of=/dev/null bs=64k count=16 iflag=direct")

    def write_cache():
        if not daemon.CACHES:
            raise Skipped("the back end cannot switch its write cache")
        for disk, server in changed.items():
            for cache in ("write back", "write through", "write back"):
                where = f"/sys/block/{disk}"
                script = f'echo "{cache}" >{where}/cache_type && cat {where}/queue/write_cache'
                same(f"{disk}: cache", machine.run(script).strip(), cache)
                machine.run(f"dd if=/dev/zero of=/dev/{disk} bs=4k count=1 conv=fsync")
            switched = [line for line in server.log_lines() if SWITCHED in line]
            values = [line.rpartition("write_cache=")[2].split()[0] for line in switched]
            same(f"{disk}: write_cache in weir's log", values[-2:], ["false", "true"])

    def resized():
        if not daemon.RESIZES:
            raise Skipped("the guest does not see a new size with this back end")
        for disk, server in changed.items():
            for mib in (300, 320):
                size = mib * MIB
                server.resize(size)
                # A script in the guest has no event to wait for; its kernel is notified at once.
                machine.run(f"until [ $(blockdev --getsize64 /dev/{disk}) = {size} ]; do pause 0.02; done")
                machine.run(f"dd if=/dev/urandom of=/dev/{disk} bs=1M count=1 seek={mib - 1} oflag=direct")
                same(f"{disk}: the image's size", _size(server), size)

    def called():
        if not daemon.CONNECTS:
            raise Skipped("the back end only listens")
        load = Load("vdd", files=False)
        load.begin(machine)
        load.more(machine)
        connecting.kill()
        connecting.start()
        load.more(machine)
        load.end(machine)

    def plugged():
        # The disks are present from the start, and are then swapped between their slots.
        before = [_loaded(machine, disk) for disk in pluggable]
        for number, disk in enumerate(pluggable):
            machine.unplug(f"disk{3 + number}")
            # A script in the guest has no event to wait for.
            machine.run(f"until [ ! -e /dev/{disk} ]; do pause 0.02; done")
        for number, disk in enumerate(pluggable):
            machine.plug(f"disk{3 + number}", Drive(hotplugged[number].socket, slot=1 - number))
            machine.run(f"until [ -b /dev/{disk} ]; do pause 0.02; done")
            same(f"{disk}: its data after the hotplug", _numbers(machine, disk), before[number])
        for number, disk in enumerate(pluggable):
            _loaded(machine, disk)
            machine.unplug(f"disk{3 + number}")
        hotplugged[1].stop()
        subprocess.run(["qemu-img", "check", "-q", hotplugged[1].image], check=True)

    stage.case("queues", several_queues)
    stage.case("serial", serial_number)
    stage.case("read-only", read_only)
    stage.case("write-cache", write_cache)
    stage.case("resize", resized)
    stage.case("client", called)
    stage.case("plugging", plugged)


def _size(server):
    """Size of a disk according to its image."""
    info = ["qemu-img", "info", "-U", "--output=json", "-f", server.kind, server.image]
    return json.loads(subprocess.run(info, check=True, capture_output=True).stdout)["virtual-size"]


def _numbers(machine, disk):
    """The numbers that the load has left on the disk."""
    return machine.run(f"numbered check /dev/{disk} {FILES_MIB} {THREADS} {BLOCKS}")


def _loaded(machine, disk):
    """The numbers that a short load leaves on the disk."""
    load = Load(disk, files=False)
    load.begin(machine)
    load.more(machine)
    load.end(machine)
    return _numbers(machine, disk)
