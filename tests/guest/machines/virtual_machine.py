"""A virtual machine whose disks are exports of vhost-user-blk, on sockets of one back end or
several.

Its memory is shared with them. It has the host's clock, as it talks to programs outside, and the
guest of guest.py otherwise: scripts are done one after another. Beside them its programs report
through a port of their own, line by line. It may be reset, be killed, be given and lose disks while
it runs, and move to another machine.

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

# Enough for a kernel, its initramfs in memory, and what the tests write there.
MEMORY = "320M"
# A page that the kernel has cleared is copied for that, whoever writes to it next.
NOT_CLEARED = "init_on_alloc=0"
# Where a disk may be plugged while the machine runs.
SLOTS = 2
# The end of the reports' port in the guest; the number of its device follows from the others.
REPORTS = "/dev/vport*p1"


@dataclass(frozen=True)
class Emulator:
    """A QEMU."""

    program: str
    version: tuple

    @classmethod
    def of(cls, program):
        """The one that this program is."""
        said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
        version = re.search(r"version (\d+)\.(\d+)", said)
        return cls(program, tuple(map(int, version.groups())))

    def __str__(self):
        return "QEMU {}.{}".format(*self.version)

    def tool(self, name):
        """Another program of it."""
        return name if self.program == Path(self.program).name else Path(self.program).with_name(name)

    @property
    def misses_writes(self):
        """Whether it misses some of what emulated processors write to memory that was copied, with
        any back end. 7.2 does, and 11.1 does not.
        """
        return self.version < (11, 0)

    def reconnects(self):
        """That a character device connects again a second after it was lost."""
        return {"reconnect-ms": 1000} if self.version >= (9, 2) else {"reconnect": 1}


@dataclass(frozen=True)
class Drive:
    """A disk of a machine."""

    socket: Path
    queues: int = 1
    # Of virtio's two kinds of ring the second.
    packed: bool = False
    # Where it can be unplugged and plugged, from 0 to SLOTS; otherwise it is there for good.
    slot: int | None = None
    # The machine listens, and the back end connects to it.
    listens: bool = False

    def connection(self, name, emulator):
        """As a character device of QEMU's."""
        who = {"server": True, "wait": False} if self.listens else emulator.reconnects()
        return "socket," + words({"id": f"{name}-connection", "path": self.socket} | who)

    def device(self, name):
        """As a device of QEMU's."""
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
    """Keys as one word of QEMU's command line."""
    switches = {key: "on" if value else "off" for key, value in keys.items() if isinstance(value, bool)}
    return ",".join(f"{key}={value}" for key, value in (keys | switches).items())


class Machine(Guest):
    """One running machine, whose disks are /dev/vda and so on. Use it in a `with` statement.

    `incoming` is the path of a socket where it waits for another machine that moves in (`move_to`)
    instead of booting.
    """

    PROGRAM = "/bin/numbered"

    def __init__(self, cache, numbered, drives, emulator, processors=1, incoming=None):
        super().__init__(cache, numbered, drives, own_clock=False)
        self.qemu, self.emulator = emulator, emulator.program
        self.processors = processors
        self.incoming = incoming

    def reset(self):
        """As the button does; returns when it has booted again."""
        # Otherwise a guest that starts again has broken.
        self.monitor.run("set-action", reboot="reset")
        self.monitor.run("system_reset")
        self.monitor.wait_for("RESET")
        self._boot()
        self.monitor.run("set-action", reboot="shutdown")

    def kill(self):
        """Ends it without a word of warning. What it reported before is in `reports`."""
        self._process.kill()
        self._process.wait()
        self.reports.until_end()
        # Of fifty machines, not fifty initramfs.
        self._directory.cleanup()

    def plug(self, name, drive):
        """Gives it a disk while it runs. Those that it has from its start are disk0 and so on."""
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
        """Takes the disk; returns when the guest has let it go."""
        self.monitor.run("device_del", id=name)
        self.monitor.wait_for("DEVICE_DELETED", lambda data: data.get("device") == name)
        self.monitor.run("chardev-remove", id=f"{name}-connection")

    def move_to(self, other, meanwhile):
        """Moves the guest into a machine that waits for it, with all that runs in it.

        `meanwhile` is called when it is under way; it cannot end before that has returned.
        """
        self.monitor.run("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])
        # Until `meanwhile` has returned, there is always something left to copy: little is copied, or
        # all of it again and again.
        slow, no_limit = (1 if self.qemu.misses_writes else 16) * MIB, 1 << 40
        self.monitor.run("migrate-set-parameters", **{"max-bandwidth": slow, "downtime-limit": 1})
        self.monitor.run("migrate", uri=f"unix:{other.incoming}")
        self.monitor.wait_for("MIGRATION", lambda data: data["status"] == "active")
        meanwhile()
        # The rest while it stands still, for as long as it takes.
        self.monitor.run("migrate-set-parameters", **{"max-bandwidth": no_limit, "downtime-limit": 20_000})
        ended = self.monitor.wait_for(
            "MIGRATION", lambda data: data["status"] in ("completed", "failed", "cancelled")
        )
        if ended["status"] != "completed":
            raise GuestFailed(f"moving {ended['status']}: {self.monitor.run('query-migrate')}")
        # The guest answers there now.
        other.monitor.wait_for("RESUME")

    def quit(self):
        """Ends it in order."""
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
