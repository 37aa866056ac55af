"""Description of the host, without which a figure means nothing, for the header of the table and of
the JSON.

Never fails: unknown facts are reported as unknown.
"""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

PROGRAMS = {
    "qemu-nbd": ["qemu-nbd", "--version"],
    "nbdkit": ["nbdkit", "--version"],
    "libnbd": ["nbdcopy", "--version"],
    "fio": ["fio", "--version"],
    "storage daemon": ["qemu-storage-daemon", "--version"],
}


def first_line(argv):
    """The first line that a program prints, or that it cannot be run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        return f"not available ({error.strerror})"
    return (done.stdout or done.stderr).partition("\n")[0]


def cpu_model():
    """Model of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def memory_gib():
    """Size of memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def file_system(path):
    """Type and source of the file system that holds `path`."""
    return first_line(["findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "--target", str(path)])


def describe(setup):
    """All facts, as a dictionary of texts."""
    weir = first_line([setup.program, "--version"]) if setup.program else "not measured"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{cpu_model()}, {os.cpu_count()} cores",
        "memory": f"{memory_gib():.0f} GiB",
        "kernel": platform.release(),
        "disk": " ".join(file_system(setup.disk.parent).split()),
        "load before": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "weir": weir,
    } | {name: first_line(argv) for name, argv in PROGRAMS.items()}
