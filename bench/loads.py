"""The clients: fio, nbdcopy and, where those lack support, `weir bench`; each runs once per sample.

Independent clients, so that the figures can be repeated without weir. There is none for
vhost-user-blk; weir's uses libblkio's driver, and is the same for all contenders.

A sample is a dictionary with the results of one run: `iops`, `bytes_per_s`, `requests`, `p99_us`
and `p999_us` of a load, `bytes_per_s` of a copy. Never starts a server; never compares samples.
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path


# Number of requests of a load whose figures are not judged, at most a mebibyte in total. Not a
# duration: a stalled host may complete nothing in any period.
LEAST, FEW = 4, 64
MIB = 1 << 20
# Start of concurrent loads that is not measured.
RAMP_MS = 500
# Percentiles of latencies, with their names in fio's JSON.
PERCENTILES = {"p99_us": "99.000000", "p999_us": "99.900000"}


class LoadFailed(Exception):
    """A client ended with an error; the text contains its command line and output."""


@dataclass(frozen=True)
class Load:
    """A load of fio; `kind` is its `--rw`: `randread`, `randwrite`, `read`. `free`: the kernel
    places the client, see `placement`.
    """

    kind: str
    depth: int
    connections: int = 1
    block_bytes: int = 4096
    free: bool = False


def run(argv, timeout_seconds):
    """Runs a client to its end; returns its standard output."""
    argv = [str(word) for word in argv]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise LoadFailed(f"{' '.join(argv)}: not finished within {timeout_seconds:.0f} s") from error
    if done.returncode != 0:
        raise LoadFailed(f"{' '.join(argv)}: status {done.returncode}\n{done.stderr}{done.stdout}")
    return done.stdout


def run_counted(argv, timeout_seconds):
    """Runs a client to its end; returns its duration in seconds, and its usage of resources, as of
    getrusage(2).
    """
    argv = [str(word) for word in argv]
    with tempfile.TemporaryFile() as output:
        start = time.monotonic()
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        # os.wait4 has no timeout.
        timer = threading.Timer(timeout_seconds, process.kill)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
            elapsed = time.monotonic() - start
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            timer.cancel()
            # Only if the wait was interrupted.
            process.kill()
            process.wait()
        if process.returncode != 0:
            output.seek(0)
            text = output.read().decode(errors="replace")
            raise LoadFailed(f"{' '.join(argv)}: status {process.returncode}\n{text}")
    return elapsed, usage


def placement(load):
    """A single client with a deep queue runs on the first core, with any server, unless the load is
    `free`; several clients share all cores with the server.

    Left to the kernel, a virtual machine runs client and server on the same core much of the time
    (an idle virtual core counts as preempted, so a wake-up does not go there). Users have that
    placement, so rows that compare servers have both; pinned, a figure says more about the server.
    At depth 1 both belong on one core: they never run at the same time, and no wake-up goes through
    the hypervisor.
    """
    return ["--cpus_allowed=0"] if load.connections == 1 and load.depth > 1 and not load.free else []


def length(load, seconds):
    """fio's arguments for the duration of a load; 0 seconds mean a few requests."""
    if not seconds:
        return [f"--number_ios={max(LEAST, min(FEW, MIB // load.block_bytes))}"]
    return ["--time_based", f"--runtime={seconds * 1000:.0f}ms"]


def fio_argv(load, where, seconds):
    """fio's command line; `where` is the engine and its target (`over_nbd`, `on_file`)."""
    return [
        "fio", "--name=load", *where, *(placement(load) if seconds else ()), f"--rw={load.kind}",
        f"--bs={load.block_bytes}", f"--iodepth={load.depth}", f"--numjobs={load.connections}", "--group_reporting",
        *length(load, seconds),
        # A map of visited blocks costs the client time; without it offsets are random enough.
        "--norandommap",
        # A new sequence each time; otherwise a second sample would find the data of the first in a
        # cache.
        "--randrepeat=0",
    ]  # fmt: skip


def over_nbd(uri):
    """fio over NBD: each job is one connection."""
    return ["--ioengine=nbd", f"--uri={uri}"]


def on_file(path):
    """fio on the file itself, past the page cache: the limit of the disk."""
    return ["--ioengine=io_uring", "--direct=1", f"--filename={path}"]


def fio(load, where, seconds):
    """Runs a load; returns counts of its completions."""
    return counted(run([*fio_argv(load, where, seconds), "--output-format=json"], seconds + 300), where[-1])


