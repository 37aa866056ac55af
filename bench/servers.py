"""NBD servers for the bench: started on a socket of the bench, their CPU time read, stopped.

The bench passes the socket: weir, qemu-nbd and nbdkit all accept a listening socket from their
parent (systemd's LISTEN_FDS protocol). A client can connect at once and waits until the server
accepts, so that no server is polled for readiness, and none needs its own options for the address.

Never leaves a process or a socket behind, even if a sample fails; never decides what is measured.
"""

import os
import shlex
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import qmp

# The programs expect their sockets from descriptor 3 on, and their own PID in LISTEN_PID: only a
# process that becomes the server by exec can set that. The socket arrives as its standard input.
ACTIVATE = 'exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'
STOP_SECONDS = 120
READY_SECONDS = 120
# Deadline for qemu-storage-daemon to answer at its monitor, and number of attempts to start it.
MONITOR_SECONDS, MONITOR_ATTEMPTS = 20, 5
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """A server ended on its own, did not stop, or stopped with an error; the text names it and the
    reason.
    """


class Server:
    """One running server of one export. Use it in a `with` statement.

    Clients use a Unix socket, or, if they cannot, TCP on the loopback (`tcp=True`). `killed`: it is
    killed instead of stopped, because it may be unable to end cleanly.
    """

    def __init__(self, argv, tcp=False, killed=False):
        self.argv = [str(word) for word in argv]
        self.tcp = tcp
        self._killed = killed

    def __enter__(self):
        self._directory = tempfile.TemporaryDirectory(prefix="weir-bench.")
        self._log_path = Path(self._directory.name, "log")
        self.prepare(Path(self._directory.name))
        listener = self._listen()
        with listener, open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", ACTIVATE, "sh", *self.argv], stdin=listener, stdout=log, stderr=log
            )
        return self

    def __exit__(self, kind, *_):
        try:
            self._stop(quiet=kind is not None)
        finally:
            self._directory.cleanup()

    def prepare(self, directory):
        """Called before the start with a directory that lives as long as the server, for files of
        its command line.
        """

    def uri_of(self, export):
        """The URI of one of several exports."""
        return self.uri.replace("///", f"///{export}", 1) if not self.tcp else f"{self.uri}/{export}"

    def _listen(self):
        """The listening socket; sets `uri` and, over TCP, `address`."""
        if self.tcp:
            # Port 0: the kernel chooses a free one, so that tests may run in parallel.
            listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
            self.uri = f"nbd://{self.address}"
            return listener
        path = str(Path(self._directory.name, "nbd.sock"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(16)
        self.uri = f"nbd+unix:///?socket={path}"
        return listener

    @property
    def pid(self):
        """PID of the server."""
        return self._process.pid

    def cpu_seconds(self):
        """User and system time of all its threads so far, including ended ones; in steps of 10 ms.
        """
        return cpu_seconds(self._process.pid)

    def log(self):
        """Output of the server so far."""
        return self._log_path.read_text(errors="replace")

    def _stop(self, quiet):
        """Ends the process. `quiet` while another exception is propagated, which must not be
        hidden.
        """
        if self._killed:
            self._process.kill()
            self._process.wait()
            return
        if self._process.poll() is not None:
            # The server's last messages say more than the failure that followed.
            raise ServerFailed(f"{shlex.join(self.argv)[:200]}: ended by itself\n{self.log()}")
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = f"no answer to SIGTERM within {STOP_SECONDS} s"
        # qemu-nbd dies of the signal where others catch it; both are a normal end.
        if status not in (0, -signal.SIGTERM) and not quiet:
            raise ServerFailed(f"{' '.join(self.argv)}: ended with {status}\n{self.log()}")


class Machine(Server):
    """A server over vhost-user-blk. It creates its sockets itself, and announces readiness: weir to
    its service manager, qemu-storage-daemon by answering at a monitor.

    `command(socket, nbd)` returns weir's command line, or with `monitored` that of
    qemu-storage-daemon without its monitor.
    """

    def __init__(self, command, monitored=False):
        super().__init__([])
        self._command = command
        self._monitored = monitored

    def __enter__(self):
        self._directory = tempfile.TemporaryDirectory(prefix="weir-bench.")
        directory = Path(self._directory.name)
        self._log_path = directory / "log"
        path, nbd = directory / "vm.sock", directory / "nbd.sock"
        self.target = f"vhost-user:{path}"
        self.uri = f"nbd+unix:///?socket={nbd}"
        self.argv = [str(word) for word in self._command(path, nbd)]
        start = self._monitor if self._monitored else self._notify
        try:
            with open(self._log_path, "wb") as log:
                start(directory, log)
        except (OSError, qmp.CommandFailed) as error:
            if hasattr(self, "_process"):
                self._process.kill()
                self._process.wait()
            text = self.log()
            self._directory.cleanup()
            raise ServerFailed(f"{shlex.join(self.argv)[:200]}: {error}\n{text}") from error
        return self

    def _stop(self, quiet):
        # qemu-storage-daemon 7.2 was observed to hang at its end, right after its client's. A kill
        # loses nothing: no row changes an image's metadata.
        if self._monitored and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        else:
            super()._stop(quiet)

    def _notify(self, directory, log):
        ready = directory / "ready"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            notifications.bind(str(ready))
            notifications.settimeout(READY_SECONDS)
            environment = os.environ | {"NOTIFY_SOCKET": str(ready)}
            self._process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
            while b"READY=1" not in notifications.recv(4096):
                pass

    def _monitor(self, directory, log):
        # Version 7.2 sometimes sends its greeting and never answers, so another one is started.
        for attempt in range(1, MONITOR_ATTEMPTS + 1):
            try:
                return self._monitor_once(directory / f"qmp{attempt}.sock", log)
            except qmp.CommandFailed:
                if attempt == MONITOR_ATTEMPTS:
                    raise
                self._process.kill()
                self._process.wait()

    def _monitor_once(self, path, log):
        monitor = ["--chardev", "socket,id=qmp,fd=3,server=on,wait=off", "--monitor", "chardev=qmp"]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(1)
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", ACTIVATE, "sh", *self.argv, *monitor], stdin=listener, stdout=log, stderr=log
            )
        # It answers once its exports exist.
        with qmp.Monitor(path, MONITOR_SECONDS):
            pass


def cpu_seconds(pid):
    """User and system time of process `pid`, from /proc/PID/stat (fields 14 and 15 of proc(5))."""
    # The second field is the program's name in parentheses and may contain spaces: parse what
    # follows it.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def resident_bytes(pid):
    """Resident memory of process `pid`."""
    return _status_bytes(pid, "VmRSS:")


def most_resident_bytes(pid):
    """Most resident memory of process `pid` since its start."""
    return _status_bytes(pid, "VmHWM:")


def _status_bytes(pid, key):
    """A size in /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise ServerFailed(f"process {pid}: /proc shows no resident memory; it has ended")


def weir(program, image, *options):
    """The command line of weir serving `image`: a path, `memory:SIZE` or `null:SIZE`."""
    # Additional options of the daemon, to measure their cost: WEIR_OPTIONS="--poll 50us" make bench
    return [program, "serve", image, *options, *shlex.split(os.environ.get("WEIR_OPTIONS", ""))]


def weir_file(program, path, *options):
    """weir on a raw file, past the page cache."""
    return weir(program, path, "--format", "raw", "--cache", "none", *options)


def qemu_nbd(path, aio):
    """qemu-nbd on a raw file, past the page cache; `aio` is `native` or `io_uring`."""
    return ["qemu-nbd", "--persistent", "--shared=8", "--format=raw", "--cache=none", f"--aio={aio}", path]


def qemu_nbd_before(uri):
    """qemu-nbd in front of another server."""
    return ["qemu-nbd", "--persistent", "--shared=8", "--format=raw", uri]


def nbdkit_before(uri):
    """nbdkit in front of another server."""
    return ["nbdkit", "--foreground", "nbd", f"uri={uri}"]


def nbdkit_file(path, access):
    """nbdkit's file plugin; `access` is `random` or `sequential`.

    It cannot open with O_DIRECT. `cache=none` is the closest option: it uses the page cache and
    asks the kernel to drop the pages afterwards, so that a second read goes to the disk again.
    """
    return ["nbdkit", "--foreground", "file", path, "cache=none", f"fadvise={access}"]


def nbdkit_cached(path, *options):
    """nbdkit's file plugin on a raw file in the page cache."""
    return ["nbdkit", "--foreground", *options, "file", path]


def nbdkit_memory(size, *options):
    """nbdkit's memory plugin, one contiguous allocation: faster than its default sparse array."""
    return ["nbdkit", "--foreground", *options, "memory", size, "allocator=malloc"]
