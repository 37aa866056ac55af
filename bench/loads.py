"""The clients: fio, nbdcopy and, where those do not reach, `weir bench`; each run once per sample.

Why other people's clients: the numbers must be ones that anybody can repeat without us. Nobody else
has one for vhost-user-blk; weir's is libblkio's driver, and the same for all contenders.

A sample is a dictionary of what one run showed: `iops`, `bytes_per_s` and `requests` of a load,
`bytes_per_s` of a copy. Never starts a server; never compares samples.
"""

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


# Requests of a load whose figures nobody judges, a mebibyte of them at most. Not a time: in any, a
# machine may do nothing at all.
LEAST, FEW = 4, 64
MIB = 1 << 20


class LoadFailed(Exception):
    """A client ended with an error; the text holds its command line and what it said."""


@dataclass(frozen=True)
class Load:
    """A load of fio's; `kind` is its `--rw`: `randread`, `randwrite`, `read`. `free`: the kernel
    chooses where it runs, see `placement`.
    """

    kind: str
    depth: int
    connections: int = 1
    block_bytes: int = 4096
    free: bool = False


def run(argv, timeout_seconds):
    """Runs a client to its end and gives its standard output."""
    argv = [str(word) for word in argv]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise LoadFailed(f"{' '.join(argv)}: not finished within {timeout_seconds:.0f} s") from error
    if done.returncode != 0:
        raise LoadFailed(f"{' '.join(argv)}: status {done.returncode}\n{done.stderr}{done.stdout}")
    return done.stdout


def placement(load):
    """One client with a deep queue stays on the first core, whoever serves it, unless the load is
    `free`; several share all cores with the server.

    Left to the kernel, a virtual machine runs client and server on the same core much of the time
    (an idle virtual core counts as preempted, so a wake-up does not go there). That is what users
    have, so rows that compare servers come in both ways; pinned, a figure says more of the server.
    At depth 1 that one core is where both belong: never both at work, and no wake-up through the
    hypervisor.
    """
    return ["--cpus_allowed=0"] if load.connections == 1 and load.depth > 1 and not load.free else []


def length(load, seconds):
    """The words that make a load of fio's so long; 0 seconds are a few requests, however long those
    take.
    """
    if not seconds:
        return [f"--number_ios={max(LEAST, min(FEW, MIB // load.block_bytes))}"]
    return ["--time_based", f"--runtime={seconds * 1000:.0f}ms"]


def fio_argv(load, where, seconds):
    """fio's command line; `where` names the engine and its target (`over_nbd`, `on_file`)."""
    return [
        "fio", "--name=load", *where, *(placement(load) if seconds else ()), f"--rw={load.kind}",
        f"--bs={load.block_bytes}", f"--iodepth={load.depth}", f"--numjobs={load.connections}", "--group_reporting",
        *length(load, seconds),
        # A map of the blocks already visited costs the client time; random is random enough
        # without.
        "--norandommap",
        # Another sequence each time, or a second sample meets what the first left in some cache.
        "--randrepeat=0",
    ]  # fmt: skip


def over_nbd(uri):
    """fio through NBD: each job is one connection."""
    return ["--ioengine=nbd", f"--uri={uri}"]


def on_file(path):
    """fio on the file itself, bypassing the page cache: what the disk can give with nothing in
    between.
    """
    return ["--ioengine=io_uring", "--direct=1", f"--filename={path}"]


def fio(load, where, seconds):
    """Runs a load and counts what completed."""
    return counted(run([*fio_argv(load, where, seconds), "--output-format=json"], seconds + 300), where[-1])


def counted(out, where):
    """What completed, of fio's JSON or one in its form."""
    job = json.loads(out[out.index("{") :])["jobs"][0]
    both = [job["read"], job["write"]]
    requests = sum(way["total_ios"] for way in both)
    if job["error"] != 0 or requests == 0:
        raise LoadFailed(f"{requests} requests completed, error {job['error']} on {where}")
    return {
        "iops": sum(way["iops"] for way in both),
        "bytes_per_s": sum(way["bw_bytes"] for way in both),
        "requests": requests,
    }


def completions(load, where, seconds):
    """Runs a load and gives the time of every completion, in milliseconds from its start."""
    with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
        logs = ["--disable_clat=1", "--disable_slat=1", f"--write_lat_log={directory}/log"]
        run([*fio_argv(load, where, seconds), *logs], seconds + 300)
        lines = Path(directory, "log_lat.1.log").read_text().splitlines()
    return sorted(int(line.split(",", 1)[0]) for line in lines)


def together(jobs, seconds):
    """Runs several loads at once, begun together; `jobs` are pairs of a load and a URI.

    Gives for each the times of its completions, in milliseconds from its start.
    """
    argv = [
        "fio", "--ioengine=nbd", "--norandommap", "--randrepeat=0", "--disable_clat=1",
        "--disable_slat=1",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
        for number, (load, uri) in enumerate(jobs):
            argv += [
                f"--name=load{number}", f"--uri={uri}", f"--rw={load.kind}", f"--bs={load.block_bytes}",
                f"--iodepth={load.depth}", f"--write_lat_log={directory}/{number}", *length(load, seconds),
            ]  # fmt: skip
        run(argv, seconds + 300)
        # fio counts its jobs through, from one, in the names of their logs.
        logs = [Path(directory, f"{number}_lat.{number + 1}.log") for number in range(len(jobs))]
        return [sorted(int(line.split(",", 1)[0]) for line in log.read_text().splitlines()) for log in logs]


def in_total(jobs, seconds):
    """Runs several loads at once and counts what completed in all: for rates too high to log every
    completion.
    """
    argv = [
        "fio", "--ioengine=nbd", "--norandommap", "--randrepeat=0", "--group_reporting",
        "--output-format=json",
    ]  # fmt: skip
    for number, (load, uri) in enumerate(jobs):
        argv += [f"--name=load{number}", f"--uri={uri}", f"--rw={load.kind}", f"--bs={load.block_bytes}",
                 f"--iodepth={load.depth}", *length(load, seconds)]  # fmt: skip
    out = run(argv, seconds + 300)
    job = json.loads(out[out.index("{") :])["jobs"][0]
    if job["error"] != 0 or job["read"]["total_ios"] == 0:
        raise LoadFailed(f"fio: {job['read']['total_ios']} reads completed, error {job['error']}")
    return {"iops": job["read"]["iops"], "requests": job["read"]["total_ios"]}


def nbdcopy_out(uri, size_bytes, connections=None):
    """Copies the whole export to nowhere, with nbdcopy's own choice of connections unless told."""
    options = [] if connections is None else [f"--connections={connections}"]
    start = time.monotonic()
    run(["nbdcopy", *options, uri, "null:"], 300)
    return {"bytes_per_s": size_bytes / (time.monotonic() - start)}


def fill(uri, path):
    """Copies a file into an export, so that reading it moves data: an untouched export is all
    holes.
    """
    run(["nbdcopy", "--allocated", path, uri], 300)