def jobs_of(out):
    """The jobs in fio's JSON, which warnings may precede."""
    return json.loads(out[out.index("{") :])["jobs"]


def counted(out, where):
    """Counts and latencies from fio's JSON, or JSON of the same form."""
    return figures_of(jobs_of(out)[0], where)


def figures_of(job, where):
    """Counts of one of fio's jobs, and its latencies if it has only reads or only writes."""
    both = [job["read"], job["write"]]
    requests = sum(way["total_ios"] for way in both)
    if job["error"] != 0 or requests == 0:
        raise LoadFailed(f"{requests} requests completed, error {job['error']} on {where}")
    counts = {
        "iops": sum(way["iops"] for way in both),
        "bytes_per_s": sum(way["bw_bytes"] for way in both),
        "requests": requests,
    }
    used = [way for way in both if way["total_ios"]]
    return counts | (latencies(used[0]) if len(used) == 1 else {})


def latencies(way):
    """The percentiles of one direction of a job, in microseconds."""
    values = way["clat_ns"].get("percentile", {})
    return {name: values[key] / 1000 for name, key in PERCENTILES.items() if key in values}


def completions(load, where, seconds):
    """Runs a load; returns the time of every completion, in milliseconds from its start."""
    with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
        logs = ["--disable_clat=1", "--disable_slat=1", f"--write_lat_log={directory}/log"]
        run([*fio_argv(load, where, seconds), *logs], seconds + 300)
        lines = Path(directory, "log_lat.1.log").read_text().splitlines()
    return sorted(int(line.split(",", 1)[0]) for line in lines)


def together(jobs, seconds):
    """Runs several loads concurrently, started together; `jobs` are pairs of a load and a URI.

    Returns for each the times of its completions, in milliseconds from its start.
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
        # fio numbers its jobs, from one, in the names of their logs.
        logs = [Path(directory, f"{number}_lat.{number + 1}.log") for number in range(len(jobs))]
        return [sorted(int(line.split(",", 1)[0]) for line in log.read_text().splitlines()) for log in logs]


def in_total(jobs, seconds):
    """Runs several loads concurrently and counts all completions: for rates that are too high to
    log every completion.
    """
    argv = [
        "fio", "--ioengine=nbd", "--norandommap", "--randrepeat=0", "--group_reporting",
        "--output-format=json",
    ]  # fmt: skip
    for number, (load, uri) in enumerate(jobs):
        argv += [f"--name=load{number}", f"--uri={uri}", f"--rw={load.kind}", f"--bs={load.block_bytes}",
                 f"--iodepth={load.depth}", *length(load, seconds)]  # fmt: skip
    job = jobs_of(run(argv, seconds + 300))[0]
    if job["error"] != 0 or job["read"]["total_ios"] == 0:
        raise LoadFailed(f"fio: {job['read']['total_ios']} reads completed, error {job['error']}")
    return {"iops": job["read"]["iops"], "requests": job["read"]["total_ios"]}


def each(jobs, seconds):
    """Runs several loads concurrently, started together; `jobs` are pairs of a load and its target
    (`over_nbd`, `on_file`). Returns the figures of each, without those of the first half second,
    when connections and bursts of limits are new.
    """
    argv = ["fio", "--norandommap", "--randrepeat=0", "--output-format=json"]
    argv += [f"--ramp_time={RAMP_MS}ms"] if seconds else []
    for number, (load, where) in enumerate(jobs):
        argv += [f"--name=load{number}", *where, f"--rw={load.kind}", f"--bs={load.block_bytes}",
                 f"--iodepth={load.depth}", *length(load, seconds)]  # fmt: skip
    out = run(argv, seconds + 300)
    return [figures_of(job, where[-1]) for job, (_, where) in zip(jobs_of(out), jobs, strict=True)]


def nbdcopy_out(uri, size_bytes, connections=None):
    """Copies the whole export to nowhere, by default with nbdcopy's own number of connections."""
    options = [] if connections is None else [f"--connections={connections}"]
    start = time.monotonic()
    run(["nbdcopy", *options, uri, "null:"], 300)
    return {"bytes_per_s": size_bytes / (time.monotonic() - start)}


def fill(uri, path):
    """Copies a file into an export, so that reads transfer data: a new export consists of holes."""
    run(["nbdcopy", "--allocated", path, uri], 300)
