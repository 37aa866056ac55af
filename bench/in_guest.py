"""Rows for loads inside a virtual machine: its disk is a vhost-user-blk export of weir, or QEMU's own
virtio-blk with an I/O thread, on the same raw file.

The machine is always emulated, on one processor of the host: the guest takes most of the time,
and a ratio shows whether weir adds to it. One machine lives as long as a row, and each sample plugs
its disk in, creates a file system, runs the load, and unplugs it. Time is the guest's, without the
creation of the file system; the guest uses the host's clock. The guest is that of tests/guest: its
kernel is downloaded once (tests/guest/build).

Without the packages of guests these rows are omitted; `scripts/deps guest` installs them.

Never modifies the raw disk file: a sample writes to a copy.
"""

import io
import os
import random
import shutil
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path

import vhost_user
from results import Lower
from rows import WEIR, Row, settle

ROOT = Path(__file__).resolve().parent.parent
GUEST = ROOT / "tests" / "guest"
# Last, because the names of the bench's own modules come first.
sys.path += [str(GUEST / "machines"), str(GUEST)]

from guest import GuestFailed  # noqa: E402, F401  (found only after the line above)
from virtual_machine import Drive, Emulator, Machine  # noqa: E402

TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).absolute()
CACHE = Path(os.environ.get("WEIR_GUEST_DIR", TARGET / "guest"))
EMULATOR, SQLITE = "qemu-system-x86_64", "sqlite3"
# Programs that build and run the guest.
NEEDED = (EMULATOR, SQLITE, "busybox", "cpio", "modprobe", "mkfs.ext4", "nbd-client", "socat", "strip", "xz")
QEMU = "qemu virtio-blk"
# Files of the archive by directories, and their largest size.
FILES, DIRECTORIES, LARGEST_BYTES = 2000, 40, 64 << 10
TRANSACTIONS, FEW_TRANSACTIONS = 1000, 5
DISK_BYTES = 512 << 20


class Guest(Machine):
    """A machine with the program of the load, and a slot for one disk at a time, /dev/vda."""

    PROGRAM = f"/bin/{SQLITE}"

    def __init__(self):
        super().__init__(CACHE, shutil.which(SQLITE), [], Emulator.of(EMULATOR))

    def __enter__(self):
        super().__enter__()
        self.monitor.run("object-add", **{"qom-type": "iothread", "id": "io"})
        return self

    @contextmanager
    def own(self, path):
        """Context manager: the file is a disk by QEMU itself."""
        file = {"driver": "file", "filename": str(path), "aio": "native", "cache": {"direct": True}}
        self.monitor.run("blockdev-add", driver="raw", file=file, **{"node-name": "own"})
        device = {"driver": "virtio-blk-pci", "id": "disk", "drive": "own", "iothread": "io", "bus": "slot0"}
        self.monitor.run("device_add", **device)
        self.run("until [ -b /dev/vda ]; do pause 0.02; done")
        yield
        self.monitor.run("device_del", id="disk")
        self.monitor.wait_for("DEVICE_DELETED", lambda data: data.get("device") == "disk")
        self._absent()
        self.monitor.run("blockdev-del", **{"node-name": "own"})

    @contextmanager
    def exported(self, server):
        """Context manager: the export of a running server is a disk."""
        self.plug("disk", Drive(server.target.partition(":")[2], slot=0))
        self.run("until [ -b /dev/vda ]; do pause 0.02; done")
        yield
        self.unplug("disk")
        self._absent()

    def _absent(self):
        self.run("until [ ! -e /dev/vda ]; do pause 0.02; done")

    def seconds(self, load):
        """Duration of a load, shell code, on a new file system at /mnt/disk."""
        # The tables are written at once, because a lazy initialization would cause I/O later. A
        # discard would leave holes in the file.
        made = "-E nodiscard,lazy_itable_init=0,lazy_journal_init=0"
        begin, end = self.run(f"""
            set -e
            mkfs.ext4 -q -N 4096 {made} /dev/vda
            mount -t ext4 /dev/vda /mnt/disk
            sync
            now; echo $now
            {load}
            now; echo $now
            umount /mnt/disk
        """).split()
        return float(end) - float(begin)


def disk_of(setup):
    """Path of the raw file, created as a copy of the beginning of the disk if it is missing: no
    block is a hole at first.
    """
    size = min(setup.size_bytes, DISK_BYTES)
    path = setup.disk.with_name(f"guest-{size >> 20}M.raw")
    if not path.exists():
        unfinished = path.with_suffix(".new")
        with open(setup.disk, "rb") as source, open(unfinished, "wb") as file:
            file.write(source.read(size))
            os.fsync(file.fileno())
        unfinished.rename(path)
    return path


def archive(files):
    """A deterministic archive."""
    draw, packed = random.Random(1), io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(files):
            if number < DIRECTORIES:
                directory = tarfile.TarInfo(f"directory{number}")
                directory.type, directory.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(directory)
            file = tarfile.TarInfo(f"directory{number % DIRECTORIES}/file{number}")
            file.size = draw.randrange(LARGEST_BYTES)
            tar.addfile(file, io.BytesIO(draw.randbytes(file.size)))
    return packed.getvalue()


def untar(setup, guest):
    """Puts the archive into the guest's memory; returns the load."""
    with tempfile.NamedTemporaryFile(dir=setup.disk.parent, suffix=".tar") as file:
        file.write(archive(FILES if setup.seconds else 1))
        file.flush()
        with guest.own(file.name):
            guest.run("cat /dev/vda >/tmp/archive.tar")
    return "tar xf /tmp/archive.tar -C /mnt/disk && sync"


def transactions(setup, guest):
    """Puts the statements into the guest's memory; returns the load."""
    count = TRANSACTIONS if setup.seconds else FEW_TRANSACTIONS
    guest.run(f"""
        number=0
        echo 'CREATE TABLE numbers (number INTEGER PRIMARY KEY, content TEXT);' >/tmp/load.sql
        while [ $number -lt {count} ]; do
            echo "INSERT INTO numbers VALUES ($number, printf('%0200d', $number));"
            number=$((number + 1))
        done >>/tmp/load.sql
    """)
    return f"""
        {SQLITE} -bail /mnt/disk/numbers.db </tmp/load.sql
        [ "$({SQLITE} /mnt/disk/numbers.db 'SELECT count(*) FROM numbers')" = {count} ]
    """


def inside(prepare):
    """Both disks under one load."""

    def contenders(setup, stack):
        path = disk_of(setup)
        guest = stack.enter_context(Guest())
        load = prepare(setup, guest)

        def on_weir():
            settle(path)
            with vhost_user.weir(setup, path, "--format", "raw", "--cache", "none") as server, guest.exported(server):
                return {"seconds": guest.seconds(load)}

        def on_qemu():
            settle(path)
            with guest.own(path):
                return {"seconds": guest.seconds(load)}

        return ({WEIR: on_weir} if setup.program else {}) | {QEMU: on_qemu}

    return contenders


def _row(name, title, prepare):
    targets = (Lower(WEIR, 1.0, (QEMU,), "seconds"),)
    return Row(f"guest-{name}", title, inside(prepare), targets, columns=("seconds",))


def _is_there():
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    return all(shutil.which(program, path=path) for program in NEEDED)


ROWS = (
    _row("untar", "an emulated guest unpacks 2000 files (62 MiB) onto ext4, with a sync at the end", untar),
    _row(
        "sqlite",
        "an emulated guest executes 1000 transactions of SQLite on ext4, each of which is durable",
        transactions,
    ),
) if _is_there() else ()
