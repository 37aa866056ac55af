"""Rows for the cost of observing a daemon: recordings, metrics, the page, all of them; and the
duration of a scrape of many disks.

In memory, where requests are shortest and no overhead is hidden; the thread that writes or answers
takes its CPU time from the same host.

Never judges the content of a recording or of metrics: that is for the tests.
"""

import contextlib
import http.client
import selectors
import socket
import threading
import time

import groups
import loads
import nbd
import rows
import servers
from loads import Load
from results import AtMost, Faster
from rows import WEIR, Row

LOAD = Load("randread", 32)
NONE, RECORDING, METRICS, ALL = WEIR, f"{WEIR}, recording", f"{WEIR}, metrics", f"{WEIR}, all"
PAGE, HOSTILE = f"{WEIR}, page", f"{WEIR}, beside hostile clients"
# A block is written at most a second after its first request.
WRITTEN_SECONDS = 1.2
# Prometheus scrapes every fifteen seconds by default.
SCRAPE_SECONDS = 1
# Number of open pages.
STREAMS = 8
# Unread streams of events, scrapers that read a byte at a time, and the interval of wrong tokens:
# guesses at full speed would use the measured CPU.
UNREAD, SLOW_SCRAPERS, WRONG_SECONDS = 300, 20, 0.005
# Share of the speed that must be kept, and bytes of a recorded request at a random offset.
KEPT, BYTES = 0.97, 12
DISKS, SCRAPE_MS = 1000, 50
OPENMETRICS = {"Accept": "application/openmetrics-text"}


class Scraped(http.client.HTTPConnection):
    """A connection to the Unix socket of a daemon's metrics."""

    def __init__(self, path):
        super().__init__("weir")
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))

    def scrape(self):
        """Reads the whole page."""
        self.request("GET", "/metrics", headers=OPENMETRICS)
        page = self.getresponse().read()
        if not page.endswith(b"# EOF\n"):
            raise servers.ServerFailed(f"half a page of metrics: {page[-100:]!r}")
        return page


class Scraper:
    """Scrapes while its block runs, at the highest rate of Prometheus."""

    def __init__(self, path):
        self._path, self._end = path, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        connection = Scraped(self._path)
        while not self._end.wait(SCRAPE_SECONDS):
            connection.scrape()
        connection.close()

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *_error):
        self._end.set()
        self._thread.join()


class Pages:
    """Reads the streams of some pages while its block runs."""

    def __init__(self, path):
        self._path, self._selector, self.events = path, selectors.DefaultSelector(), 0
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while self._selector.get_map():
            for key, _ in self._selector.select():
                read = key.fileobj.recv(1 << 16)
                self.events += read.count(b"event: delta")
                if not read:
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()

    def __enter__(self):
        self._streams = [socket.socket(socket.AF_UNIX) for _ in range(STREAMS)]
        for stream in self._streams:
            stream.connect(str(self._path))
            stream.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self._selector.register(stream, selectors.EVENT_READ)
        self._thread.start()

    def __exit__(self, *_error):
        for stream in self._streams:
            stream.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        if self.events < STREAMS:
            raise servers.ServerFailed(f"{STREAMS} pages received {self.events} updates")


class HostileObservers:
    """Observers that read nothing or little, and guess the token, while its block runs. The hook
    for events accepts them and never ends.
    """

    def __init__(self, daemon):
        self._daemon, self._end = daemon, threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._sip, self._guess)]
        self._unread, self._slow, self.rejected = [], [], 0

    @staticmethod
    def _connect(path, request):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(path))
        client.settimeout(0)
        client.sendall(request)
        return client

    def _sip(self):
        while not self._end.wait(0.1):
            for client in self._slow:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    client.recv(1)

    def _guess(self):
        is_over = False
        while not is_over:
            with contextlib.suppress(OSError):
                connection = Scraped(self._daemon.page)
                connection.request(
                    "PATCH", "/api/v1/disks/disk/limits", b"{}", {"Host": "localhost", "Authorization": "Bearer no"}
                )
                self.rejected += connection.getresponse().status in (401, 403, 429)
                connection.close()
            is_over = self._end.wait(WRONG_SECONDS)

    def __enter__(self):
        stream = b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"
        scrape = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        # Clients above the bounds are rejected or not accepted, which must cost nothing.
        for clients, count, path, request in (
            (self._unread, UNREAD, self._daemon.page, stream),
            (self._slow, SLOW_SCRAPERS, self._daemon.metrics, scrape),
        ):
            for _ in range(count):
                with contextlib.suppress(OSError):
                    clients.append(self._connect(path, request))
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_error):
        self._end.set()
        for thread in self._threads:
            thread.join()
        for client in [*self._unread, *self._slow]:
            client.close()
        if not self.rejected:
            raise servers.ServerFailed("no wrong token was rejected")


class Watched(groups.Daemon):
    """weir's memory disk, with a recording in a directory that lives as long, metrics, a page, or
    all of them; with `hanging_hook`, a page that accepts changes, and a command for events
    that never ends.
    """

    def __init__(self, setup, recorded, measured, shown, hanging_hook=False):
        def command(directory, monitor):
            options = ["--qmp", f"unix:{monitor}"]
            if recorded:
                (directory / "day").mkdir()
                options += ["--record", directory / "day"]
            if measured:
                self.metrics = directory / "metrics.sock"
                options += ["--metrics", f"unix:{self.metrics}"]
            if shown:
                self.page = directory / "page.sock"
                options += ["--http", f"unix:{self.page}"]
            if hanging_hook:
                (directory / "token").touch(0o600)
                (directory / "token").write_text("0123456789abcdef" * 4)
                options += ["--http-token-file", directory / "token", "--on-event", "/bin/sleep 1000"]
            return servers.weir(setup.program, f"memory:{setup.size_bytes}", *options)

        super().__init__(command)


