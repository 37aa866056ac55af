"""Load on a disk in a guest: numbered blocks (numbered.rs), and files in a file system.

The file system occupies the first 64 MiB of a disk, the numbers follow. Both run until they are
ended; their acknowledgements are in the machine's reports.

Never checks properties that are visible only from outside: that is the caller's task.
"""

import fcntl
import os
import re
import subprocess
from pathlib import Path

from guest import GuestFailed

# Size of the file system, and offset of the numbers.
FILES_MIB = 64
THREADS, BLOCKS = 8, 32
REPORTED = re.compile(r"(\d+) (\d+)$")


class Wrong(Exception):
    """Wrong content of a disk; the text describes it."""


def numbered_program(cache):
    """Path of the program that writes the numbers; compiles it if it is missing."""
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
    """Creates and mounts an empty file system."""
    machine.run(f"""
        mkfs.ext4 -q /dev/{disk} {FILES_MIB}M || exit
        mkdir -p /mnt/{disk} && mount -t ext4 -o discard /dev/{disk} /mnt/{disk}
    """)


def check_files(machine, disk):
    """Unmounts the file system and checks it."""
    machine.run(f"umount /mnt/{disk} && e2fsck -fn /dev/{disk}")


class Load:
    """Numbers, and optionally files, on one disk of a machine. It may continue on another machine.
    """

    def __init__(self, disk, files=True):
        self.disk, self.files = disk, files
        # Last reported round, by thread.
        self.rounds = {}

    def begin(self, machine):
        """Starts the load."""
        numbers = f"numbered write {self._where()} /dev/vport*p1 /tmp/stop"
        # A pipe for each program: its end becomes an event that another shell can wait for.
        machine.run(f"""
            rm -f /tmp/stop /tmp/numbers /tmp/files
            mkfifo /tmp/numbers /tmp/files
            (output=$({numbers} 2>&1); status=$?; echo "$output" >/tmp/numbers; exit $status) &
            [ {int(self.files)} = 0 ] || (
                number=0 output=fine
                until [ -e /tmp/stop ]; do
                    number=$((number + 1)) name=/mnt/{self.disk}/$((number % 40))
                    {{
                        rm -rf "$name" && mkdir "$name" &&
                            dd if=/bin/busybox of="$name/a" bs=4k skip=$number count=$((number % 30 + 1)) &&
                            cp "$name/a" "$name/b" && sync && mv "$name/b" "$name/c" &&
                            cmp "$name/a" "$name/c"
                    }} >/tmp/did 2>&1 || {{ output="file $number: $(cat /tmp/did)"; break; }}
                done
                echo "$output" >/tmp/files
            ) &
        """)

    def more(self, machine, rounds=1):
        """Waits until each thread has reported this number of further rounds."""
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
        """Ends the load after the rounds in progress, and verifies everything once more."""
        output = machine.run("touch /tmp/stop; cat /tmp/numbers").strip()
        if not output.startswith("ok "):
            raise Wrong(f"{self.disk}: {output}")
        if self.files:
            files = machine.run("cat /tmp/files").strip()
            if files != "fine":
                raise Wrong(f"{self.disk}: {files}")
        return output

    def remember(self, machine):
        """Reads the reports of a machine that has ended."""
        for line in machine.reports.all():
            if report := REPORTED.match(line):
                self.rounds[int(report[1])] = int(report[2])

    def check(self, machine):
        """Asserts that all reported and flushed rounds are on the disk."""
        for line in machine.run(f"numbered check {self._where()}").splitlines():
            thread, lowest, _ = map(int, line.split())
            flushed = self.rounds.get(thread, 0)
            if lowest < flushed:
                raise Wrong(
                    f"{self.disk}: thread {thread} has a block of round {lowest}, and {flushed} was flushed"
                )

    def _where(self):
        return f"/dev/{self.disk} {FILES_MIB} {THREADS} {BLOCKS}"
