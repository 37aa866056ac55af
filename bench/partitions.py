"""Faults of the network between the hosts of a cluster and etcd, in namespaces: one host is cut off,
half of the hosts is cut off, etcd is cut off. Part of bench/hosts.py.

    namespace `hub`
      etcd ── bridge `near` ═══ trunk ═══ bridge `far`
                │      │                    │      │
               a        b                  c        d       one namespace for each host

An interface that is set down drops packets and reports nothing, so connections stay open, as with a
failed switch. Needs root. Removes its namespaces at the end, and changes no other one.
"""

import os
import subprocess
import time

from etcd import Etcd, until

HOSTS = {"a": "near", "b": "near", "c": "far", "d": "far"}
PREFIX, PEER_PORT, ETCD_ADDRESS = "10.77.0", 7441, "10.77.0.1"
# A cut lasts longer than all leases and the wait of a new leader.
CUT_SECONDS = 15
# Quotas that are read one after another: a sum counts if none has changed meanwhile.
PAUSE_SECONDS = 0.02


class Network:
    """The namespaces, bridges and interfaces."""

    def __init__(self, stack):
        self._suffix = os.getpid()
        self._hub = self._namespace("hub", stack)
        for bridge in ("near", "far"):
            self._ip("link", "add", bridge, "type", "bridge")
            self._ip("link", "set", bridge, "up")
        self._ip("link", "add", "trunk", "type", "veth", "peer", "name", "trunk-far")
        self._ip("link", "set", "trunk", "master", "near", "up")
        self._ip("link", "set", "trunk-far", "master", "far", "up")
        self._ip("address", "add", f"{ETCD_ADDRESS}/24", "dev", "near")
        self._spaces = {}
        for number, (name, bridge) in enumerate(HOSTS.items(), 2):
            space = self._spaces[name] = self._namespace(name, stack)
            self._ip("link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", f"to-{name}", "master", bridge, "up")
            ip("-netns", space, "address", "add", f"{PREFIX}.{number}/24", "dev", "eth0")
            ip("-netns", space, "link", "set", "eth0", "up")

    def _namespace(self, name, stack):
        space = f"weir-{name}-{self._suffix}"
        ip("netns", "add", space)
        stack.callback(ip, "netns", "delete", space)
        ip("-netns", space, "link", "set", "lo", "up")
        return space

    def _ip(self, *words):
        ip("-netns", self._hub, *words)

    @staticmethod
    def address(name):
        """Address of a host for the others."""
        return f"{PREFIX}.{2 + list(HOSTS).index(name)}:{PEER_PORT}"

    def inside(self, name="hub"):
        """Words before a command that runs on this host."""
        return ["ip", "netns", "exec", self._spaces.get(name, self._hub)]

    def cut(self, interface):
        """Cuts off a host (`to-NAME`), or the far half of the hosts (`trunk`)."""
        self._ip("link", "set", interface, "down")

    def join(self, interface):
        """Ends a cut."""
        self._ip("link", "set", interface, "up")


def ip(*words):
    """Runs ip(8)."""
    subprocess.run(["ip", *words], check=True, stdin=subprocess.DEVNULL)


class Sums:
    """Sum of the quotas in force since the last call of `line`, read every few milliseconds."""

    def __init__(self, hosts):
        self._hosts, self._sums = hosts, []

    def read(self):
        """The quotas in force, by host, if none changed while they were read."""
        before, after = ([host.limit() for host in self._hosts] for _ in range(2))
        if before == after:
            self._sums.append(sum(after))
        return dict(zip((host.name for host in self._hosts), after))

    def until(self, label, condition):
        """Awaits a condition of the quotas; prints the duration."""
        began = time.monotonic()
        until(label, lambda: condition(self.read()))
        print(f"  {label:<62}{time.monotonic() - began:>8.2f} s", flush=True)

    def watch(self, seconds):
        """Reads for this long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read()
            time.sleep(PAUSE_SECONDS)

    def line(self, label, limit):
        """Prints the least and worst sum; returns the worst."""
        least, worst = min(self._sums), max(self._sums)
        print(f"  {f'{label}: least and worst sum':<62}{least / limit:>8.0%}{worst / limit:>7.0%}", flush=True)
        self._sums = []
        return worst


def start_etcd(network, directory, stack):
    """One member, on the near side."""
    etcd = Etcd(directory, stack, members=1, address=ETCD_ADDRESS, inside=network.inside())
    etcd.wait()
    return etcd


def change_network(network, hosts, etcd, limit, seconds):
    """All faults, one after another; returns the worst sum of the quotas in force."""
    sums, by_name = Sums(hosts), {host.name: host for host in hosts}
    near = lambda quotas, names, expected: all(  # noqa: E731
        abs(quotas[name] - expected) <= 0.05 * expected for name in names
    )
    quarter = lambda quotas: near(quotas, HOSTS, limit / 4)  # noqa: E731
    # 20 % of the limit, in equal shares, and rounding.
    share = 0.2 * limit / len(HOSTS)
    is_fallback = lambda quotas, names: all(quotas[name] <= share for name in names)  # noqa: E731
    for host in hosts:
        host.start_clients()
    sums.until("four busy hosts: a quarter each", quarter)
    sums.watch(seconds)
    worst = [sums.line("no fault", limit)]

    network.cut("to-d")
    sums.until("d is cut off: its fallback share", lambda quotas: is_fallback(quotas, "d"))
    rest = (limit - share) / 3
    sums.until("the other hosts have the rest", lambda quotas: near(quotas, "abc", rest))
    sums.watch(CUT_SECONDS)
    worst.append(sums.line("d cut off", limit))
    network.join("to-d")
    sums.until("d is reachable: a quarter each", quarter)
    worst.append(sums.line("d reachable", limit))

    network.cut("trunk")
    sums.until("c and d are cut off: their fallback shares", lambda quotas: is_fallback(quotas, "cd"))
    rest = (limit - 2 * share) / 2
    sums.until("the other half has the rest", lambda quotas: near(quotas, "ab", rest))
    status = by_name["c"].run_qmp("x-weir-query-status")["cluster"]
    print(f"  c reports: connected {str(status['connected']).lower()}: {status.get('reason')}")
    sums.watch(CUT_SECONDS)
    worst.append(sums.line("half cut off", limit))
    network.join("trunk")
    sums.until("all are reachable: a quarter each", quarter)
    worst.append(sums.line("half reachable", limit))

    by_name["d"].end_clients()
    rest = (limit - share) / 3
    sums.until("d is idle: the other hosts have the rest", lambda quotas: near(quotas, "abc", rest))
    sums.line("d idle", limit)
    etcd.freeze(0)
    sums.watch(CUT_SECONDS)
    by_name["d"].start_clients()
    sums.until("without etcd, d is busy: a quarter each", quarter)
    sums.watch(CUT_SECONDS)
    worst.append(sums.line("without etcd", limit))
    etcd.thaw(0)
    sums.watch(CUT_SECONDS)
    sums.until("etcd answers: a quarter each", quarter)
    worst.append(sums.line("with etcd again", limit))
    for host in hosts:
        host.end_clients()
    return max(worst)
