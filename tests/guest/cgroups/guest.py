"""A virtual machine with cgroup v2 and disks of known speed, that does what scripts say.

Why QEMU's throttling makes a disk's speed: the files lie on whatever disk the tests run on, which is faster at times and
slower at others. With `cache=unsafe` the guest's flushes do not wait for that disk, and zeroes take no room on it.

Never judges what it measures; never leaves the machine running, nor a file behind.
"""

import base64
import hashlib
import os
import shutil
import socket
import string
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Much longer than either takes, also on a machine that stands still for most of the time.
BOOT_SECONDS = 400
SCRIPT_SECONDS = 400
MEMORY = "1G"
# Between the output of a script and its exit status (`init` beside this); and what comes instead of both if the script did not arrive as it
# was sent: the emulated serial line loses a byte at times.
END = b"@END "
AGAIN = b"@AGAIN"
TRANSMISSIONS = 5
# The emulator breaks a kernel now and then: QEMU 7.2 has been seen to return from an interrupt with a pointer among the flags, so that
# the kernel met a single step nobody asked for. With five levels of page tables (LA57) that is a known fault of it.
PROCESSOR = "max,la57=off"
# A kernel that is broken ends at once (`oops=panic`, `panic=-1`, and QEMU's -no-reboot), instead of leaving a script without an answer.
KERNEL = "console=ttyS0 quiet oops=panic panic=-1 psi=1 delayacct"
BOOTS = 3


class GuestFailed(Exception):
    """The machine did not start, a script in it failed, or did not end; the text says which and what was printed."""


class ScriptFailed(GuestFailed):
    """A script in the machine failed, which goes on."""


class GuestDied(GuestFailed):
    """The machine has ended by itself: its kernel found itself broken. `Guest.alive` starts it again."""


@dataclass(frozen=True)
class Disk:
    """A disk of the machine; what is written to it is lost.

    With `uri`, it is an NBD export, and whoever serves it has made its file system. Otherwise it is a sparse file with an empty ext4.
    """

    name: str  # as in /sys/block: disks are vda, vdb and so on in the order given
    bps: int | None = None
    size: str = "4G"
    uri: str | None = None

    @property
    def mount(self):
        """Where the guest has its file system."""
        return f"/mnt/{self.name}"

    def drive(self, directory):
        """What QEMU's `-drive` is told."""
        words = ["if=virtio", "format=raw", "cache=unsafe", "discard=unmap", "detect-zeroes=unmap"]
        if self.bps:
            words.append(f"throttling.bps-total={self.bps}")
        words.append(f"file={self.uri or self.image(directory)}")
        return ",".join(words)

    def image(self, directory):
        """The file, made on first use."""
        path = Path(directory, f"{self.name}.raw")
        if not path.exists():
            make_file_system(path, self.size)
        return path


def make_file_system(path, size):
    """A sparse file with an empty ext4 whose tables are complete: to fill them later would be I/O that nobody asked for."""
    subprocess.run(["truncate", "--size", size, path], check=True)
    complete = "lazy_itable_init=0,lazy_journal_init=0"
    environment = os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(["mkfs.ext4", "-q", "-E", complete, path], check=True, env=environment)


def program_archive(program, directory):
    """The program as /bin/weir, and its libraries, as an initramfs to be appended to another one."""
    tree, stripped = Path(directory, "program"), Path(directory, "stripped")
    # Without what only a debugger reads: four fifths of a debug build.
    subprocess.run(["strip", "--strip-debug", "-o", stripped, program], check=True)
    subprocess.run([HERE.parent / "copy-program", tree, stripped, "/bin/weir"], check=True)
    stripped.unlink()
    names = subprocess.run(["find", "."], cwd=tree, check=True, capture_output=True).stdout
    archive = subprocess.run(["cpio", "--quiet", "-o", "-H", "newc"], cwd=tree, input=names, check=True, capture_output=True)
    shutil.rmtree(tree)
    return archive.stdout


