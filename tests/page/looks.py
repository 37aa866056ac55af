"""The appearance of the page: a recorded scene on a desktop, in dark colours and on a phone.

axe-core finds no violations. The page must look like the pictures in docs/pictures: the comparison
covers size and colours but not letters, so that a different font may be used. Each picture is
averaged over fields of about 30 by 30 pixels; at most one in MOST fields may differ by more than
APART (of 255) in a colour. A part that is missing or has moved exceeds that; the contents of the
parts are tested by the other scenarios.

The figures are formatted as weir's console does: both get the same numbers.
"""

import base64
import json
import sys
import tempfile
import time

import daemon
import scene
import visit
from axe_playwright_python.sync_playwright import Axe
from visit import expect

# Widths of phones, tablets and desktops; beside the breakpoints of the layout.
WIDTHS = (360, 390, 640, 641, 900, 1099, 1100, 1280, 1399, 1400, 1440, 1920)
# Limits of a disk in the daemon's answer, and their text in the column.
LIMITS = {
    "wiki": ({"limits": {"iops-total": 10000, "iops-total-max": 20000, "iops-total-max-length": 10}}, "iops 10000↑20000×10s"),
    "monitoring": ({"limits": {"bps-write": 1536001 << 10}}, "bps-w 1.5G"),
    "registry": ({"throttle-cause": {"name": "silver", "limit": "bps-write"}, "wait-ratio": 1}, "silver: bps-w"),
}
MANY = {
    f"{kind}-{which}{more}": value
    for kind, value in (("iops", 123456789012345), ("bps", 1234567))
    for which in ("read", "write")
    for more in ("", "-max")
}

