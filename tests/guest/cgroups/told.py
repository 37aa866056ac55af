"""What weir tells of control groups, beside what the kernel did: explain, explain --measure, run and show.

Explain says which I/O a limit misses; here the limit is set, the I/O is made, and the device counts.
"""

import json

import streams
from commands import group, limit, unlimit, weir
from outcome import Check, fact, least, most, near

MIB = 1 << 20
# What explain --measure may leave behind: cgroups, and instances of the tracer.
MADE = "find $cgroups /sys/kernel/tracing/instances -type d;"
LIMIT = 4_000_000


class Told:
    """The cases, on one disk that is faster than any limit here, and one without a file system in use."""

    def __init__(self, guest, disk, full):
        self.guest = guest
        self.disk = disk
        self.full = full

    def cases(self):
        """Name and function of each."""
        yield "explain: a limit that covers what is written", self.covered
        yield "explain: a limit that misses what is written", self.escapes
        yield "explain --measure", self.measure
        yield "run: a command with a limit", self.run
        yield "show: what a group has done", self.show

    def explained(self, *words):
        """What explain prints for programs."""
        return json.loads(weir(self.guest, "cgroup", "explain", group("a"), "--json", *words))

    def covered(self):
        """A buffered and a direct writer on ext4, both seen, both covered, both held."""
        guest, disk = self.guest, self.disk
        try:
            limit(guest, "a", disk, "--bps-write", LIMIT)
            guest.run(f"{streams.start(disk, 'cached', ('a',))}\npause 5")
            told = self.explained()
            rate = streams.Rates.of(streams.measure(guest, disk, 6, groups=("a",))).groups[0]
        finally:
            self.clear()
        alarms = [finding for finding in told["findings"] if finding["coverage"] in ("escapes", "partly")]
        return [
            fact("verdict", told["verdict"] == "covered", told["verdict"], "covered"),
            fact("false alarms", not alarms, str(alarms), "none"),
            near("what the device counts", rate, LIMIT, 0.05),
        ]

    def escapes(self):
        """With its data in the journal, ext4 has no cgroup writeback: the limit misses all of it, and explain says so."""
        guest, disk = self.guest, self.disk
        guest.run(f"umount {disk.mount} && mount -t ext4 -o data=journal /dev/{disk.name} {disk.mount}")
        try:
            limit(guest, "a", disk, "--bps-write", LIMIT)
            guest.run(f"{streams.start(disk, 'cached', ('a',))}\npause 3")
            told = self.explained()
            rates = streams.Rates.of(streams.measure(guest, disk, 4, groups=("a",)))
        finally:
            self.clear()
            guest.run(f"umount {disk.mount} && mount -t ext4 /dev/{disk.name} {disk.mount}")
        causes = [(finding["coverage"], finding["cause"]) for finding in told["findings"]]
        return [
            fact("verdict", told["verdict"] in ("missed", "leaks"), told["verdict"], "missed, or leaks"),
            fact("cause", ("escapes", "data-journal") in causes, str(causes), "escapes, as its data is in the journal"),
            # The proof that explain is right.
            least("what the disk takes all the same", rates.disk, 2 * LIMIT),
        ]

    def measure(self):
        """The proof that explain makes itself: each way held to the limit, and seen to be held by the kernel's throttle."""
        guest, disk = self.guest, self.disk
        before = guest.run(f"{MADE} ls -A {disk.mount}")
        try:
            limit(guest, "a", disk, "--bps-write", LIMIT, "--bps-read", LIMIT)
            told = self.explained("--measure", "--directory", disk.mount, "--size", "32M")["measured"]
            after = guest.run(f"{MADE} ls -A {disk.mount}")
        finally:
            self.clear()
        ways = {way["path"]: way for way in told["paths"]}
        held = [name for name, way in ways.items() if way["limit-bps"]]
        checks = [
            fact("ways with a limit", len(held) >= 4, str(list(ways)), "direct and buffered, reads and writes"),
            fact("the kernel's tracepoints", told["untraced"] is None, str(told["untraced"]), "read"),
        ]
        for name in held:
            way = ways[name]
            # On a machine that does other work too a way may be slower than the limit, but never faster.
            right = ("kept",) if self.full else ("kept", "not reached")
            checks.append(Check(f"{name}: the limit is", way.get("limit-is") in right, str(way.get("limit-is") or way), " or ".join(right)))
            rate = way.get("bps", 0)
            if self.full:
                checks.append(near(f"{name}: the rate", rate, LIMIT, 0.15))
            else:
                checks.append(most(f"{name}: the rate", rate, 1.15 * LIMIT, scale=1e6))
        throttled = [way.get("trace", {}).get("sent-by-throttle-bytes", 0) for name, way in ways.items() if "direct" in name]
        checks.append(fact("direct I/O held by the throttle", all(throttled), str(throttled), "bytes of each way"))
        checks.append(fact("what it made", after == before, after, "gone"))
        return checks

    def run(self):
        """A command's status, its time, its bytes, and that its cgroup is gone."""
        guest, disk = self.guest, self.disk
        file = f"{disk.mount}/run"
        output, status = guest.run_status(f"""
            weir cgroup run --device /dev/{disk.name} --bps-write 8M --json --output /tmp/run.json -- \\
                sh -c 'dd if=/dev/zero of={file} bs=64k count=512 oflag=direct 2>/dev/null; exit 7'
            status=$?
            cat /tmp/run.json
            ls -d $cgroups/weir/*/ 2>/dev/null
            rm -f {file}
            exit $status
        """)
        told = json.loads(output.splitlines()[0]) if output.startswith("{") else {}
        devices = [device for device in told.get("devices", []) if device["limited"]]
        written = devices[0]["writes"]["bytes"] if devices else 0
        return [
            fact("exit status", status == 7, f"{status}: {output[-300:]}" if status != 7 else "7", "the command's, 7"),
            near("bytes written", written, 32 * MIB, 0.01, unit="MiB", scale=MIB),
            # To start three programs takes the emulated processor a tenth of that.
            least("time for 32 MiB at 8 MiB/s", told.get("wall-ns", 0), 3.9e9, unit="s", scale=1e9),
            most("the same", told.get("wall-ns", 1e12), 5e9 if self.full else 10e9, unit="s", scale=1e9),
            fact("its cgroup", len(output.splitlines()) == 1, output[-200:] if len(output.splitlines()) != 1 else "gone", "gone"),
        ]

    def show(self):
        """Bytes as the kernel counts them, the limit, and the task that writes."""
        guest, disk = self.guest, self.disk
        try:
            limit(guest, "a", disk, "--bps-write", LIMIT)
            guest.run(f"{streams.start(disk, 'direct', ('a',))}\npause 1")
            told = json.loads(weir(guest, "cgroup", "show", group("a"), "--tasks", "--json", "--interval", "3s"))
            guest.run("kill_group a")
            counted = streams.measure(guest, disk, 0, groups=("a",))[-1].groups[0]
        finally:
            self.clear()
        shown = {one["name"]: one for one in told["cgroups"]}.get("/a", {"devices": [], "tasks": []})
        devices = [device for device in shown["devices"] if device["name"] == f"/dev/{disk.name}"]
        if not devices:
            return [fact("the group and its disk", False, str(told)[:600], "both shown")]
        device = devices[0]
        return [
            fact("bytes written", 0 < device["writes"]["bytes"] <= counted, str(device["writes"]["bytes"]), f"some, and not above {counted}"),
            near("rate over 3 s", device["rate"]["writes"]["bps"], LIMIT, 0.08),
            fact("limit", device["limits"] == {"bps-write": LIMIT}, str(device["limits"]), f"bps-write {LIMIT}"),
            fact("tasks", any(task["name"] == "dd" for task in shown["tasks"]), str(shown["tasks"])[:300], "dd among them"),
            least("share of the time it waited", shown["waited-share"] or 0.0, 0.5, unit="of the time", scale=1),
        ]

    def clear(self):
        """Ends what runs, and removes the limits."""
        self.guest.run("kill_group a")
        unlimit(self.guest, self.disk, "a")
        streams.stop(self.guest, self.disk, ("a",))
