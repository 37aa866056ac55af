"""The table for readers and the JSON for programs. Both have the host in their header.

Never measures; never drops a row: a failed row is shown with its reason.
"""

import json

MIB = 1 << 20


def kib(value):
    """A size in bytes as KiB."""
    return f"{value / 1024:.1f} KiB"


def mib(value):
    """A size in bytes as MiB."""
    return f"{value / MIB:.1f} MiB"


TITLES = {
    "iops": "IOPS",
    "cpu_us": "CPU/request",
    "p99_us": "p99",
    "p999_us": "p99.9",
    "neighbour": "neighbour",
    "ns": "request",
    "slowest": "slowest",
    "bytes_per_s": "bytes/s",
    "rate": "per second",
    "passed": "of expected",
    "before": "before",
    "after": "after",
    "apart_ms": "99 of 100",
    "start_s": "start",
    "end_s": "end",
    "connect_us": "connection",
    "resident_bytes": "resident",
    "first": "first",
    "second": "second",
    "third": "third",
    "reserved": "reserved",
    "least": "least other",
    "longest_ms": "longest wait",
    "typical_ms": "median wait",
    "small_ms": "4 KiB after",
    "large_ms": "8 MiB after",
    "first_mbps": "first",
    "second_mbps": "second",
    "total_mbps": "total",
    "proportion": "proportion",
    "kept": "kept",
    "target_us": "target",
    "silent_bytes": "silent",
    "idle_bytes": "idle",
    "kept_bytes": "kept",
    "came": "clients",
    "flushes": "flushes/s",
    "cpu_share": "processor",
    "lines": "lines",
    "bps": "bytes",
    "iops_part": "requests",
    "wakes": "wake-ups",
    "bytes": "bytes/request",
    "lost": "lost",
    "ms": "scrape",
    "mib": "page",
    "seconds": "by the clock",
    "gib": "most memory",
    "before_ms": "p99 before",
    "advised_ms": "p99 advised",
    "off": "off prediction",
    "growth": "2nd/1st half",
    "add_us": "CPU/addition",
    "status_us": "CPU/status",
    "disk_bytes": "for a disk",
    "status_s": "CPU/status",
    "cpu_s": "CPU time",
    "tenfold": "10 × disks",
    "server": "server",
    "client_us": "client's CPU",
    "connection_bytes": "for each",
    "change_ms": "median",
    "most_ms": "longest",
    "change_us": "CPU/change",
}
SHOW = {
    "iops": "{:,.0f}".format,
    "cpu_us": "{:.1f} µs".format,
    "p99_us": "{:,.0f} µs".format,
    "p999_us": "{:,.0f} µs".format,
    "neighbour": "{:,.0f}".format,
    "ns": "{:,.0f} ns".format,
    "slowest": "{:.2f} of mean".format,
    "bytes_per_s": lambda value: f"{value / 1e9:.2f} GB/s",
    "rate": "{:,.1f}".format,
    "passed": "{:.1%}".format,
    "before": "{:,.1f}".format,
    "after": "{:,.1f}".format,
    "apart_ms": "{:.2f} ms".format,
    "start_s": "{:.2f} s".format,
    "end_s": "{:.2f} s".format,
    "connect_us": "{:.0f} µs".format,
    "resident_bytes": mib,
    "first": "{:.1%}".format,
    "second": "{:.1%}".format,
    "third": "{:.1%}".format,
    "reserved": "{:,.1f}".format,
    "least": "{:,.1f}".format,
    "longest_ms": "{:,.1f} ms".format,
    "typical_ms": "{:,.1f} ms".format,
    "small_ms": "{:,.1f} ms".format,
    "large_ms": "{:,.1f} ms".format,
    "first_mbps": "{:.2f} MB/s".format,
    "second_mbps": "{:.2f} MB/s".format,
    "total_mbps": "{:.2f} MB/s".format,
    "proportion": "{:.2f}".format,
    "kept": "{:.1%}".format,
    "target_us": "{:,.0f} µs".format,
    "silent_bytes": kib,
    "idle_bytes": kib,
    "kept_bytes": mib,
    "came": "{:,.0f}".format,
    "flushes": "{:,.1f}".format,
    "cpu_share": "{:.1%}".format,
    "lines": "{:,.0f}".format,
    "bps": "{:.2%}".format,
    "iops_part": "{:.2%}".format,
    "wakes": "{:,.0f}".format,
    "bytes": "{:.1f}".format,
    "lost": "{:.2%}".format,
    "ms": "{:.1f} ms".format,
    "mib": "{:.1f} MiB".format,
    "seconds": "{:.1f} s".format,
    "gib": "{:.2f} GiB".format,
    "before_ms": "{:.1f} ms".format,
    "advised_ms": "{:.1f} ms".format,
    "off": "{:.1%}".format,
    "growth": "{:.2f}".format,
    "add_us": "{:,.0f} µs".format,
    "status_us": "{:,.0f} µs".format,
    "disk_bytes": kib,
    "status_s": "{:.2f} s".format,
    "cpu_s": "{:.3f} s".format,
    "tenfold": "× {:.1f}".format,
    "server": "{:.0%}".format,
    "client_us": "{:.1f} µs".format,
    "connection_bytes": kib,
    "change_ms": "{:.3f} ms".format,
    "most_ms": "{:.1f} ms".format,
    "change_us": "{:,.0f} µs".format,
}


def header(machine):
    """The host, one fact per line."""
    width = max(map(len, machine))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in machine.items())


def block(row, results, verdicts):
    """One row: a line for each contender, a line for each target."""
    rounds = len(next(iter(results.samples.values())))
    main = row.columns[0]
    lines = [f"{row.name}: {row.title} (median of {rounds})"]
    lines.append(f"  {'':<20}" + "".join(f"{TITLES[key]:>14}" for key in row.columns) + f"{'spread':>9}")
    for name, samples in results.samples.items():
        cells = "".join(
            f"{SHOW[key](results.median(name, key)) if key in samples[0] else '–':>14}" for key in row.columns
        )
        lines.append(f"  {name:<20}{cells}{results.spread(name, main):>9.0%}")
    for verdict in verdicts:
        mark = "ok  " if verdict.passed else "MISS"
        lines.append(f"  {mark} target {verdict.target}: {verdict.measured}")
    return "\n".join(lines)


def summary(outcomes):
    """A line for each target with its result, and the number of targets met."""
    lines, met, targets = [], 0, 0
    for outcome in outcomes:
        if outcome.failure:
            lines.append(f"FAIL  {outcome.row.name}: {outcome.failure.splitlines()[0]}")
            targets += 1
        for verdict in outcome.verdicts:
            targets += 1
            met += verdict.passed
            mark = "ok  " if verdict.passed else "MISS"
            lines.append(f"{mark}  {outcome.row.name}: {verdict.target}: {verdict.measured}")
    lines.append(f"{met} of {targets} met")
    return "\n".join(lines)


def report_of(verdict):
    """A target and its result, with the keys of the published results."""
    return {"asked": verdict.target, "measured": verdict.measured, "passed": verdict.passed}


def as_json(machine, setup, outcomes):
    """All results including every sample, for later analysis."""
    rows = [
        {
            "name": outcome.row.name,
            "title": outcome.row.title,
            "failure": outcome.failure,
            "samples": outcome.results.samples if outcome.results else {},
            "asked": [report_of(verdict) for verdict in outcome.verdicts],
        }
        for outcome in outcomes
    ]
    how = {"seconds": setup.seconds, "size_bytes": setup.size_bytes}
    return json.dumps({"machine": machine, "setup": how, "rows": rows}, indent=1, ensure_ascii=False)
