"""A virtual machine whose disks are exports of vhost-user-blk, on sockets of one or several back
ends.

Its memory is shared with them. It uses the host's clock, because it talks to programs outside;
otherwise it is the guest of guest.py: scripts run one after another. Programs in the guest report
through a separate port, line by line. The machine may be reset, killed, gain and lose disks at run
time, and migrate to another machine.

Never serves a disk.
"""

import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import qmp  # bench/qmp.py
from guest import KERNEL, MIB, Guest, GuestFailed
from lines import Lines
from monitor import Monitor

# Enough for a kernel, its initramfs in memory, and the files of the tests.
MEMORY = "320M"
# QEMU copies a page that the kernel has cleared for that reason alone, so migrations would be
# tested less.
NOT_CLEARED = "init_on_alloc=0"
# Number of slots for hotplug.
SLOTS = 2
# The guest's end of the reports' port; its device number depends on the other devices.
REPORTS = "/dev/vport*p1"


@dataclass(frozen=True)
class Emulator:
    """A QEMU."""

    program: str
    version: tuple

    @classmethod
    def of(cls, program):
        """The version of this program."""
        output = subprocess.run(
            [program, "--version"], check=True, capture_output=True, text=True
        ).stdout
        version = re.search(r"version (\d+)\.(\d+)", output)
        return cls(program, tuple(map(int, version.groups())))

    def __str__(self):
        return "QEMU {}.{}".format(*self.version)

    def tool(self, name):
        """Another program of the same installation."""
        return name if self.program == Path(self.program).name else Path(self.program).with_name(name)

    @property
    def misses_writes(self):
        """True if it misses some writes of emulated processors to memory that was copied, with any
        back end. 7.2 does, and 11.1 does not.
        """
        return self.version < (11, 0)

    def reconnects(self):
        """Option of a character device to reconnect a second after a disconnect."""
        return {"reconnect-ms": 1000} if self.version >= (9, 2) else {"reconnect": 1}


@dataclass(frozen=True)
class Drive:
    """A disk of a machine."""

    socket: Path
    queues: int = 1
    # True for packed rings.
    packed: bool = False
    # Slot for hotplug, from 0 to SLOTS - 1; None for a disk that cannot be unplugged.
    slot: int | None = None
    # The machine listens, and the back end connects to it.
    listens: bool = False

    def connection(self, name, emulator):
        """Options of its character device for QEMU."""
        role = {"server": True, "wait": False} if self.listens else emulator.reconnects()
        return "socket," + words({"id": f"{name}-connection", "path": self.socket} | role)

    def device(self, name):
        """Options of its device for QEMU."""
        keys = {
            "driver": "vhost-user-blk-pci",
            "id": name,
            "chardev": f"{name}-connection",
            "num-queues": self.queues,
        }
        if self.packed:
            keys["packed"] = True
        if self.slot is not None:
            keys["bus"] = f"slot{self.slot}"
        return keys


def words(keys):
    """Options as one argument of QEMU's command line."""
    switches = {key: "on" if value else "off" for key, value in keys.items() if isinstance(value, bool)}
    return ",".join(f"{key}={value}" for key, value in (keys | switches).items())


