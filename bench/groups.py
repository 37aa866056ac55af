"""Daemons that serve several disks in one throttle group: weir from a config file,
qemu-storage-daemon from its options.

Both come from one description, so that the same disks under the same limits are compared. Settings
that QEMU lacks (weights, reservations) apply to weir only; QEMU's figure then shows what its users
get today.

Never puts a load on them.
"""

from dataclasses import dataclass, field

import qmp
import servers

GROUP = "tenant"
NULL = "null:1G"


@dataclass(frozen=True)
class Disk:
    """One disk; `settings` are keys of its section in weir's config, which QEMU ignores."""

    name: str
    settings: dict = field(default_factory=dict)


def toml(value):
    """A number, text or boolean in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def table(title, keys):
    """One section of a config file."""
    return "\n".join([f"[{title}]", *(f"{key} = {toml(value)}" for key, value in keys.items()), ""])


class Daemon(servers.Server):
    """A server whose command line needs its own directory, for a config file and a monitor's
    socket.
    """

    def __init__(self, command):
        super().__init__([])
        self._command = command

    def prepare(self, directory):
        self._monitor_path = directory / "qmp.sock"
        self.argv = [str(word) for word in self._command(directory, self._monitor_path)]

    def monitor(self):
        """A connection to its monitor. The socket exists once an NBD client has been greeted."""
        return qmp.Monitor(self._monitor_path)


def weir_from(program, config):
    """weir with this config file."""

    def command(directory, monitor):
        path = directory / "weir.toml"
        path.write_text(config)
        return [program, "serve", "--config", path, "--qmp", f"unix:{monitor}"]

    return Daemon(command)


def config(limits, disks, image=NULL, daemon=None):
    """A config file with `disks` in one group with these limits."""
    tables = [table("daemon", daemon)] if daemon else []
    tables.append(table(f"group.{GROUP}", limits))
    tables += [table(f"disk.{disk.name}", {"image": image, "group": GROUP} | disk.settings) for disk in disks]
    return "\n".join(tables)


def weir(program, limits, disks, image=NULL, daemon=None):
    """weir with `disks` in one group with these limits."""
    return weir_from(program, config(limits, disks, image, daemon))


def storage_daemon(limits, disks, idle=0, file="driver=null-co,size=1073741824"):
    """qemu-storage-daemon with `disks` in one group with these limits, and `idle` further members
    that are not exported.
    """

    def command(_directory, monitor):
        below = ",".join(f"file.{option}" for option in file.split(","))
        group = ",".join(
            ["throttle-group", f"id={GROUP}", *(f"x-{key}={value}" for key, value in limits.items())]
        )
        argv = ["qemu-storage-daemon", "--chardev", f"socket,id=qmp,path={monitor},server=on,wait=off"]
        argv += ["--monitor", "chardev=qmp", "--object", group]
        # By default at most a hundred clients are served.
        argv += ["--nbd-server", "addr.type=fd,addr.str=3,max-connections=0"]
        for name in [*(disk.name for disk in disks), *(f"idle{number}" for number in range(idle))]:
            argv += ["--blockdev", f"driver=throttle,node-name={name},throttle-group={GROUP},{below}"]
        for disk in disks:
            argv += [
                "--export",
                f"type=nbd,id={disk.name},node-name={disk.name},name={disk.name},writable=on",
            ]
        return argv

    return Daemon(command)
