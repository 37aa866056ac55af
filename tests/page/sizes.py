"""The page with 2, 100 and 1,000 disks: all can be reached, and the visible ones have rows."""

import tempfile

import daemon
import visit
from visit import expect

GROUPS = 5
# Widths with both panes, beside the breakpoints, and with the narrowest columns.
WIDTHS = (1100, 1120, 1190, 1280, 1399, 1400, 1440)


def config(disks):
    groups = "".join(f"[group.g{number}]\niops-total = 1000\n" for number in range(GROUPS))
    return groups + "".join(daemon.disk(f"vm{number}", f'group = "g{number % GROUPS}"') for number in range(disks))


def run(weir):
    with visit.browser(scrollbars=True) as browser:
        for disks in (2, 100, 1000):
            with tempfile.TemporaryDirectory() as directory, daemon.Daemon(weir, directory, config(disks)) as running:
                with visit.Visit(browser, running.url) as reader:
                    look(reader, disks)


def look(reader, disks):
    page = reader.open()
    grid = page.get_by_role("treegrid")
    expect(grid).to_have_attribute("aria-rowcount", str(disks + GROUPS + 1))
    expect(page.locator("#sums")).to_contain_text(f"{disks} disks · {GROUPS} groups")
    rows = page.locator(".rows [role=row]")
    # 40 rows fit the height of the screen; the widget has some more beyond its edges.
    assert rows.count() <= 60, f"{rows.count()} rows exist of {disks}"
    for key, place in (("End", disks + GROUPS), ("Home", 1)):
        grid.focus()
        page.keyboard.press(key)
        active = page.locator(f"[id='{grid.get_attribute('aria-activedescendant')}']")
        expect(active).to_have_attribute("aria-rowindex", str(place + 1))
        expect(active).to_be_in_viewport()
    # All columns fit beside the scrollbar.
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        expect(page.locator("body")).to_have_js_property("clientWidth", width)
        widths = grid.evaluate("(grid) => [grid.scrollWidth, grid.clientWidth]")
        assert widths[0] == widths[1], f"{width}: the tree scrolls sideways: {widths}"
    # At any scroll position no row is missing.
    gaps = page.evaluate("""async () => {
        const grid = document.querySelector("[role=treegrid]"), row = document.querySelector(".rows");
        const height = parseFloat(getComputedStyle(row).getPropertyValue("--row"));
        const seen = [];
        for (let step = 0; step <= 10; step += 1) {
            grid.scrollTop = step / 10 * grid.scrollHeight;
            await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            const head = grid.firstChild.offsetHeight, there = new Set();
            for (const one of document.querySelectorAll(".rows [role=row]:not([hidden])")) there.add(Number(one.getAttribute("aria-rowindex")) - 2);
            const first = Math.ceil(grid.scrollTop / height), last = Math.floor((grid.scrollTop + grid.clientHeight - head) / height);
            for (let at = first; at < Math.min(last, Number(grid.getAttribute("aria-rowcount")) - 1); at += 1) if (!there.has(at)) seen.push([step, at]);
        }
        return seen;
    }""")
    assert gaps == [], f"places without a row (step, place): {gaps}"
    assert rows.count() <= 120, f"{rows.count()} rows exist of {disks} after scrolling"
    last = f"vm{disks - 1}"
    page.get_by_label("Filter").fill(last.upper())
    expect(grid).to_have_attribute("aria-rowcount", "3")
    by_arrows(page, grid, last)
    reader.choose(last)
    expect(page.locator(".above")).to_have_text(f" in g{(disks - 1) % GROUPS}")
    page.get_by_label("Filter").fill("no such")
    expect(page.locator("#tree .nothing")).to_have_text("No disk or group matches.")
    # There is no row to move down to.
    page.keyboard.press("ArrowDown")
    expect(page.get_by_label("Filter")).to_be_focused()
    page.keyboard.press("Escape")
    expect(grid).to_have_attribute("aria-rowcount", str(disks + GROUPS + 1))
    # A group is closed and opened by the keyboard.
    grid.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".row.is-active:visible")).to_have_attribute("aria-expanded", "false")
    members = len(range(0, disks, GROUPS))
    count = int(grid.get_attribute("aria-rowcount"))
    assert disks + GROUPS + 1 - count in (0, 1, members, members - 1), f"{count} rows are left"
    page.keyboard.press("ArrowRight")
    expect(grid).to_have_attribute("aria-rowcount", str(disks + GROUPS + 1))
    # The sort order is chosen by the keyboard as well.
    heading = page.get_by_role("columnheader", name="NAME")
    page.keyboard.press("Tab")
    for order in ("ascending", "descending"):
        page.keyboard.press("Enter")
        expect(heading).to_have_attribute("aria-sort", order)


def by_arrows(page, grid, found):
    """Down moves from the filter to the first matching row, and up from the first row to the
    unchanged filter."""
    filtered, active = page.get_by_label("Filter"), page.locator(".row.is-active:visible .name")
    page.keyboard.press("ArrowDown")
    expect(grid).to_be_focused()
    expect(active).to_have_text(found)
    # Its group is the row above.
    page.keyboard.press("ArrowUp")
    expect(active).not_to_have_text(found)
    expect(grid).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(filtered).to_be_focused()
    expect(filtered).to_have_value(found.upper())
    page.keyboard.press("End")
    page.keyboard.press("Backspace")
    expect(filtered).to_have_value(found.upper()[:-1])
    filtered.fill(found.upper())
