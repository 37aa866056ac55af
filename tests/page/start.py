"""The first view of the page: it is not called live before figures have arrived, a wide window
shows the most throttled disk, its limit is one click away, and charts are filled with the known
history.

The answers are those of the recorded scene, so that no figure depends on the machine.
"""

import tempfile

import daemon
import scene
import visit
from visit import expect

# The overview arrives when the test permits it.
DELAYED_OVERVIEW = """
window.EventSource = class extends EventTarget {
    constructor() {
        super();
        this.readyState = 1;
        window.giveOverview = async () => {
            const data = await (await fetch("/api/v1/overview")).text();
            this.dispatchEvent(new MessageEvent("overview", { data }));
            return [document.getElementById("live").textContent, document.getElementById("sums").textContent];
        };
    }
    close() { this.readyState = 2; }
};
"""
# Left end of the lines of a chart, as a share of its width.
LEFT_END = """(canvas) => {
    const [left, right, bottom] = [46, canvas.width - 8, canvas.height - 18];
    const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const ink = getComputedStyle(canvas).getPropertyValue("--read").match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16));
    const is = (x, y) => ink.every((value, part) => Math.abs(value - data[(y * width + x) * 4 + part]) < 24);
    for (let x = left; x < right; x += 1) for (let y = 0; y < bottom; y += 1) if (is(x, y)) return (x - left) / (right - left);
    return 1;
}"""


def run(weir):
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        with daemon.Daemon(weir, directory, daemon.disk("vm1")) as running:
            with visit.Visit(
                browser,
                running.url,
                prepare=lambda page: scene.play(page, change, DELAYED_OVERVIEW),
            ) as reader:
                page_is_not_live_before_figures_arrive(reader)
            with visit.Visit(browser, running.url, prepare=lambda page: scene.play(page, change)) as reader:
                the_most_throttled_disk_is_shown(reader)
                its_limit_is_one_click_away(reader)
            # Chromium warns because the canvas is read repeatedly.
            with visit.Visit(browser, running.url, prepare=lambda page: scene.play(page, change), allowed=("readback",)) as reader:
                charts_are_filled(reader)
            with visit.Visit(browser, running.url, size=visit.PHONE, prepare=lambda page: scene.play(page, change)) as reader:
                a_phone_shows_the_list(reader)


def change(scene_data):
    """Changes the scene: `db` is the most throttled disk, and its history has 90 seconds of 600."""
    for disk in scene_data["overview"]["disks"]:
        disk["wait-ratio"] = 1 if disk["name"] == "db" else min(disk["wait-ratio"], 0.5)
    history = scene_data["history"]["db"]
    steps = len(history["series"]["read-iops"])
    history["start-ms"] += (steps - 90) * history["step-ms"]
    history["series"] = {name: values and values[-90:] for name, values in history["series"].items()}
    history["latency-heat"] = None


def page_is_not_live_before_figures_arrive(reader):
    page = reader.page
    page.goto(reader.url)
    page.wait_for_function("() => typeof window.giveOverview === 'function'")
    expect(page.locator("#tree .nothing")).to_have_text("Loading …")
    expect(page.locator("#live")).to_have_text("connecting")
    expect(page.locator("#sums")).to_have_text("")
    live, sums = page.evaluate("window.giveOverview()")
    assert live == "live" and sums.startswith("9 disks · 2 groups"), f"live: {live}, sums: {sums}"


def the_most_throttled_disk_is_shown(reader):
    page = reader.open()
    expect(page.locator("#detail-title")).to_have_text("db")
    expect(reader.row("db")).to_have_attribute("aria-selected", "true")
    assert page.url == reader.url, "the address does not change for the suggested disk"
    # A choice is kept, and "back" leads to the suggestion.
    reader.choose("mail")
    page.go_back()
    expect(page.locator("#detail-title")).to_have_text("db")


def its_limit_is_one_click_away(reader):
    page = reader.page
    page.get_by_role("button", name="gold: iops-total").click()
    expect(page.locator("#detail-title")).to_have_text("gold")
    expect(page.get_by_label("iops-total", exact=True)).to_be_focused()
    page.get_by_role("button", name="iops-total", exact=True).click()
    expect(page.get_by_label("iops-total", exact=True)).to_be_focused()
    # The disk's limit, which has no field before the click.
    reader.choose("mail")
    page.get_by_role("button", name="iops-write").click()
    expect(page.get_by_label("iops-write", exact=True)).to_be_focused()


def charts_are_filled(reader):
    page = reader.open("#disk/db")
    canvas = page.get_by_role("img", name="Operations per second")
    expect(canvas).to_have_attribute("aria-label", visit.KNOWN)
    left = canvas.evaluate(LEFT_END)
    assert left < 0.1, f"the lines begin at {left:.0%} of the width"
    page.get_by_label("1 min", exact=True).check()
    expect(canvas).to_have_attribute("aria-label", visit.KNOWN)
    page.wait_for_function("() => document.querySelector('.instant input').value === '1000'")
    left = canvas.evaluate(LEFT_END)
    assert left < 0.1, f"the lines of one minute begin at {left:.0%} of the width"


def a_phone_shows_the_list(reader):
    page = reader.open()
    expect(reader.row("db")).to_be_visible()
    expect(page.locator("#detail")).to_be_hidden()
