"""A limit is changed: previewed, rejected without the right token, applied with it, undone; with
the mouse, and with the keyboard alone. Limits in force are read from the daemon.
"""

import re
import tempfile

import daemon
import visit
from visit import expect

TIME = re.compile(r"^[0-9.]+(us|ms|s)$")
CONFIG = (
    "[group.gold]\niops-total = 2000\n"
    + daemon.disk("vm1", 'group = "gold"', socket="vm1")
    + daemon.disk("vm2", 'group = "gold"', socket="vm2")
)


def run(weir):
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        with daemon.Daemon(weir, directory, CONFIG) as running:
            running.load("vm1", "--random", "-d", "16")
            # The browser logs each error response; these are expected.
            with visit.Visit(browser, running.url, allowed=("status of 4",)) as reader:
                with_mouse(reader, running)
            with visit.Visit(browser, running.url, size=(1280, 800)) as reader:
                fits(reader)
            with visit.Visit(browser, running.url, allowed=("status of 401",)) as reader:
                with_keyboard(reader, running)
        with tempfile.TemporaryDirectory() as other, daemon.Daemon(weir, other, CONFIG, token=None) as running:
            with visit.Visit(browser, running.url) as reader:
                read_only(reader, running)


def fits(reader):
    """Names and limits are not cut off on a small screen, and no field overlaps another."""
    page = reader.open()
    reader.choose("vm1")
    is_throttled(page)
    limits = reader.row("vm1").locator(".c-limits")
    expect(limits).to_have_text("gold: iops")
    assert limits.evaluate("cell => cell.scrollWidth <= cell.clientWidth"), "a limit is cut off"
    overlapping = page.evaluate("""() => [...document.querySelectorAll(".setting")].flatMap((row) => {
        const fields = [...row.querySelectorAll("input")].map((field) => field.getBoundingClientRect());
        const edge = row.closest(".limits").getBoundingClientRect().right;
        return fields.filter((field, at) => field.right > edge || fields.slice(at + 1).some((next) => next.left < field.right && next.top < field.bottom && field.top < next.bottom));
    }).length""")
    assert overlapping == 0, f"{overlapping} fields overlap others"


def is_throttled(page):
    expect(page.locator("#detail .held")).to_have_text("Held by gold: iops-total")
    expect(page.locator(".t-iops dd")).not_to_have_text("0")


def with_mouse(reader, running):
    page = reader.open()
    reader.choose("vm1")
    is_throttled(page)
    expect(reader.row("vm1").locator(".c-limits")).to_have_text("gold: iops")
    page.locator(".above button").click()
    expect(page.locator("#detail-title")).to_have_text("gold")
    # A group's latencies are those of its disks.
    expect(page.locator(".t-p99 dd")).to_have_text(TIME)
    expect(reader.row("gold").locator(".c-p99")).to_have_text(TIME)
    expect(page.get_by_role("img", name="Latency")).to_have_attribute("aria-label", visit.KNOWN)
    rate = page.get_by_label("iops-total", exact=True)
    expect(rate).to_have_value("2000")
    apply = page.get_by_role("button", name="Apply")
    expect(apply).to_be_disabled()

    # Without the token, with a wrong one, with the right one.
    rate.fill("500")
    page.get_by_role("button", name="Enter the token").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Token").fill("wrong")
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Wrong token")
    dialog.get_by_label("Token").fill(running.token)
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog).to_be_hidden()
    stored = page.evaluate(
        "[JSON.stringify(localStorage), document.cookie, Object.values(sessionStorage)]"
    )
    assert running.token in stored[2] and running.token not in stored[0] and stored[1] == "", (
        f"the token is stored in {stored}"
    )

    # The preview.
    preview = page.locator(".preview table")
    expect(preview).to_contain_text("iops-total 2000 → 500")
    # The caption states the period of the preview, which may be shorter than possible.
    expect(preview.locator("caption")).to_have_text(re.compile(r"^\S+ requests of the last \d+[sm], measured, and simulated with "))
    rates = preview.get_by_role("row", name="operations per second").locator("td")
    now, later = (figure(rates.nth(place).inner_text()) for place in (0, 1))
    assert later < now, f"a lower limit admits fewer: {now} now, {later} below the limit"
    assert later <= 500 * 1.01, f"{later} operations per second below a limit of 500"
    assert running.limits("gold") == {"iops-total": 2000}, "the preview changes no limit"

    # The slider and the number beside it show the same value.
    page.get_by_label("iops-total, slider").fill("0")
    expect(rate).to_have_value("")
    rate.fill("500")

    # A token that has become invalid changes nothing, and the page shows the dialog again.
    page.evaluate("sessionStorage.setItem('weir-token', 'wrong')")
    apply.click()
    expect(dialog.get_by_role("alert")).to_contain_text("The token is wrong now")
    assert running.limits("gold") == {"iops-total": 2000}, "a wrong token changes nothing"
    dialog.get_by_label("Token").fill(running.token)
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog).to_be_hidden()
    expect(page.locator(".result")).to_have_text("In force: iops-total 2000 → 500")
    assert running.limits("gold") == {"iops-total": 500}

    # The page shows the daemon's error, and applies nothing.
    page.get_by_label("iops-total-max", exact=True).fill("100")
    rate.fill("700")
    apply.click()
    expect(page.locator(".result.wrong")).to_contain_text("iops-total-max (100) is below iops-total (700)")
    assert running.limits("gold") == {"iops-total": 500}
    # The error disappears when the input changes.
    rate.fill("90")
    expect(page.locator(".result.wrong")).to_be_hidden()
    page.get_by_role("button", name="Discard").click()
    expect(rate).to_have_value("500")

    # Undo. The page shows changes by other clients without a reload.
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".result")).to_have_text("In force: iops-total 500 → 2000")
    assert running.limits("gold") == {"iops-total": 2000}
    with daemon.qmp.Monitor(running.monitor_path) as monitor:
        monitor.run("x-weir-set", name="gold", **{"iops-total": 3000})
    expect(rate).to_have_value("3000")
    charts_show_past_limits(reader, page)


