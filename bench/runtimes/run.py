#!/usr/bin/env python3
"""Runs the runtime comparison: weir's own executor against the same server on compio, and nbdkit
for scale.

One server at a time and one fio client over a Unix socket: 4 KiB random reads at queue depth 32.
The servers take turns within every round, because the machines this runs on are shared: only a
ratio from one round means something, so the table gives medians over rounds and the ratio of each
server to compio, pair by pair.

Needs fio (with its nbd engine) and, where they take part, nbdkit and the two binaries. Uses the
Python standard library only. Never touches a process or a file that it did not create.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TICK_US = 1_000_000 / os.sysconf("SC_CLK_TCK")
SERVER_START_S = 30


class Failure(Exception):
    """What went wrong and what to do, as one line for the user."""


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Compare NBD servers on two io_uring runtimes.",
        epilog="example: run.py --compio target/release/nbd-compio --weir ../../target/release/weir",
    )
    parser.add_argument("--compio", type=Path, required=True, help="the nbd-compio binary")
    parser.add_argument("--weir", type=Path, help="the weir binary (default: leave weir out)")
    parser.add_argument(
        "--weir-args", default="--workers 1", help="further options of weir serve (default: %(default)s)"
    )
    parser.add_argument(
        "--compio-poll-us",
        type=int,
        default=0,
        metavar="N",
        help="add a row for compio polling N microseconds before it sleeps",
    )
    parser.add_argument("--no-nbdkit", action="store_true", help="leave nbdkit out")
    parser.add_argument("--storage", choices=["memory", "file", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: %(default)s)")
    parser.add_argument(
        "--runtime", type=int, default=4, metavar="S", help="seconds per measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--size-mib", type=int, default=256, help="size of the disk (default: %(default)s MiB)"
    )
    parser.add_argument(
        "--directory", type=Path, help="where the file image goes; needs O_DIRECT (default: here)"
    )
    parser.add_argument("--json", type=Path, help="where to write every measurement")
    return parser.parse_args()


def server_commands(arguments, storage, image):
    """Name -> function from socket path to command line, in the order of the table."""
    commands = {}
    if arguments.weir:
        weir = [
            arguments.weir,
            "serve",
            image,
            "--cache",
            "none",
            *(["--format", "raw"] if storage == "file" else []),
            *arguments.weir_args.split(),
        ]
        commands["weir"] = lambda path: [*weir, "--nbd", f"unix:{path}"]
    commands["compio"] = lambda path: [arguments.compio, image, f"unix:{path}"]
    if arguments.compio_poll_us:
        commands["compio, polling"] = lambda path: [
            arguments.compio,
            image,
            f"unix:{path}",
            "--poll-us",
            str(arguments.compio_poll_us),
        ]
    if not arguments.no_nbdkit:
        # nbdkit's file plugin has no O_DIRECT: on a file it reads the page cache, which is another,
        # lighter job.
        plugin = ["memory", f"{arguments.size_mib}M"] if storage == "memory" else ["file", image]
        name = "nbdkit" if storage == "memory" else "nbdkit (page cache)"
        commands[name] = lambda path: ["nbdkit", "-f", "-U", path, *plugin]
    return commands


class Server:
    """A server process from start to stop, with the processor time it has used."""

    def __init__(self, name, command, socket):
        self.name, self.socket = name, socket
        self.log = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen([str(word) for word in command], stdout=self.log, stderr=self.log)
        except OSError as error:
            raise Failure(f"{name}: {error} (build or install it first)") from error

    def __enter__(self):
        deadline = time.monotonic() + SERVER_START_S
        # Connecting would use up a connection of a server that counts them, so look for the socket
        # only.
        while not self.socket.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                self.log.seek(0)
                said = self.log.read().decode(errors="replace").strip() or "nothing"
                raise Failure(f"{self.name}: did not start (it said: {said})")
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def cpu_us(self):
        """User and system time of all threads so far, microseconds; steps of one clock tick,
        usually 10 ms.
        """
        # The command's name may contain spaces and parentheses, so count fields from behind the
        # last one.
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_US


def fio(*options):
    """Runs one fio job and returns its JSON description."""
    command = ["fio", "--name=runtimes", "--cpus_allowed=0", "--direct=1", "--output-format=json", *options]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise Failure(
            f"fio: exit status {result.returncode}: {(result.stderr or result.stdout).strip()[-400:]}"
        )
    # fio may print warnings before the JSON.
    return json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]


def random_reads(runtime):
    return ["--rw=randread", "--bs=4k", "--iodepth=32", "--time_based", f"--runtime={runtime}"]


def measure(name, command, socket, arguments, fill):
    """One server's turn: start, fill where it starts empty, one short run to warm up, one that
    counts.
    """
    uri = f"--uri=nbd+unix:///?socket={socket}"
    with Server(name, command, socket) as server:
        if fill:
            # Reading memory that was never written would compare how servers answer for nothing.
            fio(
                "--ioengine=nbd",
                uri,
                "--rw=write",
                "--bs=256k",
                "--iodepth=4",
                f"--size={arguments.size_mib}M",
            )
        fio("--ioengine=nbd", uri, *random_reads(1))
        before = server.cpu_us()
        read = fio("--ioengine=nbd", uri, *random_reads(arguments.runtime))["read"]
        used = server.cpu_us() - before
    socket.unlink(missing_ok=True)
    return {
        "server": name,
        "iops": read["iops"],
        "cpu_us_per_request": used / read["total_ios"],
        "p99_us": read["clat_ns"]["percentile"]["99.000000"] / 1000,
    }


def measure_direct(image, arguments):
    """fio on the file itself: the most that any server can reach."""
    read = fio("--ioengine=io_uring", f"--filename={image}", "--readonly", *random_reads(arguments.runtime))[
        "read"
    ]
    return {
        "server": "fio, no server",
        "iops": read["iops"],
        "cpu_us_per_request": None,
        "p99_us": read["clat_ns"]["percentile"]["99.000000"] / 1000,
    }


def compare(storage, directory, arguments):
    """All rounds on one kind of storage; every measurement, with its round."""
    image = f"memory:{arguments.size_mib}M"
    if storage == "file":
        image = directory / "image.raw"
        write_image(image, arguments.size_mib)
    commands = server_commands(arguments, storage, image)
    socket = directory / "server.sock"
    results = []
    for number in range(arguments.rounds):
        # Rotated, so that no server always follows the same neighbour.
        names = list(commands)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            print(f"{storage}: round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr)
            result = measure(name, commands[name](socket), socket, arguments, fill=storage == "memory")
            results.append({"storage": storage, "round": number, **result})
        if storage == "file":
            results.append({"storage": storage, "round": number, **measure_direct(image, arguments)})
    return results


def write_image(path, size_mib):
    """A file of `size_mib` MiB, written out: holes and unwritten extents would be read without the
    disk.
    """
    block = os.urandom(1 << 20)
    with open(path, "wb") as image:
        for _ in range(size_mib):
            image.write(block)
        image.flush()
        os.fsync(image.fileno())


def summarise(results):
    """Medians per storage and server, and each server's ratios to compio in the same round."""
    rows = []
    keys = dict.fromkeys((r["storage"], r["server"]) for r in results)
    for storage, server in keys:
        mine = [r for r in results if (r["storage"], r["server"]) == (storage, server)]
        base = {r["round"]: r for r in results if (r["storage"], r["server"]) == (storage, "compio")}
        row = {"storage": storage, "server": server}
        for field in ("iops", "cpu_us_per_request", "p99_us"):
            values = [r[field] for r in mine]
            row[field] = None if None in values else statistics.median(values)
        for field in ("iops", "cpu_us_per_request"):
            pairs = [(r[field], base[r["round"]][field]) for r in mine]
            usable = all(value is not None and other for value, other in pairs)
            row[f"{field}_ratio"] = (
                statistics.median(value / other for value, other in pairs) if usable else None
            )
        rows.append(row)
    return rows


