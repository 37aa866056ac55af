"""What cases stand on: images, back ends and machines, all of which end with it; and the verdicts
on the cases.

Never decides what is tested.
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


class LeftOut(Exception):
    """A case that cannot run here; the text says why."""


class Verdicts:
    """How many cases passed, and which of all are wanted."""

    def __init__(self, only):
        self._only = only
        self._lock = threading.Lock()
        self._told = set()
        self.passed = self.failed = 0

    def wanted(self, name):
        """Whether this case is to run."""
        return not self._only or name in self._only

    def tell(self, name, seconds, why=""):
        """One case has ended; `why` it failed."""
        with self._lock:
            self._told.add(name)
            if why:
                self.failed += 1
            else:
                self.passed += 1
            print(f"{'FAILED' if why else 'ok    '} {name} ({seconds:.1f} s)", flush=True)
            if why:
                print("  " + "\n  ".join(why.splitlines()), flush=True)

    def left_out(self, name, why):
        """One case has not run."""
        with self._lock:
            self._told.add(name)
            print(f"not    {name}: {why}", flush=True)

    def missed(self, names, why):
        """These have ended, those too that have not come to run, for this reason. Where all did, it
        is the end of what they ran on that failed.
        """
        silent = [name for name in names if self.wanted(name) and name not in self._told]
        for name in silent or [f"the end after {', '.join(names)}"]:
            self.tell(name, 0, f"{type(why).__name__}: {why}")


class Stage(contextlib.ExitStack):
    """Where some cases run, one after another. Use it in a `with` statement."""

    def __init__(self, verdicts, cache, numbered, weir, emulator, daemon, full):
        super().__init__()
        self.full, self.emulator = full, emulator
        self._verdicts, self._cache, self._numbered, self._weir = verdicts, cache, numbered, weir
        self._daemon = daemon
        self._back_ends, self._machines = [], []

    def __enter__(self):
        super().__enter__()
        # Beside the cache, as that is on a disk: not every file system in memory has O_DIRECT.
        kept = tempfile.TemporaryDirectory(prefix="guest-test.", dir=self._cache.parent)
        self.directory = Path(self.enter_context(kept))
        return self

    @property
    def features(self):
        """The kind of back end, for what it can and cannot do."""
        return Daemon if self._daemon else Weir

    def wanted(self, name):
        """Whether this case is to run."""
        return self._verdicts.wanted(name)

    def case(self, name, function):
        """Runs a case, and says how it ended. A failure is no reason not to run the next."""
        if not self.wanted(name):
            return
        begin, why = time.monotonic(), ""
        try:
            function()
        except LeftOut as error:
            self._verdicts.left_out(name, error)
            return
        except Exception as error:  # whatever it is, it is this case's failure
            why = f"{type(error).__name__}: {error}\n{self._said()}"
        self._verdicts.tell(name, time.monotonic() - begin, why)

    def image(self, name, kind="raw", mib=256):
        """An empty image."""
        path = self.directory / f"{name}.{kind}"
        subprocess.run(["qemu-img", "create", "-q", "-f", kind, path, f"{mib}M"], check=True)
        return path

    def serve(self, image, kind="raw", **offer):
        """A back end of this image."""
        program = "qemu-storage-daemon" if self._daemon else self._weir
        back_end = self.enter_context(self.features(program, image, kind, Offer(**offer)))
        self._back_ends.append(back_end)
        return back_end

    def machine(self, drives, **kind):
        """A machine that has booted, or waits for another to move in."""
        machine = self.enter_context(Machine(self._cache, self._numbered, drives, self.emulator, **kind))
        self._machines.append(machine)
        return machine

    def _said(self):
        servers = [f"{server.image.name}: its server said:\n{server.log()}" for server in self._back_ends]
        machines = [f"a machine's console:\n{machine.last_words()}" for machine in self._machines]
        return "\n".join(servers + machines)


def allocated(path):
    """Bytes of a file that take space."""
    return os.stat(path).st_blocks * 512
