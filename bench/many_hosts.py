"""Row for the cost of cluster-wide limits in the path of a request: the same disk in a group of
this host, and in a group whose limit is divided over etcd.

In memory, where requests are shortest and no overhead is hidden. The limit is far above the disk's
speed, and etcd has one member: both are idle except for a host's reports.

Never judges the division of the limit: that is in `bench/hosts.py`.
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
    """A config file with a disk in a cluster-wide group over `members` of etcd. `state` must be
    empty: limits of an earlier run would be written to this etcd.
    """
    tables = {
        "daemon": {"state": str(state)},
        "cluster": {"name": "bench", "host": "one", "etcd": members.urls()[0]},
        f"group.{groups.GROUP}": {"cluster": True},
        f"disk.{DISK}": {"image": f"memory:{setup.size_bytes}", "group": groups.GROUP},
    }
    return "\n".join(groups.table(title, keys) for title, keys in tables.items())


def cost(setup, stack):
    """Both daemons, filled, the second with its quota."""
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
    etcd.until("a host is elected leader", lambda: status()["cluster"].get("leader"))
    monitor.run("x-weir-cluster-set", group=groups.GROUP, **LIMIT)
    # Unused quota is distributed: this host gets nearly all, as long as it reports.
    limit = lambda: status()["groups"][0]["limits"].get("iops-total", 0)  # noqa: E731
    etcd.until("the limit is divided", lambda: limit() > 0.9 * LIMIT["iops-total"])
    return {
        HERE: lambda: rows.under_load(here, LOAD, setup.seconds),
        MANY: lambda: rows.under_load(many, LOAD, setup.seconds),
    }


ROWS = (
    Row(
        "many-hosts",
        "4 KiB randread, depth 32, one connection, memory: a cluster-wide limit, never reached",
        cost,
        (Faster(MANY, KEPT, (HERE,)),),
        needs_weir=True,
        # One percent is below the host's noise, hence more pairs.
        rounds_factor=3,
    ),
)
