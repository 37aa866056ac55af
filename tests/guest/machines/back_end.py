"""Back ends of vhost-user-blk for the tests: weir, and QEMU's daemon to validate the tests
themselves.

One process serves one disk on one socket. `start` returns when it is ready; it may be killed and
restarted on the same socket, as by a service manager.

Never leaves a process behind; never touches the image.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lines import Lines
from monitor import Monitor

STOP_SECONDS = 120
# A killed process holds its locks until the kernel has completed its last request.
STARTS = 500


class BackEndFailed(Exception):
    """The back end did not start, ended on its own, or ended with an error; the text contains its
    messages."""


@dataclass(frozen=True)
class Offer:
    """Options of the export."""

    queues: int = 1
    serial: str = ""
    read_only: bool = False
    # A write is acknowledged when it is durable.
    write_through: bool = False
    # The machine listens, and the back end connects to it.
    connects: bool = False
    # Another back end may open the image while no machine runs here.
    handover: bool = False


class BackEnd:
    """One running server of one image. Use it in a `with` statement."""

    # Features that another back end may lack.
    RESIZES = SERIALS = CACHES = RECOVERS = CONNECTS = HANDS_OVER = UPGRADES = True

    def __init__(self, program, image, kind, offer=Offer()):
        self.program, self.image, self.kind, self.offer = program, Path(image), kind, offer

    def __enter__(self):
        # Paths of sockets are limited (unix(7): 108 bytes), so not beside the images.
        self._directory = tempfile.mkdtemp(prefix="weir-vm.")
        self.socket = Path(self._directory, "disk.sock")
        self._process = self.monitor = self._log = None
        try:
            self.start()
        except BaseException:
            shutil.rmtree(self._directory)
            raise
        return self

    def __exit__(self, kind, *_):
        try:
            self.stop(quiet=kind is not None)
        finally:
            shutil.rmtree(self._directory)

    def start(self):
        """Starts it, with retries if it exits at once, until it is ready."""
        for _ in range(STARTS):
            if self._launch():
                return
            status = self._process.wait()
            log = self.log()
        raise BackEndFailed(
            f"{self.program}: ended with {status} at each of {STARTS} starts:\n{log}"
        )

    def kill(self):
        """Kills it with SIGKILL."""
        self._process.kill()
        self._process.wait()
        self._close()

    def stop(self, quiet=False):
        """Ends it cleanly; `quiet` suppresses errors while another exception is propagated."""
        if self._process is None:
            return
        early = self._process.poll()
        self._process.terminate()
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = f"no answer to SIGTERM within {STOP_SECONDS} s"
        self._log.until_end()
        log = self.log()
        self._close()
        self._process = None
        if not quiet and (early is not None or status not in (0, -15)):
            when = "ended by itself" if early is not None else "ended"
            raise BackEndFailed(f"{self.program}: {when} with {status}:\n{log}")

    def log(self):
        """The end of its log since the last start."""
        return "\n".join(self.log_lines()[-60:])

    def log_lines(self):
        """All log lines since the last start."""
        return self._log.all() if self._log else []

    def second_socket(self):
        """Opens another export of the disk; returns its socket."""
        path = Path(self._directory, "second.sock")
        self.monitor.run(
            "block-export-add",
            **{"type": "vhost-user-blk", "id": "second", "node-name": "disk", "writable": True},
            addr={"type": "unix", "path": str(path)},
            **{"num-queues": self.offer.queues},
        )
        return path

    def resize(self, size_bytes):
        """Resizes the disk."""
        self.monitor.run("block_resize", **{"node-name": "disk", "size": size_bytes})

    def _launch(self):
        raise NotImplementedError

    def _run(self, words, passed=()):
        # The developer's environment must not influence a test.
        drop = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "RUST_LOG")
        environment = {name: value for name, value in os.environ.items() if name not in drop}
        self._process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            pass_fds=passed,
        )
        self._log = Lines(self._process.stderr, str(self.program))

    def _close(self):
        if self.monitor:
            self.monitor.__exit__()
            self.monitor = None


class Weir(BackEnd):
    """`weir serve`."""

    def upgrade(self):
        """Upgrades to a new process. The machine must not notice."""
        before, log = self._process, self._log
        self._close()
        control = Path(self._directory, "qmp.sock")
        self._run([*self._words(), f"--takeover=unix:{control}"])
        is_upgraded = self._log.wait_for(lambda lines: any("taken over" in line for line in lines))
        status = before.wait(STOP_SECONDS)
        log.until_end()
        if not is_upgraded or status != 0:
            log = "\n".join(log.all()[-30:])
            raise BackEndFailed(
                f"no upgrade: the old process ended with {status}:\n{log}\n{self.log()}"
            )
        self._connect()

    def _launch(self):
        self._run(self._words())
        if not self._log.wait_for(lambda lines: any("ready" in line for line in lines)):
            return False
        self._connect()
        return True

    def _words(self):
        offer = self.offer
        keys = {"queues": offer.queues}
        if offer.serial:
            keys["serial"] = offer.serial
        if offer.read_only:
            keys["read-only"] = "on"
        if offer.connects:
            keys["client"] = "on"
        export = ",".join([f"unix:{self.socket}", *(f"{key}={value}" for key, value in keys.items())])
        # Never the page cache: the guest's requests must reach the device.
        cache = "directsync" if offer.write_through else "none"
        control = Path(self._directory, "qmp.sock")
        handover = ["--handover"] if offer.handover else []
        return [
            self.program, "serve", self.image, "--format", self.kind, "--name", "disk",
            "--cache", cache, "--vhost-user-blk", export, "--qmp", f"unix:{control}", *handover,
        ]  # fmt: skip

    def _connect(self):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(Path(self._directory, "qmp.sock")))
        self.monitor = Monitor(connection)


class Daemon(BackEnd):
    """qemu-storage-daemon. Limitations of version 7.2: the guest does not see a new size; its
    serial number is fixed; it always reports write-through; after a kill requests are lost or
    repeated, because it lacks INFLIGHT_SHMFD; it only listens; and it locks an image all the time.
    """

    RESIZES = SERIALS = CACHES = RECOVERS = CONNECTS = HANDS_OVER = UPGRADES = False

    def _launch(self):
        ours, theirs = socket.socketpair()
        file = f"driver=file,node-name=file,filename={self.image},discard=unmap,cache.direct=on"
        export = f"type=vhost-user-blk,id=first,node-name=disk,num-queues={self.offer.queues}"
        export += f",writable={'off' if self.offer.read_only else 'on'}"
        export += f",writethrough={'on' if self.offer.write_through else 'off'}"
        with theirs:
            self._run([
                self.program, "--blockdev", file,
                "--blockdev", f"driver={self.kind},node-name=disk,file=file,discard=unmap",
                "--export", f"{export},addr.type=unix,addr.path={self.socket}",
                "--chardev", f"socket,id=monitor,fd={theirs.fileno()}", "--monitor", "monitor",
            ], [theirs.fileno()])  # fmt: skip
        try:
            # It sends its greeting when everything else is ready.
            self.monitor = Monitor(ours)
        except Exception:
            ours.close()
            if self._process.poll() is None:
                raise
            return False
        return True
