"""A recorded scene that replaces the daemon's answers, so that pictures can be compared:
`scene.json` contains the answers of a daemon under load (recorded by scripts/picture-page). The
clock of the page is stopped at the time of the recording.
"""

import json
from pathlib import Path

import visit

SCENE = Path(__file__).with_name("scene.json")
CHOSEN = "#disk/db"
# For each picture: size, True for dark colours, and the chosen disk or group.
PICTURES = {
    "page-light": (visit.DESK, False, CHOSEN),
    "page-dark": (visit.DESK, True, "#group/gold"),
    "page-phone": (visit.PHONE, False, ""),
    "page-phone-dark": (visit.PHONE, True, CHOSEN),
}
# Disks and groups whose history is in the scene.
NAMES = [("disks", "db"), ("groups", "gold")]
PENDING = {"name": "db", "setting": "iops-total", "value": "800"}

# Sends the recorded events once, and stays connected.
STREAM = """
window.EventSource = class extends EventTarget {
    constructor() {
        super();
        this.readyState = 1;
        fetch("/api/v1/overview").then((answer) => answer.text()).then((data) => this.dispatchEvent(new MessageEvent("overview", { data })));
    }
    close() { this.readyState = 2; }
};
"""


def play(page, change=lambda scene: None, stream=STREAM):
    """Plays the scene, modified by `change`; `stream` replaces `EventSource`."""
    scene = json.loads(SCENE.read_text())
    change(scene)
    page.clock.set_fixed_time(scene["overview"]["time-ms"])
    page.add_init_script(stream)

    def give(route):
        path = route.request.url.split("/api/v1/", 1)[1]
        if path == "overview":
            answer = scene["overview"]
        elif path.startswith("events"):
            if scene["events"] is None:
                return route.fulfill(status=404, json={"error": "weir: there are none"})
            answer = scene["events"]
        elif path.endswith("/preview"):
            answer = scene["preview"]
        else:
            name = path.split("/")[1]
            answer = scene["history"].get(name) if "span=10m" in path else None
            answer = answer or {"step-ms": 10_000, "start-ms": scene["overview"]["time-ms"], "series": {}, "latency-heat": None}
        return route.fulfill(json=answer)

    page.route("**/api/v1/**", give)


def settle(page):
    """Waits until everything in a picture is drawn."""
    if "#" in page.url:
        visit.expect(page.locator("figure canvas").first).to_have_attribute("aria-label", visit.KNOWN)
    # Only this disk has a recorded preview of another limit.
    if CHOSEN in page.url:
        field = page.get_by_label(PENDING["setting"], exact=True).first
        field.fill(PENDING["value"])
        visit.expect(page.locator(".preview table")).to_be_visible()
        page.evaluate("document.activeElement.blur(); document.getElementById('detail').scrollTop = 0")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
