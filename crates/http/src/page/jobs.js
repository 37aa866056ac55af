// Jobs that have not concluded, and jobs that have failed, below the tree.
//
// A row is created once and updated; a job that has concluded otherwise is in the events.

import { attribute, element, say } from "./element.js";
import * as figures from "./figures.js";
import { Store } from "./store.js";

const COLUMNS = ["JOB", "KIND", "DISK", "GROUP", "STATE", "DONE", "RATE", "LEFT", "HELD BY"];

const isWatched = (job) => job.state !== "concluded" || job.error != null;

/// The limit that a job waits for: its own, or `NAME: LIMIT`.
function cause({ "throttle-cause": by }) {
    if (!by) return figures.UNKNOWN;
    return by.level === "job" ? by.limit : `${by.name}: ${by.limit}`;
}

/// Share that is done, or null.
function done(job) {
    const { "done-bytes": bytes, "total-bytes": total } = job;
    return bytes == null || total == null ? null : Math.min(1, bytes / Math.max(1, total));
}

export class Jobs {
    /// `choose` is called with the key of a disk.
    constructor(host, store, choose) {
        Object.assign(this, { host, store, choose });
        this.rows = new Map();
        this.body = element("tbody");
        const headings = COLUMNS.map((title) => element("th", { scope: "col" }, title));
        this.host.append(element("table", {}, element("caption", {}, "Jobs"), element("thead", {}, element("tr", {}, ...headings)), this.body));
        this.host.addEventListener("click", (event) => {
            const key = event.target.closest("button")?.dataset.key;
            if (key) this.choose(key);
        });
    }

    update() {
        const jobs = [...this.store.jobs.values()].filter(isWatched).sort((a, b) => a.id < b.id ? -1 : 1);
        this.host.hidden = jobs.length === 0;
        const ids = new Set(jobs.map(({ id }) => id));
        for (const [id, row] of this.rows) {
            if (ids.has(id)) continue;
            row.line.remove();
            this.rows.delete(id);
        }
        jobs.forEach((job, index) => {
            if (!this.rows.has(job.id)) this.rows.set(job.id, this.row(job));
            const row = this.rows.get(job.id);
            this.fill(row, job);
            if (this.body.children[index] !== row.line) this.body.insertBefore(row.line, this.body.children[index] ?? null);
        });
    }

    row({ id }) {
        const name = element("button", { type: "button", class: "link" });
        const bar = element("progress", { max: 1, "aria-label": `progress of ${id}` });
        const share = element("span");
        const cells = Object.fromEntries(["kind", "group", "state", "rate", "left", "cause"].map((key) => [key, element("td")]));
        const line = element("tr", {}, element("th", { scope: "row" }, id), cells.kind, element("td", {}, name), cells.group,
            cells.state, element("td", {}, bar, " ", share), cells.rate, cells.left, cells.cause);
        return { line, name, bar, share, cells };
    }

    fill({ line, name, bar, share, cells }, job) {
        const ratio = done(job);
        const left = job["remaining-s"];
        line.className = job.error == null ? "" : "is-failed";
        say(name, job.disk ?? figures.UNKNOWN);
        const key = Store.key("disk", job.disk);
        attribute(name, "data-key", key);
        name.disabled = this.store.get(key) === null;
        // Without a value, the bar would show that the progress is unknown.
        attribute(bar, "value", ratio);
        say(share, figures.share(ratio));
        say(cells.kind, job.kind ?? figures.UNKNOWN);
        say(cells.group, job.group ?? figures.UNKNOWN);
        const state = [job.state ?? figures.UNKNOWN, job.remark].filter((part) => part != null).join(": ");
        say(cells.state, job.error == null ? state : `failed: ${job.error}`);
        say(cells.rate, `${figures.bytes(job["rate-bps"])}/s`);
        say(cells.left, left == null ? figures.UNKNOWN : figures.seconds(left * 1e9));
        say(cells.cause, cause(job));
    }
}
