"""weir's reports about control groups, compared with the kernel: explain, explain --measure, run
and show.

`explain` lists the I/O that escapes a limit; here the limit is set, the I/O is done, and the device
counts.
"""

import json

import streams
from commands import group, limit, weir
from outcome import fact, least, most, near

MIB = 1 << 20
# Possible leftovers of explain --measure: cgroups, and instances of the tracer.
MADE = "find $cgroups /sys/kernel/tracing/instances -type d"
LIMIT = 4_000_000


class Reports:
    """The cases, on disks that are faster than any limit here; `slow` is for large writes."""

    def __init__(self, disk, slow):
        self.guest = None  # set by the runner
        self.disk = disk
        self.slow = slow
        self.explain = weir("cgroup", "explain", group("a"), "--json")

    def cases(self):
        """Name and function of each case."""
        yield "explain: a limit that covers all writes", self.covered
        yield "explain: a limit that the writes escape", self.escapes
        yield "explain --measure", self.measure
        yield "run: a command with a limit", self.run
        yield "show: counters of a group", self.show

    def limited(self, body, *options, disk=None, finally_=""):
        """Runs a script in parts, with a limit on the writes of group `a`."""
        disk = disk or self.disk
        begin = limit("a", disk, "--bps-write", LIMIT, *options)
        return self.guest.parts(f"{begin}\n{body}", f"{streams.end(disk, ('a',))}\n{finally_}")

    def covered(self):
        """A buffered and a direct writer on ext4: both are found, covered and limited."""
        parts = self.limited(f"""
            {streams.start(self.disk, "cached", ("a",))}
            pause 5
            part report
            {self.explain}
            part window
            {streams.window(self.disk, 6, ("a",))}
        """)
        report, rate = json.loads(parts["report"]), streams.Rates.of(parts["window"]).groups[0]
        alarms = [
            finding
            for finding in report["findings"]
            if finding["coverage"] in ("escapes", "partly")
        ]
        return [
            fact("verdict", report["verdict"] == "covered", report["verdict"], "covered"),
            fact("false alarms", not alarms, str(alarms), "none"),
            near("bytes counted by the device", rate, LIMIT, 0.05),
        ]

    def escapes(self):
        """With data=journal ext4 has no cgroup writeback: all writes escape the limit, and explain
        reports that.
        """
        disk = self.slow
        mount = f"umount /mnt/{disk.name} && mount -t ext4 {{}} /dev/{disk.name} /mnt/{disk.name}"
        body = f"""
            {mount.format("-o data=journal")}
            {streams.start(disk, "cached", ("a",))}
            pause 3
            part report
            {self.explain}
            part window
            {streams.window(disk, 4, ("a",))}
        """
        parts = self.limited(body, disk=disk, finally_=mount.format(""))
        report, rates = json.loads(parts["report"]), streams.Rates.of(parts["window"])
        causes = [(finding["coverage"], finding["cause"]) for finding in report["findings"]]
        expected = "escapes, cause data-journal"
        return [
            fact(
                "verdict",
                report["verdict"] in ("missed", "leaks"),
                report["verdict"],
                "missed, or leaks",
            ),
            fact("cause", ("escapes", "data-journal") in causes, str(causes), expected),
            # Verifies the answer of explain.
            least("bytes written in spite of the limit", rates.disk, 2 * LIMIT),
        ]

    def measure(self):
        """The measurement by explain itself: each path is limited, and the kernel's throttle is
        seen to do it.
        """
        mount = f"/mnt/{self.disk.name}"
        parts = self.limited(
            f"""
                part before
                {MADE}
                ls -A {mount}
                part report
                {self.explain} --measure --directory {mount} --size 32M
                part after
                {MADE}
                ls -A {mount}
            """,
            "--bps-read",
            LIMIT,
        )
        report = json.loads(parts["report"])["measured"]
        paths = {path["path"]: path for path in report["paths"]}
        limited_paths = {name: path for name, path in paths.items() if path["limit-bps"]}
        checks = [
            fact(
                "paths with a limit",
                len(limited_paths) >= 4,
                str(list(paths)),
                "direct and buffered, reads and writes",
            ),
            fact(
                "the kernel's tracepoints are read",
                report["untraced"] is None,
                str(report["untraced"]),
                "no error",
            ),
        ]
        for name, path in limited_paths.items():
            kept = path.get("limit-is")
            checks.append(
                fact(f"{name}: the limit is kept", kept == "kept", str(kept or path), "kept")
            )
            rate = (f"{name}: the rate", path.get("bps", 0))
            # The kernel decides when pages are written back; it may be later than the limit
            # requires.
            checks.append(
                most(*rate, 1.15 * LIMIT, scale=1e6)
                if "buffered" in name
                else near(*rate, LIMIT, 0.15)
            )
        direct = [path for name, path in paths.items() if "direct" in name]
        throttled = [path.get("trace", {}).get("sent-by-throttle-bytes", 0) for path in direct]
        return checks + [
            fact(
                "direct I/O throttled by the kernel",
                all(throttled),
                str(throttled),
                "some bytes for each path",
            ),
            fact("leftovers", parts["after"] == parts["before"], parts["after"], "none"),
        ]

    def run(self):
        """Status, duration and bytes of a command, and the removal of its cgroup."""
        file = f"/mnt/{self.disk.name}/run"
        line = weir(
            "cgroup",
            "run",
            "--device",
            f"/dev/{self.disk.name}",
            "--bps-write",
            "8M",
            "--json",
            "--output",
        )
        parts = self.guest.parts(
            f"""
                status=0
                {line} /tmp/run.json -- \\
                    sh -c 'dd if=/dev/zero of={file} bs=64k count=512 oflag=direct 2>/dev/null; exit 7' || status=$?
                part status
                echo $status
                part report
                cat /tmp/run.json
                part left
                ls -d $cgroups/weir/*/ 2>/dev/null || true
            """,
            f"rm -f {file}",
        )
        report, status, left = (
            json.loads(parts["report"]),
            parts["status"].strip(),
            parts["left"].strip(),
        )
        devices = [device for device in report["devices"] if device["limited"]]
        written = devices[0]["writes"]["bytes"] if devices else 0
        return [
            fact("exit status", status == "7", status, "the command's, 7"),
            near("bytes written", written, 32 * MIB, 0.01, unit="MiB", scale=MIB),
            least("time for 32 MiB at 8 MiB/s", report["wall-ns"], 3.9e9, unit="s", scale=1e9),
            most("time for 32 MiB at 8 MiB/s", report["wall-ns"], 5e9, unit="s", scale=1e9),
            fact("its cgroup is removed", not left, left or "removed", "removed"),
        ]

    def show(self):
        """Bytes counted by the kernel, the limit, and the task that writes."""
        parts = self.limited(f"""
            {streams.start(self.disk, "direct", ("a",))}
            pause 1
            part report
            {weir("cgroup", "show", group("a"), "--tasks", "--json", "--interval", "3s")}
            part counted
            sample {self.disk.name} a
        """)
        report, counted = (
            json.loads(parts["report"]),
            streams.samples(parts["counted"])[-1].groups[0],
        )
        shown = {one["name"]: one for one in report["cgroups"]}.get(
            "/a", {"devices": [], "tasks": []}
        )
        devices = [
            device for device in shown["devices"] if device["name"] == f"/dev/{self.disk.name}"
        ]
        if not devices:
            return [fact("the group and its disk", False, str(report)[:600], "both shown")]
        device, tasks = devices[0], shown["tasks"]
        written = device["writes"]["bytes"]
        return [
            fact(
                "bytes written",
                0 < written <= counted,
                str(written),
                f"some, and not above {counted}",
            ),
            near("rate over 3 s", device["rate"]["writes"]["bps"], LIMIT, 0.08),
            fact(
                "limit",
                device["limits"] == {"bps-write": LIMIT},
                str(device["limits"]),
                f"bps-write {LIMIT}",
            ),
            fact(
                "tasks",
                any(task["name"] == "dd" for task in tasks),
                str(tasks)[:300],
                "dd among them",
            ),
            least(
                "share of the time in which it was throttled",
                shown["waited-share"] or 0.0,
                0.5,
                unit="of the time",
                scale=1,
            ),
        ]
