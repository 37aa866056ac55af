"""Rows for images of a Ceph cluster: weir beside qemu-nbd, both through librbd, and prefetching for
sequential readers.

The cluster is one OSD in memory on this host (scripts/ceph): an OSD costs more than both servers
together, so the comparison covers the overhead of the servers. CPU time excludes librbd's threads,
which are the same in both and are recognized by name.

Without Ceph's packages these rows are omitted; `scripts/deps cluster` installs them.
"""

import os
import subprocess
import tempfile
from pathlib import Path

import loads
import servers
from loads import Load
from qcow2 import bench_sample
from results import Cheaper, Faster
from rows import WEIR, Row

ROOT = Path(__file__).resolve().parent.parent
CEPH = ROOT / "scripts" / "ceph"
QEMU = "qemu-nbd on rbd"
SIZE = 256 << 20
PREFETCH, NONE = "prefetch", "none"
# Names of the servers' own threads: main thread, workers, io_uring's helpers; QEMU's except
# librbd's.
OWN = ("weir", "worker", "qemu-nbd", "iou-", "blocking")


class Cluster:
    """A cluster that lives as long as a row, with one fully written image."""

    def __init__(self, setup):
        self.size_bytes = min(SIZE, setup.size_bytes)

    def __enter__(self):
        self._directory = tempfile.TemporaryDirectory(prefix="weir-bench-ceph.")
        self.config = Path(self._directory.name, "c", "ceph.conf")
        subprocess.run([CEPH, "start", self.config.parent], check=True, stdout=subprocess.DEVNULL)
        self._env = dict(os.environ, CEPH_CONF=str(self.config))
        source = Path(self._directory.name, "source")
        with source.open("wb") as file:
            for _ in range(self.size_bytes >> 20):
                file.write(os.urandom(1 << 20))
        rbd = ["rbd", "import", "--no-progress", source, "rbd/bench"]
        subprocess.run(rbd, check=True, env=self._env)
        source.unlink()
        self.image = f"rbd:rbd/bench:conf={self.config}"
        return self

    def __exit__(self, *_):
        subprocess.run([CEPH, "stop", self.config.parent], check=True)
        self._directory.cleanup()


def own_seconds(pid):
    """CPU time of a process without librbd's threads, from counters in nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            if (task / "comm").read_text().startswith(OWN):
                total += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


def side_by_side(load):
    """weir and qemu-nbd on one image, consecutively, because each locks it."""

    def contenders(setup, stack):
        cluster = stack.enter_context(Cluster(setup))

        def on(argv):
            def sample():
                with servers.Server(argv) as server:
                    where = loads.over_nbd(server.uri)
                    loads.fio(load, where, setup.seconds / 4)
                    before = own_seconds(server.pid)
                    sample = loads.fio(load, where, setup.seconds)
                    sample["cpu_us"] = (own_seconds(server.pid) - before) * 1e6 / sample["requests"]
                    return sample

            return sample

        qemu = ["qemu-nbd", "--persistent", "--shared=8", "--format=raw", "--cache=none", cluster.image]
        weir = [setup.program, "serve", cluster.image, "--format", "raw", "--cache", "none", "--qmp", "none"]
        ours = {WEIR: on(weir)} if setup.program else {}
        return ours | {QEMU: on(qemu)}

    return contenders


def sequential(setup, stack):
    """Sequential reads of 4 KiB, with and without prefetch."""
    cluster = stack.enter_context(Cluster(setup))
    requests = (cluster.size_bytes // 4096 // 4) if setup.seconds >= 1 else 1024

    def on(*options):
        argv = [
            setup.program, "bench", "-f", "raw", "-t", "none", "-c", requests, "-s", 4096, "-S", 4096, "-d", 1,
            *options, cluster.image,
        ]  # fmt: skip
        return lambda: bench_sample(argv, requests)

    return {PREFETCH: on("--prefetch", "auto"), NONE: on()}


def _row(kind, depth):
    return Row(
        f"rbd-{kind}-{depth}",
        f"weir and qemu-nbd on an image of a Ceph cluster, 4 KiB {kind}, depth {depth}; CPU without librbd's threads",
        side_by_side(Load(kind, depth)),
        (Faster(WEIR, 1.0, (QEMU,)), Cheaper(WEIR, 0.8, (QEMU,))),
    )


def _is_there():
    return not subprocess.run([CEPH, "missing"], check=True, stdout=subprocess.PIPE).stdout.strip()


ROWS = (
    *(_row(kind, depth) for kind in ("randread", "randwrite") for depth in (1, 32)),
    Row(
        "rbd-sequential-prefetch",
        "weir bench on an image of a Ceph cluster, sequential reads of 4 KiB, depth 1, with prefetch and without",
        sequential,
        (Faster(PREFETCH, 10.0, (NONE,)),),
        needs_weir=True,
    ),
) if _is_there() else ()
