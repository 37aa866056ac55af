"""A virtual machine with a Linux that has cgroup v2, an NBD client and virtio disks, and that runs
scripts.

Its clock is independent of the host's: with QEMU's `-icount`, an instruction of the guest takes two
of its nanoseconds, and while it is idle its clock jumps to the next timer. Measurements are
therefore the same on a busy, slow or stalled host, and a minute of waiting costs nothing. Hence
nothing outside may answer the guest in real time: its disks are its own (null_blk, in its memory),
and everything that depends on an instant is in one script, because the clock runs on between
scripts. A guest that talks to a server outside uses the host's clock.

Never judges measurements; never leaves the machine running, nor a file behind.
"""

import base64
import hashlib
import re
import shutil
import socket
import string
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Much longer than either takes, on stalled hosts as well. (Twenty kills of a daemon behind the
# kernel's NBD client, which waits 30 s of the guest's time after each, took more than 400 s beside
# three builds on two processors.)
BOOT_SECONDS = 400
SCRIPT_SECONDS = 1200
# Marks between the output of a script and its exit status (`serve-scripts`); and the reply to a
# script that was corrupted: the emulated serial line loses a byte at times.
END = b"@END "
AGAIN = b"@AGAIN"
# The guest is ready for scripts.
READY = b"@READY"
TRANSMISSIONS = 5
# One host thread for all of the guest's processors, and no five-level page tables (LA57): with
# several threads, or with LA57, QEMU 7.2 crashes a kernel at times. No fast string operations
# (ERMS, FSRM): with those, the kernel copies single bytes, each of which QEMU emulates.
ACCELERATOR = "tcg,thread=single"
PROCESSOR = "max,la57=off,erms=off,fsrm=off"
# 2¹ ns per instruction, and no sleeping in the host's time while the guest is idle.
OWN_CLOCK = ("-icount", "shift=1,sleep=off", "-rtc", "clock=vm")
# A kernel that crashes ends at once (`oops=panic`, `panic=-1`, and QEMU's -no-reboot), instead of
# leaving a script without an answer. no_timer_check: the kernel's test of its timer counts loops,
# which fails on a busy host, and it hangs. Programs at equal addresses (norandmaps): QEMU translates
# the code of a program again at each start for another address, which takes 0.3 s for weir. Neither
# detours around faults of processors, nor tests of the kernel's own cryptography.
KERNEL = (
    "console=ttyS0 quiet oops=panic panic=-1 no_timer_check psi=1 delayacct norandmaps mitigations=off"
    " cryptomgr.notests"
)
MIB = 1 << 20


class GuestFailed(Exception):
    """The machine did not start, a script did not end, or the machine ended on its own; the text
    contains the output.
    """


class ScriptFailed(GuestFailed):
    """A script in the machine failed; the machine continues."""


@dataclass(frozen=True)
class OwnDisk:
    """A disk in the guest's memory, /dev/NAME, with an empty ext4. Its data is lost at the end."""

    name: str
    mib_per_s: int
    size_mib: int = 1024
    request_kib: int = 128

    @property
    def bps(self):
        """Bytes per second of the guest's time: null_blk admits whole requests in every fiftieth of
        a second (nullb_bwtimer_fn).
        """
        request = self.request_kib * 1024
        return 50 * (self.mib_per_s * (MIB // 50) // request) * request

    def create(self):
        """Shell code that creates the disk."""
        return f"make_disk {self.name} {self.mib_per_s} {self.request_kib} {self.size_mib}"


@dataclass(frozen=True)
class ExportedDisk:
    """A disk that is an NBD export outside, with an ext4 that its server has created; QEMU is the
    client.
    """

    name: str  # as in /sys/block: vda, vdb and so on, in the given order
    uri: str

    def create(self):
        """Shell code that mounts it."""
        return f"mkdir -p /mnt/{self.name} && mount -t ext4 /dev/{self.name} /mnt/{self.name}"


def program_archive(program, directory, path):
    """The program, at that path, and its libraries: an initramfs to be appended to another one."""
    tree, stripped = Path(directory, "program"), Path(directory, "stripped")
    # Without debugging information.
    subprocess.run(["strip", "--strip-debug", "-o", stripped, program], check=True)
    subprocess.run([HERE / "copy-program", tree, stripped, path], check=True)
    stripped.unlink()
    names = subprocess.run(["find", "."], cwd=tree, check=True, capture_output=True).stdout
    pack = ["cpio", "--quiet", "-o", "-H", "newc"]
    archive = subprocess.run(pack, cwd=tree, input=names, check=True, capture_output=True)
    shutil.rmtree(tree)
    return archive.stdout


class Guest:
    """One running machine. Use it in a `with` statement."""

    # Path of the tested program in the guest.
    PROGRAM = "/bin/weir"
    # The emulator.
    emulator = "qemu-system-x86_64"

    def __init__(
        self, cache, program, disks, own_clock=True, network=False, system=None, more=(), kernel=None
    ):
        # A kernel other than the default, as an argument of `build`.
        self.kernel = kernel
        self.cache = Path(cache, "kernels", kernel.replace("/", "+")) if kernel else Path(cache)
        self.program = program
        # Additional programs, by their names in /bin.
        self.more = dict(more)
        self.disks = disks
        self.own_clock = own_clock
        # A network card; 10.0.2.2 is the host.
        self.network = network
        # A disk with a system to boot, as made by `debian`; it is not modified.
        self.system = system

    def __enter__(self):
        subprocess.run([HERE / "build", self.cache, *filter(None, [self.kernel])], check=True)
        self._directory = tempfile.TemporaryDirectory(prefix="guest-test.", dir=self.cache.parent)
        try:
            self._start(Path(self._directory.name))
            try:
                self._boot()
            except BaseException:
                self._stop()
                raise
        except BaseException:
            self._directory.cleanup()
            raise
        return self

    def __exit__(self, *_):
        self._stop()
        self._directory.cleanup()

    def run(self, script, check=True):
        """Runs a script after measure.sh; returns stdout and stderr. Raises ScriptFailed if it
        fails."""
        return self.run_status(script, check)[0]

    def parts(self, body, finally_=""):
        """Runs a script; returns its output by part (`part` in measure.sh).

        The script ends with its first command that fails; `finally_` runs in any case.
        """
        end = "trap 'status=$?; set +e; part finally; finally; exit $status' EXIT"
        script = f"set -e\n{end}\nfinally() {{\n:\n{finally_}\n}}\n{body}"
        pieces = re.split(r"^@PART (\w+)\n?", self.run(script), flags=re.MULTILINE)
        return dict(zip(pieces[1::2], pieces[2::2]))

    def run_status(self, script, check=False):
        """The output of the script, and its exit status."""
        script = f". /measure.sh\n{script}\n"
        for _ in range(TRANSMISSIONS):
            self._send_script(script)
            lines = self._lines_until((END, AGAIN, READY), SCRIPT_SECONDS)
            if lines[-1].startswith(READY):
                raise GuestFailed(f"the guest has started again by itself; its console:\n{self.last_words()}")
            if not lines[-1].startswith(AGAIN):
                break
        else:
            raise GuestFailed(f"a script did not arrive as it was sent, {TRANSMISSIONS} times:\n{script}")
        status = int(lines.pop().removeprefix(END))
        output = b"".join(lines).removesuffix(b"\n").decode(errors="replace")
        if check and status != 0:
            raise ScriptFailed(f"a script ended with status {status}:\n{script}\nIt printed:\n{output}")
        return output, status

    def reboot(self):
        """Reboots the system of its disk; data written to that disk is kept."""
        self._send_script("systemctl reboot\n")
        self._boot()

    def _send_script(self, script):
        content = script.encode()
        line = f"{hashlib.md5(content).hexdigest()} {base64.b64encode(content).decode()}\n"
        self._send(line.encode())

    def _boot(self):
        """Waits until the machine is ready for scripts, and prepares it."""
        self._lines_until(READY, BOOT_SECONDS)
        self._prepare()

    def _stop(self):
        # The machine has no state to keep.
        self._process.kill()
        self._process.wait()
        self._received.close()
        self._socket.close()

    def _start(self, directory):
        self._console = directory / "console"
        # QEMU's own messages.
        self._complaints = directory / "complaints"
        initramfs = self._initramfs(directory)
        self._socket, theirs = socket.socketpair()
        hardware, passed = self._hardware()
        passed = [theirs, *passed]
        command = [
            self.emulator, "-accel", ACCELERATOR, "-cpu", PROCESSOR,
            "-nodefaults", "-display", "none",
            "-serial", f"file:{self._console}",
            "-chardev", f"socket,id=scripts,fd={theirs.fileno()}", "-serial", "chardev:scripts",
            "-kernel", self.cache / "vmlinux", "-initrd", initramfs, *hardware,
        ]  # fmt: skip
        with open(self._complaints, "wb") as complaints:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=[end.fileno() for end in passed],
            )
        for end in passed:
            end.close()
        self._received = self._socket.makefile("rb")

    def _initramfs(self, directory):
        """Builds the initramfs in that directory; returns its path."""
        initramfs = directory / "initramfs"
        base = Path(self.cache, "guest.cpio").read_bytes()
        # An archive must begin at a multiple of four bytes (the kernel's init/initramfs.c).
        padding = bytes(-len(base) % 4)
        programs = {self.PROGRAM: self.program, **{f"/bin/{name}": path for name, path in self.more.items()}}
        archives = [program_archive(program, directory, path) for path, program in programs.items()]
        initramfs.write_bytes(base + padding + b"".join(archives))
        return initramfs

    def _hardware(self):
        """Further arguments of QEMU, and the sockets that are passed with them."""
        exported = [disk for disk in self.disks if isinstance(disk, ExportedDisk)]
        system = f" systemd.journald.forward_to_console=1 SYSTEM=vd{string.ascii_lowercase[len(exported)]}" if self.system else ""
        words = ["-m", "3G", "-append", KERNEL + system]
        if self.own_clock:
            words += OWN_CLOCK
        if self.network:
            words += ["-netdev", "user,id=net0", "-device", "virtio-net-pci,netdev=net0,romfile="]
        for disk in exported:
            words += ["-drive", f"if=virtio,format=raw,cache=unsafe,file={disk.uri}"]
        # A full system may restart (`reboot`); the small one ends with its process 1.
        if self.system:
            words += ["-drive", f"if=virtio,format=raw,snapshot=on,file={self.system}"]
        else:
            words += ["-no-reboot"]
        return words, []

    def _prepare(self):
        """Creates the disks and the two control groups that most cases use, and limits dirty pages.

        A limit for the whole machine, which runs nothing else. Small, so that a buffered stream is
        throttled to its limit within seconds; not so small that the dirty pages of one throttled
        group fill it and delay the second group's writer (measured: with 16 MiB, a stream limited
        to 4 MB/s got 2.0 to 3.5).
        """
        create = "\n".join(disk.create() for disk in self.disks)
        self.run(f"""
            set -e
            echo {64 << 20} >/proc/sys/vm/dirty_bytes
            echo {4 << 20} >/proc/sys/vm/dirty_background_bytes
            {create}
            mkdir -p /root /var/lib $cgroups/a $cgroups/b
        """)

    def _send(self, line):
        try:
            self._socket.sendall(line)
        except ConnectionError as error:
            raise self._died() from error

    def _died(self):
        # Its end of the connection closes shortly before the process ends.
        self._process.wait()
        return GuestFailed(f"the guest has ended by itself; its console:\n{self.last_words()}")

    def _lines_until(self, beginning, seconds):
        """All lines up to and including the first that begins with this, or with one of several."""
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
            # A timeout; later reads of this connection fail as well.
            printed = b"".join(lines).decode(errors="replace")
            what = f"no answer from the guest within {seconds} s; it printed:\n{printed}"
            raise GuestFailed(f"{what}\nIts console:\n{self.last_words()}") from error
        return lines

    def last_words(self):
        """The end of its console, and QEMU's messages."""
        files = [path for path in (self._console, self._complaints) if path.exists()]
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in files)
