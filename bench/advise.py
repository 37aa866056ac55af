"""Speed of `weir advise`, and accuracy of its predictions and of the page's preview.

Speed: a day's trace in Alibaba's format, twenty million requests of three hundred volumes, some of
which are always busy, some by day and some in bursts; from the text to limits, bursts and intervals
for all of them, on one core.

Prediction: two clients on an imitated device, one of which sends bursts; a recording of them;
advice for the quiet one; the printed commands are executed; and the same two clients run again.
Both send at fixed times, regardless of earlier completions, and less than the device can serve, so
the demand is the same with and without a limit. A client with a fixed number of requests in flight
on a saturated device would be no test of a prediction: its demand follows the limit, and the length
of the queue has no steady value.

Preview: a client with a fixed number of requests in flight at one limit; the page's preview of
lower and higher limits; then those limits are set, and the client's own figures are compared.

Never compares with another program: none recommends limits.
"""

import http.client
import json
import math
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import groups
import nbd
import servers
from loads import LoadFailed
from results import AtMost, MedianAtMost
from rows import WEIR, Row

# The project's target for a day, on one core.
SECONDS, GIB = 60, 1
REQUESTS, VOLUMES, DAY_SECONDS = 20_000_000, 300, 86_400
LENGTHS = (4096,) * 10 + (8192, 16_384, 32_768, 65_536, 262_144)
# A device with this many requests a second, a fifth of which the quiet client uses; the second
# client sends a burst of this size in one of ten tenths of a second, over two connections.
DEVICE, QUIET, BURST, CONNECTIONS = 2000, 400, 150, 2
KEEP_MS = 20
PREDICTED = 0.15
# A client with this many requests in flight on a device with a latency of a millisecond, at one
# limit and then at others.
DEPTH, DELAY, AT, TO = 32, "read=1ms", 2000, (500, 1000, 4000)
PREVIEWED = 0.10
# Maximum delay until a recording thread has written everything.
RECORDED_SECONDS = 1.2
TOKEN = "0123456789abcdef0123456789abcdef"


