"""A `weir serve` with a page, for one scenario: started, restarted, queried over QMP, ended.

In Python and not in the tests' harness, because a scenario restarts the daemon while a browser
shows the page, and the browser's driver is Python.

Never leaves a process behind, and fails if the daemon does not end cleanly.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import qmp  # noqa: E402  (the bench's client of QMP)

DEADLINE_SECONDS = 300
TOKEN = "0123456789abcdef-of-no-use"


class Daemon:
    """One daemon in its own directory. Use it in a `with` statement."""

    def __init__(self, weir, directory, config, token=TOKEN):
        self.weir, self.directory, self.port = weir, Path(directory), 0
        self.config, self.token = config, token
        self.monitor_path = self.directory / "qmp.sock"
        self.loads = []

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, kind, *_):
        for load in self.loads:
            load.kill()
            load.wait()
        if self.process.poll() is None:
            self.stop(quiet=kind is not None)
        elif kind is None:
            raise AssertionError(f"the daemon ended by itself:\n{self.log()}")

    def start(self):
        """Returns once it is ready; a restart uses the port of the first start."""
        daemon = f'[daemon]\nqmp = "unix:{self.monitor_path}"\nhttp = "127.0.0.1:{self.port}"\nstate = "{self.directory}"\n'
        if self.token is not None:
            path = self.directory / "token"
            path.write_text(self.token + "\n")
            path.chmod(0o600)
            daemon += f'http-token-file = "{path}"\n'
        config = self.directory / "weir.toml"
        config.write_text(daemon + self.config)
        self.lines, ready, decided = [], threading.Event(), threading.Event()
        argv = [self.weir, "serve", "--config", config]
        self.process = subprocess.Popen(argv, cwd=self.directory, stderr=subprocess.PIPE, text=True)
        threading.Thread(
            target=self._read, args=(self.process.stderr, self.lines, ready, decided), daemon=True
        ).start()
        if not decided.wait(DEADLINE_SECONDS) or not ready.is_set():
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the daemon is not ready:\n{self.log()}")
        found = re.search(r"127\.0\.0\.1:(\d+)", self.log())
        assert found, f"the log has no address of the page:\n{self.log()}"
        self.port = int(found.group(1))
        self.url = f"http://127.0.0.1:{self.port}/"

    @staticmethod
    def _read(stream, lines, ready, decided):
        for line in stream:
            lines.append(line)
            if " ready " in line or line.rstrip().endswith(" ready"):
                ready.set()
                decided.set()
        decided.set()  # It has ended.

    def log(self):
        return "".join(self.lines)

    def stop(self, quiet=False):
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(DEADLINE_SECONDS)
        assert quiet or status == 0, f"the daemon ended with {status}:\n{self.log()}"

    def limits(self, name):
        """The limits of a disk or group in force, according to QMP."""
        with qmp.Monitor(self.monitor_path) as monitor:
            status = monitor.run("x-weir-query-status")
        (node,) = [node for node in status["disks"] + status["groups"] if node["name"] == name]
        return {limit: value for limit, value in node["limits"].items() if value}

    def load(self, name, *options):
        """Keeps a disk busy until the end; its socket is `NAME.sock`."""
        uri = f"nbd+unix:///{name}?socket={self.directory / name}.sock"
        argv = [self.weir, "bench", "-q", "--runtime", "600s", *options, uri]
        output = open(self.directory / f"{name}.load", "wb")
        self.loads.append(subprocess.Popen(argv, stdout=output, stderr=output, env=os.environ))


def disk(name, *lines, socket="all"):
    """The config section of a disk in memory, served at `SOCKET.sock` of the daemon's directory."""
    quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
    export = f'export = [{{ type = "nbd", listen = "unix:{socket}.sock" }}]'
    return "\n".join([f"[disk.{quoted}]", 'image = "memory:16M"', *lines, export, ""])