class Machine(Guest):
    """One running machine, whose disks are /dev/vda and so on. Use it in a `with` statement.

    `incoming` is the path of a socket where it waits for an incoming migration (`move_to`) instead
    of booting.
    """

    PROGRAM = "/bin/numbered"

    def __init__(self, cache, numbered, drives, emulator, processors=1, incoming=None):
        super().__init__(cache, numbered, drives, own_clock=False)
        self.qemu, self.emulator = emulator, emulator.program
        self.processors = processors
        self.incoming = incoming

    def reset(self):
        """Resets the machine; returns when it has booted again."""
        # By default a reset of the guest is treated as a crash.
        self.monitor.run("set-action", reboot="reset")
        self.monitor.run("system_reset")
        self.monitor.wait_for("RESET")
        self._boot()
        self.monitor.run("set-action", reboot="shutdown")

    def kill(self):
        """Kills it with SIGKILL. Its earlier reports are in `reports`."""
        self._process.kill()
        self._process.wait()
        self.reports.until_end()
        # Releases the initramfs at once: a test may use fifty machines.
        self._directory.cleanup()

    def plug(self, name, drive):
        """Adds a disk at run time. The initial disks are disk0 and so on."""
        backend = {
            "type": "socket",
            "data": {
                "addr": {"type": "unix", "data": {"path": str(drive.socket)}},
                "server": False,
                **self.qemu.reconnects(),
            },
        }
        self.monitor.run("chardev-add", id=f"{name}-connection", backend=backend)
        self.monitor.run("device_add", **drive.device(name))

    def unplug(self, name):
        """Removes a disk; returns when the guest has released it."""
        self.monitor.run("device_del", id=name)
        self.monitor.wait_for("DEVICE_DELETED", lambda data: data.get("device") == name)
        self.monitor.run("chardev-remove", id=f"{name}-connection")

    def move_to(self, other, during):
        """Migrates the guest to a machine that waits for it.

        `during` is called during the migration, which cannot complete before it has returned.
        """
        self.monitor.run("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])
        # Until `during` has returned, the migration must not converge: it copies slowly, or
        # repeatedly.
        slow, no_limit = (1 if self.qemu.misses_writes else 16) * MIB, 1 << 40
        self.monitor.run("migrate-set-parameters", **{"max-bandwidth": slow, "downtime-limit": 1})
        self.monitor.run("migrate", uri=f"unix:{other.incoming}")
        self.monitor.wait_for("MIGRATION", lambda data: data["status"] == "active")
        during()
        # The rest is copied while the guest is paused, without a time limit.
        self.monitor.run("migrate-set-parameters", **{"max-bandwidth": no_limit, "downtime-limit": 20_000})
        ended = self.monitor.wait_for(
            "MIGRATION", lambda data: data["status"] in ("completed", "failed", "cancelled")
        )
        if ended["status"] != "completed":
            raise GuestFailed(f"moving {ended['status']}: {self.monitor.run('query-migrate')}")
        # From here on the guest runs in the target.
        other.monitor.wait_for("RESUME")

    def quit(self):
        """Ends it cleanly."""
        self.monitor.run("quit")
        self._process.wait()
        self._directory.cleanup()

    def _boot(self):
        if not self.incoming:
            super()._boot()

    def _prepare(self):
        self.run("mkdir -p /mnt/disk /root")

    def _start(self, directory):
        super()._start(directory)
        try:
            self.monitor = Monitor(self._control)
        except (qmp.CommandFailed, OSError) as error:
            lost = self._died()
            self._stop()
            raise lost from error

    def _stop(self):
        super()._stop()
        self._control.close()

    def _hardware(self):
        self._control, control = socket.socketpair()
        ours, reports = socket.socketpair()
        with ours:
            self.reports = Lines(ours.makefile("rb"), "the guest's reports")
        hardware = [
            "-machine", "q35,memory-backend=memory", "-m", MEMORY, "-smp", str(self.processors),
            "-object", f"memory-backend-memfd,id=memory,size={MEMORY},share=on",
            "-append", f"{KERNEL} {NOT_CLEARED}",
            "-chardev", f"socket,id=control,fd={control.fileno()}",
            "-mon", "chardev=control,mode=control",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=reports,fd={reports.fileno()}",
            "-device", "virtserialport,chardev=reports,name=reports",
        ]  # fmt: skip
        for slot in range(SLOTS):
            hardware += ["-device", f"pcie-root-port,id=slot{slot},chassis={slot},slot={slot}"]
        for number, drive in enumerate(self.disks):
            name = f"disk{number}"
            hardware += ["-chardev", drive.connection(name, self.qemu), "-device", words(drive.device(name))]
        if self.incoming:
            hardware += ["-incoming", f"unix:{self.incoming}"]
        return hardware, [control, reports]
