"""Load on a disk in a guest: numbered blocks (numbered.rs beside this), and files in a file system.

The file system has the first 64 MiB of a disk, the numbers come behind it. Both go on until they
are ended; what they acknowledged on the way is in the machine's reports.

Never judges what it cannot see from inside: that is the caller's.
"""

import fcntl
import os
import re
import subprocess
from pathlib import Path

from guest import GuestFailed

# Megabytes of the file system, and where the numbers begin.
FILES_MIB = 64
THREADS, BLOCKS = 8, 32
REPORTED = re.compile(r"(\d+) (\d+)$")


class Wrong(Exception):
    """A disk has not what it should have; the text says what."""


def numbered_program(cache):
    """The program that writes the numbers, made by the compiler where it is not there; where it is."""
    source, program = Path(__file__).with_name("numbered.rs"), Path(cache, "numbered")
    with open(Path(cache, "lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
            compiler = os.environ.get("RUSTC", "rustc")
            made = program.with_suffix(".new")
            subprocess.run([compiler, "--edition", "2024", "-O", "-o", made, source], check=True)
            made.rename(program)
    return program


def make_files(machine, disk):
    """An empty file system, mounted."""
    machine.run(f"""
        mkfs.ext4 -q /dev/{disk} {FILES_MIB}M || exit
        mkdir -p /mnt/{disk} && mount -t ext4 -o discard /dev/{disk} /mnt/{disk}
    """)


def check_files(machine, disk):
    """Ends the file system, and has it checked."""
    machine.run(f"umount /mnt/{disk} && e2fsck -fn /dev/{disk}")


class Load:
    """Numbers, and files if wanted, on one disk of a machine. It may begin again on another."""

    def __init__(self, disk, files=True):
        self.disk, self.files = disk, files
        # By thread, the last round that was reported.
        self.rounds = {}

    def begin(self, machine):
        """Starts it."""
        numbers = f"numbered write {self._where()} /dev/vport*p1 /tmp/stop"
        # A pipe to wait for each: that a program has ended is then an event for another shell.
        machine.run(f"""
            rm -f /tmp/stop /tmp/numbers /tmp/files
            mkfifo /tmp/numbers /tmp/files
            (said=$({numbers} 2>&1); status=$?; echo "$said" >/tmp/numbers; exit $status) &
            [ {int(self.files)} = 0 ] || (
                number=0 said=fine
                until [ -e /tmp/stop ]; do
                    number=$((number + 1)) name=/mnt/{self.disk}/$((number % 40))
                    {{
                        rm -rf "$name" && mkdir "$name" &&
                            dd if=/bin/busybox of="$name/a" bs=4k skip=$number count=$((number % 30 + 1)) &&
                            cp "$name/a" "$name/b" && sync && mv "$name/b" "$name/c" &&
                            cmp "$name/a" "$name/c"
                    }} >/tmp/did 2>&1 || {{ said="file $number: $(cat /tmp/did)"; break; }}
                done
                echo "$said" >/tmp/files
            ) &
        """)

    def more(self, machine, rounds=1):
        """Waits until each thread has reported so many rounds from now on."""
        begin = len(machine.reports)

        def enough(lines):
            seen = dict.fromkeys(range(THREADS), 0)
            for line in lines:
                if line.startswith("wrong"):
                    return True
                if report := REPORTED.match(line):
                    seen[int(report[1])] += 1
            return min(seen.values()) >= rounds

        if not machine.reports.wait_for(enough, begin):
            raise GuestFailed("the machine has ended under load")
        wrong = [line for line in machine.reports.all(begin) if line.startswith("wrong")]
        if wrong:
            raise Wrong(f"{self.disk}: " + "\n".join(wrong))

    def end(self, machine):
        """Ends it after the rounds that are under way, and has everything read once more."""
        said = machine.run("touch /tmp/stop; cat /tmp/numbers").strip()
        if not said.startswith("ok "):
            raise Wrong(f"{self.disk}: {said}")
        if self.files:
            files = machine.run("cat /tmp/files").strip()
            if files != "fine":
                raise Wrong(f"{self.disk}: {files}")
        return said

    def remember(self, machine):
        """Takes over what a machine that is gone has reported."""
        for line in machine.reports.all():
            if report := REPORTED.match(line):
                self.rounds[int(report[1])] = int(report[2])

    def check(self, machine):
        """That all which was reported and flushed is there."""
        for line in machine.run(f"numbered check {self._where()}").splitlines():
            thread, lowest, _ = map(int, line.split())
            flushed = self.rounds.get(thread, 0)
            if lowest < flushed:
                raise Wrong(
                    f"{self.disk}: thread {thread} has a block of round {lowest}, and {flushed} was flushed"
                )

    def _where(self):
        return f"/dev/{self.disk} {FILES_MIB} {THREADS} {BLOCKS}"
