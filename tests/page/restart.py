"""The daemon restarts, with an additional disk, while the page is open."""

import re
import tempfile

import daemon
import visit
from visit import expect

STALE = re.compile(r"\bis-stale\b")
# The browser logs each failed connection, which is expected here.
CONNECTION_ERRORS = (
    "net::ERR_CONNECTION_REFUSED",
    "net::ERR_INCOMPLETE_CHUNKED_ENCODING",
    "net::ERR_EMPTY_RESPONSE",
    "net::ERR_CONNECTION_RESET",
)


def run(weir):
    config = daemon.disk("vm1", "iops-total = 100")
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        with daemon.Daemon(weir, directory, config) as running:
            with visit.Visit(browser, running.url, allowed=CONNECTION_ERRORS) as reader:
                page = reader.open("#disk/vm1")
                expect(page.get_by_label("iops-total", exact=True)).to_have_value("100")
                running.stop()
                expect(page.locator("#live")).to_contain_text("not live since")
                expect(page.locator("body")).to_have_class(STALE)
                # The last known figures are still shown, and marked as outdated.
                expect(reader.row("vm1")).to_be_visible()
                running.config = daemon.disk("vm1", "iops-total = 200") + daemon.disk("vm2")
                running.start()
                reader.is_live()
                expect(page.locator("body")).not_to_have_class(STALE)
                expect(reader.row("vm2")).to_be_visible()
                expect(page.get_by_label("iops-total", exact=True)).to_have_value("200")
                expect(page.locator("#detail-title")).to_have_text("vm1")
                # The stream is connected again: new changes are shown.
                with daemon.qmp.Monitor(running.monitor_path) as monitor:
                    monitor.run("x-weir-set", name="vm1", **{"iops-total": 300})
                expect(page.get_by_label("iops-total", exact=True)).to_have_value("300")