def charts_show_past_limits(reader, page):
    """The charts show each limit over its own period, for disks in the group as well, starting with
    the first limit."""
    page.wait_for_function("""async () => {
        const answer = await fetch("/api/v1/disks/vm1/history");
        return (await answer.json()).limits.at(-1).value === 3000;
    }""")
    # The history that the page has loaded so far is older.
    page.reload()
    reader.is_live()
    for name, prefix in (("gold", ""), ("vm1", "gold: ")):
        reader.choose(name)
        at = page.get_by_label("Time in the charts")
        drawn = page.get_by_role("img", name="Operations per second")
        expect(drawn).to_have_attribute(
            "aria-label", re.compile(f"; limits: {prefix}iops-total 3000$")
        )
        at.focus()
        # Until the history has arrived after the reload, the chart is shorter.
        for _ in range(50):
            past_limits = limits_by_time(page, at)
            if past_limits[:1] + past_limits[-1:] == [
                f"{prefix}iops-total 3000",
                f"{prefix}iops-total 2000",
            ]:
                break
            page.wait_for_timeout(200)
        else:
            raise AssertionError(past_limits)
        page.keyboard.press("End")
        # The label for "now" shows the current limit.
        expect(drawn).to_have_attribute(
            "aria-label", re.compile(f"; limits: {prefix}iops-total 3000$")
        )


def limits_by_time(page, at):
    """The limits in force at each step of the slider `at`, from now to the left end of the chart.
    """
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    # A step of the slider is a thousandth of the range: the other steps are made in the page, because
    # each key takes milliseconds.
    texts = at.evaluate("""(slider) => {
        const texts = [slider.ariaValueText];
        for (let step = 0; step < 1000 && slider.value !== "0"; step += 1) {
            slider.stepDown();
            slider.dispatchEvent(new Event("input"));
            texts.push(slider.ariaValueText);
        }
        return texts;
    }""")
    found = []
    for text in texts:
        shown = re.findall(r" operations per second(?:; limits: (.*))?$", text)
        # The chart may begin shortly before the first limit.
        if shown == [""]:
            break
        if shown and shown != found[-1:]:
            found += shown
    return found


def with_keyboard(reader, running):
    page = reader.open()
    before = running.limits("gold")["iops-total"]
    # Typed letters are combined only if they follow each other quickly, and the rows arrive
    # asynchronously.
    gold = reader.row("gold")
    expect(gold).to_be_visible()
    reader.tabs_to("Disks and groups")
    page.keyboard.type("g")
    expect(page.get_by_role("treegrid")).to_have_attribute("aria-activedescendant", gold.get_attribute("id"))
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_have_text("gold")
    expect(page.locator("#detail")).to_be_focused()
    reader.tabs_to("iops-total, slider")
    reader.presses("ArrowRight", 5)
    rate = page.get_by_label("iops-total", exact=True)
    assert int(rate.input_value()) > before, f"{rate.input_value()} after the slider was moved up from {before}"
    reader.tabs_to("iops-total", 1)
    page.keyboard.press("Control+A")
    page.keyboard.type("1234")
    reader.tabs_to("Apply")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_label("Token")).to_be_focused()
    page.keyboard.type(running.token)
    page.keyboard.press("Enter")
    expect(page.locator(".result")).to_have_text(f"In force: iops-total {before} → 1234")
    assert running.limits("gold") == {"iops-total": 1234}
    expect(page.get_by_role("button", name="Undo")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("treegrid")).to_be_focused()
    page.keyboard.press("/")
    expect(page.get_by_label("Filter")).to_be_focused()


def read_only(reader, running):
    page = reader.open("#disk/vm1")
    expect(page.locator(".why")).to_contain_text("Read-only")
    expect(page.locator("#token-button")).to_be_hidden()
    expect(page.get_by_label("iops-total", exact=True)).to_be_disabled()
    expect(page.get_by_label("iops-total, slider")).to_be_disabled()
    expect(page.get_by_role("button", name="Apply")).to_be_disabled()


def figure(text):
    """A number in the page's notation, such as `1.2K`."""
    factors = {"K": 1e3, "M": 1e6}
    text = text.strip().lstrip("▲ ")
    return float(text.rstrip("KM")) * factors.get(text[-1], 1)