def table(rows):
    columns = [
        ("storage", "storage", "{}"),
        ("server", "server", "{}"),
        ("iops", "IOPS", "{:.0f}"),
        ("iops_ratio", "x compio", "{:.2f}"),
        ("cpu_us_per_request", "CPU us/request", "{:.2f}"),
        ("cpu_us_per_request_ratio", "x compio", "{:.2f}"),
        ("p99_us", "p99 us", "{:.0f}"),
    ]
    lines = [[title for _, title, _ in columns]]
    lines += [
        ["-" if row[key] is None else form.format(row[key]) for key, _, form in columns] for row in rows
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths))
        )
        for line in lines
    )


def machine():
    text = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")),
        "unknown",
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_1min": os.getloadavg()[0],
    }


def check_tools(arguments):
    tools = ["fio"] + ([] if arguments.no_nbdkit else ["nbdkit"])
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        raise Failure(f"{', '.join(missing)}: not found (apt-get install {' '.join(missing)})")
    for number, option in (
        (arguments.rounds, "--rounds"),
        (arguments.runtime, "--runtime"),
        (arguments.size_mib, "--size-mib"),
    ):
        if number < 1:
            raise Failure(f"{option}: {number} is too small (at least 1)")


def main():
    arguments = parse_arguments()
    try:
        check_tools(arguments)
        header = machine()
        results = []
        with tempfile.TemporaryDirectory(prefix="runtimes-", dir=arguments.directory or HERE) as directory:
            for storage in ["memory", "file"] if arguments.storage == "both" else [arguments.storage]:
                results += compare(storage, Path(directory), arguments)
    except Failure as failure:
        print(f"run.py: {failure}", file=sys.stderr)
        return 1
    rows = summarise(results)
    print(
        f"4 KiB random reads, depth 32, one connection over a Unix socket; medians of {arguments.rounds} interleaved rounds"
    )
    print(
        f"{header['cpu']}, {header['cores']} cores, Linux {header['kernel']}, load {header['load_1min']:.1f} at the start\n"
    )
    print(table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"machine": header, "summary": rows, "measurements": results}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
