"""A latency target is previewed with its effect on the disk's neighbour, and applied; a limit for
each GiB is edited; a preview uses the entry of a schedule that holds.
"""

import tempfile

import daemon
import visit
from change import figure
from visit import expect

# 500 operations per second for both: sixteen requests in flight wait 32 ms for each other.
DEVICE = 'rate = "iops=500,shared=hdd"'
CONFIG = (
    daemon.disk("db", DEVICE, 'prefetch = "off"', socket="db")
    + daemon.disk("loud", DEVICE, 'prefetch = "off"', socket="loud")
    + daemon.disk("timed", "iops-total = 5000", socket="timed")
    + '[[disk.timed.schedule]]\nwhen = "Mon..Sun"\niops-total = 100\n'
)
# A recording of a tenth of a second at a limit of 100 per second contains its burst, too.
SHORT_OF_100 = 200
TIMES = {"us": 1e-3, "ms": 1, "s": 1000}


def run(weir):
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        with daemon.Daemon(weir, directory, CONFIG) as running:
            running.load("db", "--random", "-d", "1")
            running.load("loud", "--random", "-d", "16")
            running.load("timed", "--random", "-d", "4")
            with visit.Visit(browser, running.url, allowed=("status of 401",)) as reader:
                page = reader.open()
                latency_target(reader, page, running)
                for_each_gib(reader, page, running)
                schedule(reader, page)


def latency_target(reader, page, running):
    reader.choose("db")
    expect(page.locator(".t-iops dd")).not_to_have_text("0")
    page.get_by_label("Another limit").select_option("latency-target")
    page.get_by_label("latency-target", exact=True).fill("20ms")
    page.get_by_role("button", name="Enter the token").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Token").fill(running.token)
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog).to_be_hidden()
    preview = page.locator(".preview table")
    expect(preview).to_contain_text("latency-target none → 20ms")
    # How far the target is met is tested in virtual time: a busy host delays this load.
    for name, read in (
        ("latency, p99", milliseconds),
        ("others on its device: operations per second", figure),
    ):
        now, later = columns(preview, name, read)
        assert now > 0 and later > 0, f"{name}: {now}, {later}"
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".result")).to_have_text("In force: latency-target none → 20ms")


def for_each_gib(reader, page, running):
    """A disk of 16 MiB with 6400 IOPS for each GiB has 100 IOPS."""
    reader.choose("loud")
    page.get_by_label("Another limit").select_option("iops-total-per-gib")
    page.get_by_label("iops-total-per-gib", exact=True).fill("6400")
    preview = page.locator(".preview table")
    expect(preview).to_contain_text("iops-total-per-gib none → 6400")
    _, later = columns(preview, "operations per second", figure)
    assert later <= SHORT_OF_100, f"{later} operations per second at a limit of 100"
    page.get_by_label("iops-total-per-gib-min", exact=True).fill("200")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".result")).to_have_text(
        "In force: iops-total-per-gib none → 6400, iops-total-per-gib-min none → 200"
    )
    assert running.limits("loud") == {"iops-total": 200}
    # A change elsewhere is shown in the field.
    with daemon.qmp.Monitor(running.monitor_path) as monitor:
        monitor.run("x-weir-set", name="loud", **{"iops-total-per-gib-min": 150})
    expect(page.get_by_label("iops-total-per-gib-min", exact=True)).to_have_value("150")


def schedule(reader, page):
    """The entry that holds limits the disk, whatever the configured limit is."""
    reader.choose("timed")
    page.get_by_label("iops-total", exact=True).fill("4000")
    preview = page.locator(".preview table")
    expect(preview).to_contain_text("iops-total 5000 → 4000")
    _, later = columns(preview, "operations per second", figure)
    assert later <= SHORT_OF_100, f"{later} operations per second at a limit of 100 by the schedule"


def columns(preview, name, read):
    row = preview.locator("tr").filter(has=preview.page.locator(f"th:text-is({visit.quoted(name)})"))
    cells = row.locator("td")
    return [read(cells.nth(place).inner_text()) for place in (0, 1)]


def milliseconds(text):
    text = text.strip().lstrip("▲ ")
    unit = next(unit for unit in TIMES if text.endswith(unit))
    return float(text.removesuffix(unit)) * TIMES[unit]
