"""Fields that are missing, null or truncated in the daemon's answers are shown as unknown: an open
page may be older than the daemon.
"""

import json
import tempfile

import daemon
import scene
import visit
from visit import expect

NULLS = ["group", "limits", "iops-reservation", "throttle-cause", "exports", "read-ahead", "l2-cache", "wait-ratio", "latency-p99-ns", "size"]
MACHINE = {"type": "vhost-user-blk", "queues": 2, "requests": 12000, "kicks": None, "front-end": {"pid": 4711, "name": "<b>qemu"}}
OVERVIEWS = {
    "names alone": {"access": "change", "disks": [{"name": "vm1"}], "groups": [{"name": "gold"}]},
    "nulls": {
        "access": "change",
        "daemon": None,
        "groups": None,
        "devices": [{"name": "sda"}],
        "disks": [{"name": "vm1"} | dict.fromkeys(NULLS)],
    },
    "a machine": {
        "access": "change",
        "disks": [{"name": "vm1", "exports": [{"type": "nbd", "connections": 1}, MACHINE]}],
    },
    "a missing group": {"access": "change", "disks": [{"name": "vm1", "group": "gone"}]},
    "groups in a cycle": {
        "disks": [{"name": "vm1", "group": "a"}],
        "groups": [{"name": "a", "group": "b"}, {"name": "b", "group": "a"}],
    },
}
HISTORIES = [
    {},
    {"step-ms": 1000, "start-ms": 0},
    {"step-ms": 1000, "start-ms": 0, "series": {"read-iops": [1, None, 3]}, "latency-heat": None},
    {"step-ms": 1000, "start-ms": 0, "series": {"wait-ratio": None}, "latency-heat": {"bounds-ns": [], "rows": [None, [1, 2, 3]]}, "limits": [None, {"name": "iops-total", "value": 7}, {"value": 1}]},
]


def run(weir):
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        with daemon.Daemon(weir, directory, daemon.disk("vm1")) as running:
            for number, (what, overview) in enumerate(OVERVIEWS.items()):
                answers = {"overview": overview, "history": HISTORIES[number % len(HISTORIES)], "events": [{}, {"id": 1, "message": None}], "preview": {}}
                with visit.Visit(browser, running.url, prepare=lambda page: play(page, answers)) as reader:
                    look(reader, what)


def play(page, answers):
    page.add_init_script(scene.STREAM)

    def give(route):
        (answer,) = [answer for name, answer in answers.items() if f"/{name}" in route.request.url]
        route.fulfill(body=json.dumps(answer), content_type="application/json")

    page.route("**/api/v1/**", give)


def look(reader, what):
    # Groups in a cycle have no root: none of them is shown below the root, and the page does not
    # hang.
    if what == "groups in a cycle":
        reader.open()
        expect(reader.page.locator("#sums")).to_contain_text("1 disk · 2 groups")
        return
    page = reader.open("#disk/vm1")
    expect(page.locator("#detail-title")).to_have_text("vm1")
    expect(reader.row("vm1").locator(".c-p99")).to_have_text("-")
    expect(page.locator(".t-iops dd")).to_have_text("-")
    page.get_by_label("iops-total", exact=True).fill("5")
    expect(page.locator(".preview")).to_contain_text("It had no requests")
    if what == "a machine":
        expect(page.locator(".facts")).to_contain_text("vhost-user-blk<b>qemu (4711) · 2 queues · requests 12.0K")
    page.get_by_text("Figures as a table").click()