def weights(second):
    """Relative demand of each volume in a second."""
    hour = 1 + math.sin(2 * math.pi * second / DAY_SECONDS)
    for volume in range(VOLUMES):
        weight = 1 / (volume + 3)
        if volume % 3 == 1:
            weight *= hour
        # A burst of ten seconds, about forty times a day.
        if volume % 3 == 2:
            weight *= 20 if (second // 10 + volume * 37) % 211 == 0 else 0.3
        yield weight


def write_day(path, requests):
    """Writes this many requests of a day; the file is deterministic and kept between runs."""
    if path.exists():
        return
    draw, unfinished = random.Random(7), path.with_suffix(".new")
    with open(unfinished, "w", encoding="ascii") as file:
        written, cumulated = 0, []
        for second in range(DAY_SECONDS):
            if second % 10 == 0:
                cumulated, total = [], 0.0
                for weight in weights(second):
                    total += weight
                    cumulated.append(total)
            count = requests * (second + 1) // DAY_SECONDS - written
            written += count
            volumes = draw.choices(range(VOLUMES), cum_weights=cumulated, k=count)
            times = sorted(int(draw.random() * 1_000_000) for _ in range(count))
            base = 1_577_808_000_000_000 + second * 1_000_000
            file.writelines(
                f"{volume},{'R' if at & 3 == 0 else 'W'},{at * 4096},{LENGTHS[at % 15]},{base + at}\n"
                for volume, at in zip(volumes, times, strict=True)
            )
    unfinished.rename(path)


def contenders(setup, _stack):
    """The program alone, on one CPU."""
    requests = REQUESTS if setup.seconds >= 1 else 20_000
    trace = setup.disk.parent / f"advise-{requests}.csv"
    write_day(trace, requests)
    argv = [setup.program, "advise", trace, "--json"]

    def sample():
        cpu = min(os.sched_getaffinity(0))
        start = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(["taskset", "-c", str(cpu), *argv], stdout=output)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            elapsed = time.monotonic() - start
            output.seek(0)
            tenants = json.load(output)["tenants"]
        # Status 1: no limit meets the target for some volumes, which is a valid answer.
        if process.returncode not in (0, 1) or sum(tenant["requests"] for tenant in tenants) != requests:
            raise LoadFailed(f"weir advise ended with {process.returncode}")
        return {"seconds": elapsed, "gib": usage.ru_maxrss / (1 << 20)}

    return {WEIR: sample}


def json_of(setup, uri, rate, seconds):
    """A client with this rate of requests; returns the percentiles of its latency."""
    argv = [setup.program, "bench", uri, "--rate-iops", str(rate), "--runtime", f"{seconds}s", "-d", "64", "--json"]
    argv += ["--random", "-s", "4096"]
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LoadFailed(done.stderr.strip())
    return json.loads(done.stdout)


def bursts(uri, seconds):
    """A part of the noisy client, deterministic."""
    connection, draw, failed = nbd.NBD(), random.Random(5), []
    connection.connect_uri(uri)

    def ended(error):
        failed.extend([error.value] if error.value else [])
        return 1

    start = time.monotonic()
    for tick in range(10 * seconds):
        while (left := start + tick / 10 - time.monotonic()) > 0:
            connection.poll(math.ceil(left * 1000))
        if draw.random() < 0.1:
            for _ in range(BURST // CONNECTIONS):
                connection.aio_pread(nbd.Buffer(4096), draw.randrange(1 << 18) * 4096, completion=ended)
    while connection.aio_in_flight() > 0:
        connection.poll(-1)
    connection.shutdown()
    if failed:
        raise LoadFailed(f"{len(failed)} reads failed")


def both(setup, daemon, seconds):
    """The figures of the quiet client, beside the noisy one."""
    with ThreadPoolExecutor() as pool:
        noisy = [pool.submit(bursts, daemon.uri_of("noisy"), seconds) for _ in range(CONNECTIONS)]
        quiet = json_of(setup, daemon.uri_of("quiet"), QUIET, seconds)
        for part in noisy:
            part.result()
    return quiet


def run_command(argv, environment=None):
    """Runs a command; fails unless it succeeds."""
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LoadFailed(f"{argv[-1]}: {done.stderr.strip()}")


def p99_ns(report):
    """99th percentile of a client's read latency."""
    return report["jobs"][0]["read"]["clat_ns"]["percentile"]["99.000000"]


def config():
    """Two null disks on one imitated device."""
    rate = f"iops={DEVICE},shared=device"
    return "\n".join(
        groups.table(f"disk.{name}", {"image": groups.NULL, "rate": rate}) for name in ("quiet", "noisy")
    )


def recorded(setup, daemon, qmp, path, seconds):
    """Runs and records both clients; returns the figures of the quiet one."""
    argv = [setup.program, "record", "--qmp", qmp, "--output", path]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    if not (line := process.stderr.readline()).startswith("weir: recording to "):
        raise LoadFailed(f"weir record does not record: {line.strip()}")
    try:
        return both(setup, daemon, seconds)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


def predicting(setup, _stack):
    """Latency of the quiet client under the advised limits, beside the predicted one."""
    seconds = max(1, round(setup.seconds * 2))

    def sample():
        with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
            with groups.weir_from(setup.program, config()) as daemon:
                # The monitor's socket exists once a client has been greeted.
                run_command(["nbdinfo", "--size", daemon.uri_of("quiet")])
                qmp = f"unix:{daemon._monitor_path}"
                path = Path(directory, "both.recording")
                before = p99_ns(recorded(setup, daemon, qmp, path, seconds))
                argv = [setup.program, "advise", path, "--rate", f"iops={DEVICE},shared=device"]
                argv += ["--for", "quiet", "--keep", f"p99={KEEP_MS}ms", "--json"]
                done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
                if not done.stdout:
                    raise LoadFailed(done.stderr.strip())
                report = json.loads(done.stdout)
                (quiet,) = (tenant for tenant in report["tenants"] if tenant["name"] == "quiet")
                predicted = quiet["after"]["latency-ns"]
                environment = os.environ | {"WEIR_QMP": qmp}
                environment["PATH"] = f"{Path(setup.program).parent}:{environment['PATH']}"
                for command in report["commands"]:
                    run_command(["sh", "-ec", command], environment)
                after = p99_ns(both(setup, daemon, seconds))
        return {"before_ms": before / 1e6, "advised_ms": after / 1e6, "off": abs(after / predicted - 1)}

    return {WEIR: sample}


class Page(http.client.HTTPConnection):
    """A connection to the Unix socket of a daemon's page."""

    def __init__(self, path):
        super().__init__("localhost")
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))

    def json_of(self, method, path, body=None):
        """Sends a request with the token; returns the response. A body is sent only if the daemon
        reads it: an unread one would reset the connection before the response is read.
        """
        content = None if body is None else json.dumps(body)
        self.request(method, path, content, {"Authorization": f"Bearer {TOKEN}"})
        answer = self.getresponse()
        content = json.loads(answer.read())
        if answer.status != 200:
            raise servers.ServerFailed(f"{path}: {answer.status}, {content}")
        return content


