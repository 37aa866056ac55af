"""The maximum number of streams of one address is open: the page shows the daemon's error, and
becomes live once a stream is closed.
"""

import socket
import tempfile

import daemon
import visit
from visit import expect

MAX_STREAMS = 64
TOO_MANY = ("429 (Too Many Requests)",)


def run(weir):
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        with daemon.Daemon(weir, directory, daemon.disk("vm1")) as running:
            streams = [listen(running.port) for _ in range(MAX_STREAMS)]
            with visit.Visit(browser, running.url, allowed=TOO_MANY) as reader:
                reader.page.goto(running.url)
                expect(reader.page.locator("#live")).to_contain_text(
                    f"{MAX_STREAMS} pages are open from your address"
                )
                streams.pop().close()
                reader.is_live()
                expect(reader.row("vm1")).to_be_visible()
            for stream in streams:
                stream.close()


def listen(port):
    """Opens a stream; returns once it has begun."""
    stream = socket.create_connection(("127.0.0.1", port), timeout=daemon.DEADLINE_SECONDS)
    stream.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
    begun = b""
    while b"event: overview" not in begun:
        read = stream.recv(1 << 16)
        assert read, f"no stream: {begun!r}"
        begun += read
    return stream
