"""How fast `weir advise` is, and whether what it predicts is what clients then feel.

Speed: the trace of a day in the format of Alibaba's, twenty million requests of three hundred
volumes, of which some are always busy, some by day and some in bursts; from its text to limits,
bursts and intervals for all of them, on one core.

Prediction: two clients on an imitated device, recorded; advice for the quiet one; what it tells to
type, typed; and the same two clients again. They ask when their time has come, whatever became of
what they asked before, so they ask for the same with a limit as without one.

Never compares with another program: none looks for limits.
"""

import json
import math
import os
import random
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import groups
import servers
from groups import Disk
from loads import LoadFailed
from results import AtMost
from rows import WEIR, Row

# What the project promises of a day, on one core.
SECONDS, GIB = 60, 1
REQUESTS, VOLUMES, DAY_SECONDS = 20_000_000, 300, 86_400
LENGTHS = (4096,) * 10 + (8192, 16_384, 32_768, 65_536, 262_144)
# A device of so many requests a second, of which the quiet client wants a twentieth.
DEVICE, QUIET, NOISY = 2000, 100, 2100
KEEP_MS = 20
PREDICTED = 0.15


def weights(second):
    """How much each volume asks for in a second, beside the others."""
    hour = 1 + math.sin(2 * math.pi * second / DAY_SECONDS)
    for volume in range(VOLUMES):
        weight = 1 / (volume + 3)
        if volume % 3 == 1:
            weight *= hour
        # A burst of ten seconds, some forty times a day.
        if volume % 3 == 2:
            weight *= 20 if (second // 10 + volume * 37) % 211 == 0 else 0.3
        yield weight


def write_day(path, requests):
    """So many requests of a day; kept between runs, since they are the same each time."""
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
        with tempfile.TemporaryFile() as told:
            process = subprocess.Popen(["taskset", "-c", str(cpu), *argv], stdout=told)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            elapsed = time.monotonic() - start
            told.seek(0)
            tenants = json.load(told)["tenants"]
        # 1: no limit keeps the target for some of them, which is an answer too.
        if process.returncode not in (0, 1) or sum(tenant["requests"] for tenant in tenants) != requests:
            raise LoadFailed(f"weir advise ended with {process.returncode}")
        return {"seconds": elapsed, "gib": usage.ru_maxrss / (1 << 20)}

    return {WEIR: sample}


def ask(setup, uri, rate, seconds):
    """A client that asks so many times a second; the percentiles of its latency."""
    argv = [setup.program, "bench", uri, "--rate-iops", str(rate), "--runtime", f"{seconds}s", "-d", "64", "--json"]
    argv += ["--random", "-s", "4096"]
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LoadFailed(done.stderr.strip())
    return json.loads(done.stdout)


def both(setup, daemon, seconds):
    """The quiet client's answer, beside the noisy one."""
    with ThreadPoolExecutor() as pool:
        noisy = pool.submit(ask, setup, daemon.uri_of("noisy"), NOISY, seconds)
        quiet = ask(setup, daemon.uri_of("quiet"), QUIET, seconds)
        noisy.result()
    return quiet


def p99_ns(told):
    """Of a client's answer."""
    return told["jobs"][0]["read"]["clat_ns"]["percentile"]["99.000000"]


def config():
    """Two disks of nothing on one imitated device."""
    rate = f"iops={DEVICE},shared=device"
    return "\n".join(
        groups.table(f"disk.{name}", {"image": groups.NULL, "rate": rate}) for name in ("quiet", "noisy")
    )


def recorded(setup, daemon, qmp, path, seconds):
    """Both clients, and a recording of them; the quiet one's answer."""
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
    """What the quiet client feels, with what advice has told to type, beside what it has told."""
    seconds = max(1, round(setup.seconds * 2))

    def sample():
        with tempfile.TemporaryDirectory(prefix="weir-bench.") as directory:
            with groups.weir_from(setup.program, config()) as daemon:
                # The monitor is there once a client has been greeted.
                subprocess.run(["nbdinfo", "--size", daemon.uri_of("quiet")], check=True, capture_output=True)
                qmp = f"unix:{daemon._monitor_path}"
                path = Path(directory, "both.recording")
                before = p99_ns(recorded(setup, daemon, qmp, path, seconds))
                argv = [setup.program, "advise", path, "--rate", f"iops={DEVICE},shared=device"]
                argv += ["--for", "quiet", "--keep", f"p99={KEEP_MS}ms", "--json"]
                done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
                if not done.stdout:
                    raise LoadFailed(done.stderr.strip())
                told = json.loads(done.stdout)
                (quiet,) = (tenant for tenant in told["tenants"] if tenant["name"] == "quiet")
                predicted = quiet["after"]["latency-ns"]
                environment = os.environ | {"WEIR_QMP": qmp}
                environment["PATH"] = f"{Path(setup.program).parent}:{environment['PATH']}"
                for command in told["commands"]:
                    subprocess.run(["sh", "-ec", command], env=environment, check=True, capture_output=True)
                after = p99_ns(both(setup, daemon, seconds))
        return {"before_ms": before / 1e6, "advised_ms": after / 1e6, "off": abs(after / predicted - 1)}

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
        "a quiet client's p99 with the advised limit of its noisy neighbour, beside what was predicted",
        predicting,
        (AtMost(PREDICTED, "off", "{:.0%}".format),),
        columns=("before_ms", "advised_ms", "off"),
        needs_weir=True,
        rounds_factor=0.6,
    ),
)