class Guest:
    """One running machine. Use it in a `with` statement."""

    def __init__(self, cache, program, disks, system=None):
        self.cache = Path(cache)
        self.program = program
        self.disks = {disk.name: disk for disk in disks}
        # A disk whose own process 1 is to run, as `debian` beside this makes it; it stays as it is.
        self.system = system

    def __enter__(self):
        subprocess.run([HERE.parent / "build", self.cache, "cgroups"], check=True)
        self._directory = tempfile.TemporaryDirectory(prefix="guest-test.", dir=self.cache.parent)
        try:
            self._boot()
        except BaseException:
            self._directory.cleanup()
            raise
        return self

    def __exit__(self, *_):
        self._stop()
        self._directory.cleanup()

    def alive(self):
        """The machine; started again, with what is on its disks but none of its memory, if it has ended by itself."""
        if self._process.poll() is not None:
            self._stop()
            self._boot()
        return self

    def run(self, script, check=True):
        """What the script printed, on both its outputs; measure.sh stands in front of it."""
        return self.run_status(script, check)[0]

    def run_status(self, script, check=False):
        """What the script printed, and its exit status."""
        script = f". /measure.sh\n{script}\n"
        content = script.encode()
        line = f"{hashlib.md5(content).hexdigest()} {base64.b64encode(content).decode()}\n"
        for _ in range(TRANSMISSIONS):
            self._send(line.encode())
            lines = self._lines_until((END, AGAIN), SCRIPT_SECONDS)
            if not lines[-1].startswith(AGAIN):
                break
        else:
            raise GuestFailed(f"a script did not arrive as it was sent, {TRANSMISSIONS} times:\n{script}")
        status = int(lines.pop().removeprefix(END))
        output = b"".join(lines).removesuffix(b"\n").decode(errors="replace")
        if check and status != 0:
            raise ScriptFailed(f"a script ended with status {status}:\n{script}\nIt printed:\n{output}")
        return output, status

    def number(self, disk):
        """MAJOR:MINOR of a disk."""
        return self.run(f"cat /sys/block/{disk}/dev").strip()

    def _boot(self):
        """Starts the machine until it takes scripts, more than once if it has to be."""
        for boots in range(1, BOOTS + 1):
            self._start(Path(self._directory.name))
            try:
                self._lines_until(b"@READY", BOOT_SECONDS)
                self._prepare()
                return
            except BaseException as error:
                self._stop()
                if not isinstance(error, GuestDied) or boots == BOOTS:
                    raise

    def _stop(self):
        # There is nothing in it that is to be kept.
        self._process.kill()
        self._process.wait()
        self._received.close()
        self._socket.close()

    def _start(self, directory):
        self._console = directory / "console"
        initramfs = directory / "initramfs"
        base = Path(self.cache, "cgroups.gz").read_bytes()
        # An archive that is not compressed must begin at a multiple of four (the kernel's init/initramfs.c).
        padding = bytes(-len(base) % 4)
        initramfs.write_bytes(base + padding + program_archive(self.program, directory))
        self._socket, theirs = socket.socketpair()
        command = [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", PROCESSOR, "-smp", "2", "-m", MEMORY,
            "-nodefaults", "-display", "none", "-no-reboot",
            "-serial", f"file:{self._console}",
            "-chardev", f"socket,id=scripts,fd={theirs.fileno()}", "-serial", "chardev:scripts",
            "-kernel", self.cache / "vmlinuz", "-initrd", initramfs,
            "-append", KERNEL if self.system is None else f"{KERNEL} SYSTEM=vd{string.ascii_lowercase[len(self.disks)]}",
        ]  # fmt: skip
        for disk in self.disks.values():
            command += ["-drive", disk.drive(directory)]
        if self.system is not None:
            command += ["-drive", f"if=virtio,format=raw,snapshot=on,file={self.system}"]
        with theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._received = self._socket.makefile("rb")

    def _prepare(self):
        """Mounts the disks, makes the two control groups that most cases use, and bounds what waits to be written back.

        A limit for the whole machine: in a guest nobody else lives with it. Little, so that a buffered stream is as slow as
        its limit within seconds, and not so little that the pages of one group, which wait for its limit, fill it and hold up the
        other's writer (measured: with 16 MiB, a stream limited to 4 MB/s got 2.0 to 3.5).
        """
        mounts = "\n".join(f"mkdir -p {disk.mount} && mount -t ext4 /dev/{disk.name} {disk.mount}" for disk in self.disks.values())
        self.run(f"""
            set -e
            echo {64 << 20} >/proc/sys/vm/dirty_bytes
            echo {4 << 20} >/proc/sys/vm/dirty_background_bytes
            {mounts}
            mkdir -p /root /var/lib $cgroups/a $cgroups/b
        """)

    def _send(self, line):
        try:
            self._socket.sendall(line)
        except ConnectionError as error:
            raise self._died() from error

    def _died(self):
        # Its end of the connection closes a moment before it has ended.
        self._process.wait()
        return GuestDied(f"the guest has ended by itself; its console:\n{self._last_words()}")

    def _lines_until(self, beginning, seconds):
        """All lines up to and with the first that begins so, or with one of several."""
        self._socket.settimeout(seconds)
        lines = []
        try:
            while not (lines and lines[-1].startswith(beginning)):
                line = self._received.readline()
                if not line:
                    raise self._died()
                lines.append(line)
        except ConnectionError as error:
            raise self._died() from error
        except OSError as error:
            # A time-out; and after it, whatever else is asked of this connection fails too.
            printed = b"".join(lines).decode(errors="replace")
            message = f"no answer from the guest within {seconds} s; it printed:\n{printed}\nIts console:\n{self._last_words()}"
            raise GuestFailed(message) from error
        return lines

    def _last_words(self):
        text = self._console.read_text(errors="replace") if self._console.exists() else ""
        return text[-4000:]