class Shown(groups.Daemon):
    """A slow disk with a limit, and its page."""

    def __init__(self, program):
        def command(directory, monitor):
            self.page, token = directory / "page.sock", directory / "token"
            token.write_text(TOKEN)
            token.chmod(0o600)
            options = ["--delay", DELAY, "--iops-total", AT, "--qmp", f"unix:{monitor}"]
            options += ["--http", f"unix:{self.page}", "--http-token-file", token]
            return servers.weir(program, groups.NULL, *options)

        super().__init__(command)


def use_at_depth(setup, uri, seconds):
    """A client with many requests in flight; returns its rate and latency."""
    argv = [setup.program, "bench", uri, "-d", DEPTH, "--random", "-s", "4096", "--json"]
    argv += ["--ramp-time", "1s", "--runtime", f"{seconds}s"]
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LoadFailed(done.stderr.strip())
    read = json.loads(done.stdout)["jobs"][0]["read"]
    percentiles = read["clat_ns"]["percentile"]
    return [read["iops"], percentiles["50.000000"], percentiles["99.000000"]]


def previewing(setup, _stack):
    """The page's preview of other limits, beside a client's figures under them."""
    seconds = max(1, round(setup.seconds * 2))

    def sample():
        figures = {}
        for to in TO:
            with Shown(setup.program) as daemon:
                use_at_depth(setup, daemon.uri, seconds)
                page, disk = Page(daemon.page), "/api/v1/disks/"
                # Recent requests are recorded with a delay.
                time.sleep(RECORDED_SECONDS)
                (only,) = page.json_of("GET", "/api/v1/overview")["disks"]
                disk += only["name"]
                preview = page.json_of("POST", f"{disk}/preview", {"iops-total": to})["then"]
                page.json_of("PATCH", f"{disk}/limits", {"iops-total": to})
                page.close()
                measured = use_at_depth(setup, daemon.uri, seconds)
            predicted = [preview[key] for key in ("iops", "latency-p50-ns", "latency-p99-ns")]
            figures[f"off_{to}"] = max(
                abs(measured / predicted - 1)
                for measured, predicted in zip(measured, predicted, strict=True)
            )
        return figures | {"off": max(figures.values())}

    return {WEIR: sample}


ROWS = (
    Row(
        "advise-speed",
        f"weir advise, a day of {REQUESTS:,} requests of {VOLUMES} volumes, one core",
        contenders,
        (AtMost(SECONDS, "seconds", "{:.0f} s".format), AtMost(GIB, "gib", "{:.2f} GiB".format)),
        columns=("seconds", "gib"),
        needs_weir=True,
        rounds_factor=0.2,
    ),
    Row(
        "advise-predicts",
        "a quiet client's p99 with the advised limit of its noisy neighbour, beside the prediction",
        predicting,
        (MedianAtMost(PREDICTED, "off", "{:.0%}".format),),
        columns=("before_ms", "advised_ms", "off"),
        needs_weir=True,
        rounds_factor=0.6,
    ),
    Row(
        "preview-predicts",
        f"rate, p50 and p99 at {DEPTH} in flight after a change of {AT} IOPS, beside the preview of it",
        previewing,
        (MedianAtMost(PREVIEWED, "off", "{:.1%}".format),),
        columns=("off",),
        needs_weir=True,
        rounds_factor=0.6,
    ),
)