PICTURES = daemon.ROOT / "docs" / "pictures"
APART, MOST = 16, 16
# Deadline, as for other expectations of a page.
DEADLINE_S = 120
# Rules of WCAG 2 up to level AA, and best practices of axe-core.
RULES = {"resultTypes": ["violations"], "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}

COMPARE = """async ([expected, actual]) => {
    const load = async (data) => {
        const image = new Image();
        image.src = `data:image/png;base64,${data}`;
        await image.decode();
        return image;
    };
    const [one, other] = [await load(expected), await load(actual)];
    const sizes = [one, other].map((image) => `${image.naturalWidth}x${image.naturalHeight}`);
    const [wide, high] = [Math.round(one.naturalWidth / 30), Math.round(one.naturalHeight / 30)];
    const fields = (image) => {
        const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight), pen = canvas.getContext("2d");
        pen.drawImage(image, 0, 0);
        const { data, width, height } = pen.getImageData(0, 0, canvas.width, canvas.height);
        const [sums, counts] = [new Float64Array(wide * high * 3), new Float64Array(wide * high)];
        for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) {
            const field = Math.floor(y * high / height) * wide + Math.floor(x * wide / width);
            counts[field] += 1;
            for (let part = 0; part < 3; part += 1) sums[field * 3 + part] += data[(y * width + x) * 4 + part];
        }
        return sums.map((sum, at) => sum / counts[Math.floor(at / 3)]);
    };
    const [a, b] = [fields(one), fields(other)];
    let apart = 0;
    for (let field = 0; field < wide * high; field += 1) {
        if ([0, 1, 2].some((part) => Math.abs(a[field * 3 + part] - b[field * 3 + part]) > APART)) apart += 1;
    }
    return { sizes, apart, fields: wide * high };
}""".replace("APART", str(APART))


def run(weir):
    figures = json.load(sys.stdin)
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        # The daemon serves the page and its policy; the answers come from the scene.
        with daemon.Daemon(weir, directory, daemon.disk("vm1")) as running:
            blank = browser.new_page()
            for name, (size, dark, fragment) in scene.PICTURES.items():
                with visit.Visit(browser, running.url, size=size, dark=dark, prepare=scene.play) as reader:
                    page = reader.open(fragment)
                    scene.settle(page)
                    wait_until_like(blank, name, page)
                    is_accessible(page, name)
                    fits(page, name)
                    if name == "page-light":
                        has_text_for_charts(page)
                        figures_match_the_console(page, figures)
                        colours(page)
                    elif name == "page-phone-dark":
                        dialog(page, name)
            with visit.Visit(browser, running.url, prepare=lambda page: scene.play(page, limited)) as reader:
                limits_are_not_cut_off(reader)
            with visit.Visit(browser, running.url, prepare=lambda page: scene.play(page, changed)) as reader:
                limits_are_drawn_over_their_period(reader)


def changed(scene_data):
    """Changes the scene: in the first half of the chart the group's limit was two thirds of the
    present one."""
    history = scene_data["history"]["gold"]
    start, middle = history["start-ms"], history["start-ms"] + 300 * history["step-ms"]
    line = {"name": "iops-total", "group": None}
    history["limits"] = [
        line | {"value": 2000, "start-ms": start, "end-ms": middle},
        line | {"value": 3000, "start-ms": middle, "end-ms": None},
    ]


# Rows of a chart with a dashed line in the colour of limits, left and right of its middle: distance
# from the axis.
DASHED = """(canvas) => {
    const [left, right, bottom] = [46, canvas.width - 8, canvas.height - 18];
    const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colour = getComputedStyle(canvas).getPropertyValue("--limit");
    const ink = colour.match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16));
    const is = (x, y) => ink.every((value, part) => Math.abs(value - data[(y * width + x) * 4 + part]) < 24);
    const middle = (left + right) / 2;
    return [[left, middle - 8], [middle + 8, right]].map(([from, to]) => {
        const rows = [];
        for (let y = 0; y < bottom; y += 1) {
            let dashes = 0;
            for (let x = Math.ceil(from); x < to; x += 1) dashes += is(x, y) ? 1 : 0;
            if (dashes > (to - from) / 2) rows.push(bottom - y);
        }
        return rows;
    });
}"""


def limits_are_drawn_over_their_period(reader):
    page = reader.open("#group/gold")
    chart = page.get_by_role("img", name="Operations per second")
    expect(chart).to_have_attribute("aria-label", visit.KNOWN)
    scene.settle(page)
    before, after = chart.evaluate(DASHED)
    # A line may be two pixels thick.
    thick = [max(rows, default=9) - min(rows, default=0) for rows in (before, after)]
    assert max(thick) <= 1, f"rows with a limit before and after its change: {before}, {after}"
    assert abs(before[0] / after[0] - 2 / 3) < 0.03, f"at {before[0]} and {after[0]} pixels above the axis"


def limited(scene_data):
    for one in scene_data["overview"]["disks"]:
        one |= LIMITS.get(one["name"], [{}])[0]
        if one["name"] == "build":
            one |= {"limits": MANY, "throttle-cause": None, "wait-ratio": 0, "waiting-requests": 0}
        if one["name"] == "mail":
            one |= {"throttle-cause": {"name": "a group with a name that is long", "limit": "iops-total"}}


def limits_are_not_cut_off(reader):
    """No figure is cut off, at any width of the page; figures that do not fit are replaced by one
    mark."""
    page = reader.open()
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        for name, (_, text) in LIMITS.items():
            cell = reader.row(name).locator(".c-limits")
            expect(cell).to_have_text(text)
            expect(cell).not_to_have_attribute("data-more", "")
            assert cut_off(cell) == [], f"{width}: {text} is cut: {cut_off(cell)}"
        # The end of a name may be cut off, as in the first column, but not the name of the limit.
        assert "iops" not in cut_off(reader.row("mail").locator(".c-limits")), (
            f"{width}: the name of the limit is cut off"
        )
        many = reader.row("build").locator(".c-limits")
        expect(many).to_have_attribute("data-more", "")
        expect(many).to_have_attribute("title", many.inner_text())
        visible = many.evaluate(VISIBLE)
        assert visible and all(visible.values()) and "bps-r 1.2M" in visible, f"{width}: {visible}"


# The visible figures of a cell, and whether each is completely inside.
VISIBLE = """(cell) => {
    const at = cell.getBoundingClientRect();
    const inside = (one) => one.top >= at.top - 1 && one.bottom <= at.bottom + 1;
    const parts = [...cell.querySelectorAll(".parts > span")].map((part) => [part.textContent, part.getBoundingClientRect()]);
    return Object.fromEntries(parts.filter(([, one]) => one.width > 0 && inside(one)).map(([text, one]) =>
        [text, one.left >= at.left - 1 && one.right <= at.right + 1]));
}"""
# Cells that are cut off, or contain a part that is.
CUT_OFF = """(cell) => [cell, ...cell.querySelectorAll("*")]
    .filter((part) => part.scrollWidth > part.clientWidth + 1 && getComputedStyle(part).display !== "inline" || part.scrollHeight > part.clientHeight + 4)
    .map((part) => part.textContent)"""


def cut_off(cell):
    return cell.evaluate(CUT_OFF)


def wait_until_like(blank, name, page):
    """Waits until the page looks like the kept picture: charts and animations are a few frames
    late."""
    expected = (PICTURES / f"{name}.png").read_bytes()
    end = time.monotonic() + DEADLINE_S
    while True:
        images = [base64.b64encode(image).decode() for image in (expected, page.screenshot())]
        found = blank.evaluate(COMPARE, images)
        if found["sizes"][0] == found["sizes"][1] and found["apart"] * MOST <= found["fields"]:
            return
        assert time.monotonic() < end, (
            f"{name}: sizes {found['sizes']}, {found['apart']} of {found['fields']} fields differ from"
            f" docs/pictures/{name}.png (look at it; scripts/picture-page draws it again)"
        )


def is_accessible(page, what):
    found = Axe().run(page, options=RULES).response["violations"]
    violations = [
        f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in found
    ]
    assert violations == [], f"{what}: " + "\n".join(violations)


def fits(page, what):
    """The page does not scroll sideways, and touch targets on a phone are large enough."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        f"{what} scrolls sideways"
    )
    assert page.evaluate(
        "document.getElementById('detail').scrollWidth <= document.getElementById('detail').clientWidth"
    ), f"{what}: the panel of the chosen disk scrolls sideways"


def has_text_for_charts(page):
    """Each chart has a label with its content, and the table has the figures."""
    charts = page.locator("figure:visible canvas")
    assert charts.count() >= 5, f"{charts.count()} charts"
    for label in charts.evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))"):
        assert " now, " in label and " at most" in label, label
    page.get_by_text("Figures as a table").click()
    expect(page.locator(".figures tbody tr")).to_have_count(13)
    is_accessible(page, "the table")
    # The cursor of the charts moves by keys, and its label shows the position.
    page.get_by_label("Time in the charts").press("Home")
    expect(page.locator(".instant output")).not_to_have_text("now")
    for view in ("2 h", "2 days"):
        page.get_by_label(view).check()


def dialog(page, what):
    page.locator("#token-button").click()
    expect(page.get_by_role("dialog").get_by_label("Token")).to_be_focused()
    is_accessible(page, f"{what}, the dialog for the token")
    page.get_by_role("button", name="Cancel").click()


def figures_match_the_console(page, figures):
    texts = page.evaluate(
        """async (given) => {
            const figures = await import("/assets/figures.js");
            return given.map(({ how, value }) => figures[how](value));
        }""",
        figures,
    )
    wrong = [(one, text) for one, text in zip(figures, texts) if one["text"] != text]
    assert len(texts) > 100 and wrong == [], f"weir's console and the page differ: {wrong}"


def colours(page):
    """The switch overrides the system's setting, and is stored."""
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_label("Colours").select_option("dark")
    dark = page.evaluate(ground)
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(23, 25, 29)"), (light, dark)
    page.reload()
    assert page.evaluate(ground) == dark, "the choice is not kept after a reload"