def started(setup, stack, recorded, measured, shown):
    """An observed daemon whose disk is filled."""
    daemon = stack.enter_context(Watched(setup, recorded, measured, shown))
    loads.fill(daemon.uri, setup.disk)
    return daemon


def watching(recorded, measured, shown, name):
    """weir's memory disk with and without observation."""

    def contenders(setup, stack):
        plain = rows.in_memory(setup, stack, servers.weir(setup.program, f"memory:{setup.size_bytes}"))
        daemon = started(setup, stack, recorded, measured, shown)
        monitor = stack.enter_context(daemon.monitor())

        def load():
            with contextlib.ExitStack() as watchers:
                if measured:
                    watchers.enter_context(Scraper(daemon.metrics))
                if shown:
                    watchers.enter_context(Pages(daemon.page))
                return rows.under_load(daemon, LOAD, setup.seconds)

        def progress():
            time.sleep(WRITTEN_SECONDS)
            return monitor.run("x-weir-query-recordings")[0]

        def watched():
            if not recorded:
                return load() | {"bytes": 0, "lost": 0}
            before = progress()
            figures = load()
            after = progress()
            lost = after["lost"] - before["lost"]
            requests = after["requests"] - before["requests"]
            figures["bytes"] = (after["bytes"] - before["bytes"]) / requests
            figures["lost"] = lost / (requests + lost)
            return figures

        def unwatched():
            return rows.under_load(plain, LOAD, setup.seconds) | {"bytes": 0, "lost": 0}

        return {NONE: unwatched, name: watched}

    return contenders


def beside_hostile_clients(setup, stack):
    """weir's memory disk alone, and beside hostile observers of every kind."""
    daemon = stack.enter_context(Watched(setup, False, True, True, hanging_hook=True))
    loads.fill(daemon.uri, setup.disk)

    def sample():
        return rows.under_load(daemon, LOAD, setup.seconds)

    def beside():
        with HostileObservers(daemon):
            return sample()

    return {NONE: sample, HOSTILE: beside}


def row(name, title, watched, recorded=False, measured=False, shown=False):
    """A row of an observed daemon beside an unobserved one."""
    bounds = (
        AtMost(BYTES, "bytes", lambda bytes_each: f"{bytes_each:.1f} bytes a request", watched),
        AtMost(0, "lost", lambda part: f"{part:.2%}", watched),
    )
    return Row(
        name,
        f"4 KiB randread, depth 32, one connection, memory: {title}",
        watching(recorded, measured, shown, watched),
        (Faster(watched, KEPT, (NONE,)), *(bounds if recorded else ())),
        columns=("iops", "cpu_us", "bytes", "lost") if recorded else ("iops", "cpu_us"),
        needs_weir=True,
        # Three percent is close to the host's noise, hence more pairs.
        rounds_factor=2,
    )


def use(uri):
    """Reads, writes and flushes a disk once, so that all its metrics exist."""
    client = nbd.NBD()
    client.connect_uri(uri)
    client.pread(4096, 0)
    client.pwrite(bytes(4096), 0)
    client.flush()
    client.shutdown()


def many_disks(setup, stack):
    """A thousand disks with their own limits, in one group."""
    disks = [groups.Disk(f"disk{number}", {"iops-total": 10_000, "bps-total": 10**9}) for number in range(DISKS)]

    def command(directory, _monitor):
        config, command.metrics = directory / "weir.toml", directory / "metrics.sock"
        daemon_keys = {"metrics": f"unix:{command.metrics}"}
        config.write_text(groups.config({"iops-total": 10**6}, disks, daemon=daemon_keys))
        return [setup.program, "serve", "--config", config]

    daemon = stack.enter_context(groups.Daemon(command))
    for disk in disks:
        use(daemon.uri_of(disk.name))
    connection = Scraped(command.metrics)
    stack.callback(connection.close)

    def sample():
        # A page is cached for a short time.
        time.sleep(SCRAPE_SECONDS)
        start = time.monotonic()
        page = connection.scrape()
        return {"ms": (time.monotonic() - start) * 1000, "mib": len(page) / (1 << 20)}

    return {WEIR: sample}


ROWS = (
    row("recording", "all of it recorded, and none", RECORDING, recorded=True),
    row("metrics", "scraped once a second, and never", METRICS, measured=True),
    row("page", f"{STREAMS} pages open, and none", PAGE, shown=True),
    row("watched", "recorded, scraped and shown, and not", ALL, recorded=True, measured=True, shown=True),
    Row(
        "hostile-http-clients",
        f"4 KiB randread, depth 32, one connection, memory: {UNREAD} unread streams, "
        f"{SLOW_SCRAPERS} slow scrapers, wrong tokens, a hanging event hook; and without them",
        beside_hostile_clients,
        (Faster(HOSTILE, KEPT, (NONE,)),),
        columns=("iops", "cpu_us"),
        needs_weir=True,
        rounds_factor=2,
    ),
    Row(
        "scrape",
        f"a scrape of {DISKS} used disks",
        many_disks,
        (AtMost(SCRAPE_MS, "ms", lambda ms: f"{ms:.0f} ms"),),
        columns=("ms", "mib"),
        needs_weir=True,
    ),
)
