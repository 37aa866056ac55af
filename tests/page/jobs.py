"""Jobs on the page: one that starts is shown with its progress and what throttles it, one that is
cancelled disappears, and one that has failed stays, with the reason.
"""

import tempfile
from pathlib import Path

import daemon
import qmp
import scene
import visit
from visit import expect

JOB = {"kind": "backup", "group": None, "target": "b.raw", "done-bytes": 0, "total-bytes": 1 << 20, "rate-bps": 0}
CAUSE = {"level": "group", "name": "gold", "limit": "bps-total"}
JOBS = [
    JOB | {"id": "a", "disk": "db", "group": "gold", "state": "running", "done-bytes": 1 << 18, "rate-bps": 1 << 20, "remaining-s": 90, "throttle-cause": CAUSE},
    JOB | {"id": "b", "disk": "gone", "state": "concluded", "error": "<b>no space"},
    JOB | {"id": "c", "disk": "db", "state": "concluded"},
    {"id": "d", "state": "paused"},
]


def run(weir):
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        image = Path(directory) / "a.raw"
        image.write_bytes(b"x" * (1 << 20))
        config = f'image-root = "{directory}"\n[group.gold]\n[disk.vm1]\nimage = "{image}"\nformat = "raw"\ngroup = "gold"\n'
        with daemon.Daemon(weir, directory, config) as running:
            with visit.Visit(browser, running.url) as reader:
                a_job_comes_and_goes(reader, running)
            with visit.Visit(browser, running.url, prepare=lambda page: scene.play(page, change)) as reader:
                rows_have_all_figures(reader)
            with visit.Visit(browser, running.url, size=visit.PHONE, prepare=lambda page: scene.play(page, change)) as reader:
                expect(reader.open().locator("#jobs tbody tr")).to_have_count(3)


def change(scene_data):
    scene_data["overview"]["jobs"] = JOBS


def a_job_comes_and_goes(reader, running):
    page = reader.open()
    jobs = page.locator("#jobs")
    expect(jobs).to_be_hidden()
    with qmp.Monitor(running.monitor_path) as monitor:
        target = running.directory / "b.raw"
        with open(target, "wb") as file:
            file.truncate(1 << 20)
        monitor.run("x-weir-backup", name="vm1", target=str(target), format="raw", **{"bps-total": 1})
        expect(jobs.locator("tbody th")).to_have_text("backup-vm1")
        expect(jobs.locator("tbody td").last).to_have_text("bps-total")
        monitor.run("job-pause", id="backup-vm1")
        expect(jobs.locator("tbody tr")).to_contain_text("paused")
        jobs.get_by_role("button", name="vm1").click()
        expect(page.locator("#detail-title")).to_have_text("vm1")
        monitor.run("job-cancel", id="backup-vm1")
        expect(jobs).to_be_hidden()


def rows_have_all_figures(reader):
    rows = reader.open().locator("#jobs tbody tr")
    expect(rows).to_have_count(3)
    cells = rows.nth(0).locator("th, td")
    expect(cells).to_have_text(["a", "backup", "db", "gold", "running", "25%", "1.0M/s", "90s", "gold: bps-total"])
    assert rows.nth(0).locator("progress").evaluate("(bar) => bar.value") == 0.25
    expect(rows.nth(1)).to_contain_text("failed: <b>no space")
    expect(rows.nth(1).get_by_role("button")).to_be_disabled()
    expect(rows.nth(2).locator("th, td")).to_have_text(["d", "-", "-", "-", "paused", "-", "-/s", "-", "-"])
