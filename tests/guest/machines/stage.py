"""The environment of cases: images, back ends and machines, all of which end with it; and the
results of the cases.

Never decides which cases run.
"""

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from back_end import Daemon, Offer, Weir
from virtual_machine import Machine

MIB = 1 << 20


class Skipped(Exception):
    """A case that cannot run here; the text gives the reason."""


class Verdicts:
    """Counts results, and selects cases."""

    def __init__(self, only):
        self._only = only
        self._lock = threading.Lock()
        self._recorded = set()
        self.passed = self.failed = 0

    def wanted(self, name):
        """True if this case is to run."""
        return not self._only or name in self._only

    def record(self, name, seconds, reason=""):
        """Records the end of a case; `why` is the reason of a failure."""
        with self._lock:
            self._recorded.add(name)
            if reason:
                self.failed += 1
            else:
                self.passed += 1
            print(f"{'FAILED' if reason else 'ok    '} {name} ({seconds:.1f} s)", flush=True)
            if reason:
                print("  " + "\n  ".join(reason.splitlines()), flush=True)

    def skipped(self, name, reason):
        """Records a case that did not run."""
        with self._lock:
            self._recorded.add(name)
            print(f"skip   {name}: {reason}", flush=True)

    def missed(self, names, reason):
        """Records these cases as failed for this reason, unless they have ended. If all have, the
        end of their environment has failed.
        """
        missing = [name for name in names if self.wanted(name) and name not in self._recorded]
        for name in missing or [f"the end after {', '.join(names)}"]:
            self.record(name, 0, f"{type(reason).__name__}: {reason}")


class Stage(contextlib.ExitStack):
    """The environment in which some cases run, one after another. Use it in a `with` statement."""

    def __init__(self, verdicts, cache, numbered, weir, emulator, daemon, full):
        super().__init__()
        self.full, self.emulator = full, emulator
        self._verdicts, self._cache, self._numbered, self._weir = verdicts, cache, numbered, weir
        self._daemon = daemon
        self._back_ends, self._machines = [], []

    def __enter__(self):
        super().__enter__()
        # Beside the cache, which is on a disk: not every file system in memory has O_DIRECT.
        kept = tempfile.TemporaryDirectory(prefix="guest-test.", dir=self._cache.parent)
        self.directory = Path(self.enter_context(kept))
        return self

    @property
    def features(self):
        """The class of the back end, for its features."""
        return Daemon if self._daemon else Weir

    def wanted(self, name):
        """True if this case is to run."""
        return self._verdicts.wanted(name)

    def case(self, name, function):
        """Runs a case, and records its result. After a failure the next case runs."""
        if not self.wanted(name):
            return
        begin, reason = time.monotonic(), ""
        try:
            function()
        except Skipped as error:
            self._verdicts.skipped(name, error)
            return
        except Exception as error:  # any exception is a failure of this case
            reason = f"{type(error).__name__}: {error}\n{self._logs()}"
        self._verdicts.record(name, time.monotonic() - begin, reason)

    def image(self, name, kind="raw", mib=256):
        """Creates an empty image."""
        path = self.directory / f"{name}.{kind}"
        subprocess.run(["qemu-img", "create", "-q", "-f", kind, path, f"{mib}M"], check=True)
        return path

    def serve(self, image, kind="raw", **offer):
        """Starts a back end of this image."""
        program = "qemu-storage-daemon" if self._daemon else self._weir
        back_end = self.enter_context(self.features(program, image, kind, Offer(**offer)))
        self._back_ends.append(back_end)
        return back_end

    def machine(self, drives, **kind):
        """Starts a machine; returns when it has booted, or waits for a migration."""
        machine = self.enter_context(Machine(self._cache, self._numbered, drives, self.emulator, **kind))
        self._machines.append(machine)
        return machine

    def _logs(self):
        servers = [
            f"{server.image.name}: log of its server:\n{server.log()}" for server in self._back_ends
        ]
        machines = [f"a machine's console:\n{machine.last_words()}" for machine in self._machines]
        return "\n".join(servers + machines)


def allocated(path):
    """Allocated bytes of a file."""
    return os.stat(path).st_blocks * 512
