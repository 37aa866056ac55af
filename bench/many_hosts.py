"""The row that asks what a group's limits over many hosts cost on the way of a request: the same
disk in a group of this host alone, and in one that is divided by etcd.

Why in memory: no request is shorter, so nothing hides what is added to one. The limit is far above
what the disk can do, and etcd has one member: both idle but for the reports of a host.

Never judges how the limit is divided: that is for `bench/hosts.py`.
"""

import tempfile
from pathlib import Path

import etcd
import groups
import loads
import rows
from loads import Load
from results import Faster
from rows import Row

LOAD = Load("randread", 32)
HERE, MANY = "weir, a group of one host", "weir, a group of many hosts"
DISK, LIMIT, KEPT = "vm1", {"iops-total": 10_000_000}, 0.99


def divided(setup, members, state):
    """The text of a config file with a disk in a group that `members` of etcd divide. `state` is an
    empty directory: limits that an earlier run was told would be written to this etcd.
    """
    tables = {
        "daemon": {"state": str(state)},
        "cluster": {"name": "bench", "host": "one", "etcd": members.urls()[0]},
        f"group.{groups.GROUP}": {"cluster": True},
        f"disk.{DISK}": {"image": f"memory:{setup.size_bytes}", "group": groups.GROUP},
    }
    return "\n".join(groups.table(title, keys) for title, keys in tables.items())


def cost(setup, stack):
    """Both daemons, filled, the second with its part of the limit."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-bench.")))
    members = etcd.Etcd(directory, stack, members=1)
    members.wait()
    image, disks = f"memory:{setup.size_bytes}", [groups.Disk(DISK)]
    here = stack.enter_context(groups.weir(setup.program, LIMIT, disks, image))
    config = divided(setup, members, directory / "state")
    many = stack.enter_context(groups.weir_from(setup.program, config))
    for daemon in (here, many):
        daemon.uri = daemon.uri_of(DISK)
        loads.fill(daemon.uri, setup.disk)
    monitor = stack.enter_context(many.monitor())
    status = lambda: monitor.run("x-weir-query-status")  # noqa: E731
    etcd.until("somebody leads", lambda: status()["cluster"].get("leader"))
    monitor.run("x-weir-cluster-set", group=groups.GROUP, **LIMIT)
    # What nobody wants is divided: nearly all of it is this host's, as long as it answers.
    part = lambda: status()["groups"][0]["limits"].get("iops-total", 0)  # noqa: E731
    etcd.until("the limit is divided", lambda: part() > 0.9 * LIMIT["iops-total"])
    return {
        HERE: lambda: rows.under_load(here, LOAD, setup.seconds),
        MANY: lambda: rows.under_load(many, LOAD, setup.seconds),
    }


ROWS = (
    Row(
        "many-hosts",
        "4 KiB randread, depth 32, one connection, memory: a limit over many hosts, never reached",
        cost,
        (Faster(MANY, KEPT, (HERE,)),),
        needs_weir=True,
        # One percent is below this machine's noise: more pairs.
        rounds_factor=3,
    ),
)
