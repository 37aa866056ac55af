// The selected disk or group: current activity, history, throttle cause and limits.
//
// Built once for each selection; later updates write only figures. The charts follow the daemon's
// history and share one cursor, for pointer and keyboard.

import { Cursor } from "./axes.js";
import { Heat, Lines } from "./chart.js";
import { attribute, element, say } from "./element.js";
import * as figures from "./figures.js";
import { Follower, SPANS } from "./history.js";
import { Limits } from "./limits.js";
import { binding, held, holder, isHeld, operations } from "./store.js";
import { series as table } from "./table.js";

const TILES = [
    ["IOPS", (node) => figures.count(operations(node))],
    ["READ/s", (node) => figures.bytes(node["read-bps"])],
    ["WRITE/s", (node) => figures.bytes(node["write-bps"])],
    ["P50", (node) => figures.time(node["latency-p50-ns"])],
    ["P99", (node) => figures.time(node["latency-p99-ns"])],
    ["WAIT P99", (node) => figures.time(node["wait-p99-ns"])],
    ["WAIT", (node) => node["waiting-requests"] == null ? "-" : String(node["waiting-requests"])],
    ["HELD", (node) => figures.share(node["wait-ratio"])],
];
const TITLES = {
    P50: "half of the last second's requests took less", P99: "99 of 100 of the last second's requests took less",
    "WAIT P99": "99 of 100 of the last second's requests were throttled for less", WAIT: "requests that are throttled now", HELD: "fraction of the last second in which requests were throttled",
};
const KEY = "weir-span";

export class Detail {
    constructor(host, store, { back, choose, token, announce }) {
        Object.assign(this, { host, store, back, choose, token, announce });
        this.key = null;
        this.span = "10m";
        try {
            const kept = sessionStorage.getItem(KEY);
            if (kept in SPANS) this.span = kept;
        } catch {
            // 10 minutes.
        }
    }

    /// Shows another disk or group; null shows none.
    show(key) {
        if (key === this.key) return;
        this.key = key;
        this.follower?.stop();
        this.limits?.stop();
        this.follower = this.limits = null;
        this.isBuilt = false;
        this.update();
    }

    update() {
        const node = this.key && this.store.get(this.key);
        if (!node) {
            this.isBuilt = false;
            this.follower?.stop();
            const text = this.key ? !this.store.isKnown ? "" : `There is no ${this.key.replace("/", " ")} now.` : "Select a disk or a group to see its history and to change its limits.";
            this.host.replaceChildren(element("h2", { id: "detail-title", class: "unseen" }, "Nothing is selected"), element("p", { class: "nothing" }, text));
            return;
        }
        if (!this.isBuilt) this.build(node);
        this.write(node);
    }

    /// After a restart of the daemon.
    again() {
        this.follower?.again();
        this.limits?.again();
    }

    build(node) {
        this.isBuilt = true;
        this.node = node;
        const back = element("button", { type: "button", class: "back", onclick: () => this.back() }, "‹ All");
        this.above = element("span", { class: "above" });
        this.about = element("p", { class: "about" });
        this.tiles = TILES.map(() => element("dd", {}));
        const tiles = element("dl", { class: "tiles" }, ...TILES.map(([name], index) =>
            element("div", { class: `t-${name.toLowerCase().replace(/[ /]/, "-")}`, title: TITLES[name] }, element("dt", {}, name), this.tiles[index])));
        this.held = element("p", { class: "held" });
        this.holder = element("button", { type: "button", class: "link", onclick: () => this.toHolder() });
        this.cursor = new Cursor();
        this.charts(node);
        this.limits = new Limits(node, this.store, { token: this.token, announce: this.announce, onPending: () => this.redraw() });
        this.problem = element("p", { class: "wrong", role: "status" });
        this.rows = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Figures as a table" });
        this.figures = element("details", { class: "figures", ontoggle: () => this.fill() }, element("summary", {}, "Figures as a table"), this.rows);
        this.facts = element("dl", { class: "facts" });
        this.host.replaceChildren(
            element("div", { class: "title" }, back, element("h2", { id: "detail-title" }, node.name),
                element("span", { class: "kind" }, node.kind), this.above),
            this.about, element("p", { class: "window" }, "The last second; WAIT: now"), tiles, this.held, this.times(), this.problem,
            element("div", { class: "charts" }, this.operations.shown, this.bytes.shown),
            this.limits.shown,
            element("div", { class: "charts" }, this.heat.shown, this.queue.shown, this.shares.shown, this.hits.shown),
            this.figures, this.facts);
        this.follow(node);
    }

    charts(node) {
        const directions = (unit) => [
            { key: "sum", label: "sum", colour: "sum", thin: true },
            { key: `read-${unit}`, label: "reads", colour: "read" },
            { key: `write-${unit}`, label: "writes", colour: "write" },
        ];
        const limits = (unit) => () => this.lines(unit);
        this.operations = new Lines({ title: "Operations per second", series: directions("iops"), show: figures.count, limits: limits("iops") }, this.cursor);
        this.bytes = new Lines({ title: "Bytes per second", series: directions("bps"), show: figures.bytes, base: 1024, limits: limits("bps") }, this.cursor);
        this.heat = new Heat({ title: "Latency", note: "from arrival to answer, the wait for limits included" }, this.cursor);
        this.queue = new Lines({ title: "Queue", note: "requests that wait for a limit", show: figures.count, isWhole: true,
            series: [{ key: "waiting-requests", label: "waiting", colour: "held" }] }, this.cursor);
        this.shares = new Lines({ title: "Held, and burst", show: figures.share, top: 1, series: [
            { key: "wait-ratio", label: "held", colour: "held" }, { key: "burst-balance-ratio", label: "burst left", colour: "read" }],
        note: "part of each second in which requests waited; available part of the burst: at 0% requests are admitted at the limit's rate" }, this.cursor);
        this.hits = new Lines({ title: "Reads served by prefetch", show: figures.share, top: 1, series: [
            { key: "read-ahead-hit-rate", label: "reads that were read ahead", colour: "read" }, { key: "l2-cache-hit-rate", label: "metadata cache hits", colour: "write" }] }, this.cursor);
        this.drawn = [this.operations, this.bytes, this.heat, this.queue, this.shares, this.hits];
        this.hits.shown.hidden = node.kind === "group";
    }

    /// Limits of a chart's unit over time: the object's own, else those of the nearest group above that has
    /// some. Current limits have no end.
    lines(unit) {
        const node = this.store.get(this.key);
        if (!node) return [];
        const isDrawn = (name) => name.startsWith(unit) && !name.endsWith("-length") && name !== "iops-size";
        const set = (of) => Object.entries(of ?? {}).filter(([name, value]) => isDrawn(name) && value > 0);
        const line = (whose, name, value, from = null, to = null) => ({
            key: name, label: `${whose ? `${whose}: ` : ""}${name} ${figures.exact(name, value)}`, value, from, to,
            isBurst: name.endsWith("-max"),
            colour: name.includes("-read") ? "read" : name.includes("-write") ? "write" : "limit",
        });
        const holder = [node, ...this.store.groupsAbove(node)].find((one) => set(one.limits).length);
        const now = set(holder?.limits).map(([name, value]) => line(holder === node ? null : holder.name, name, value));
        const pending = set(this.limits?.pending()).map((one) => ({ ...line("draft", ...one), key: null, isPending: true }));
        const known = this.history?.limits?.filter(({ name }) => isDrawn(name));
        if (!known) return [...now, ...pending];
        const was = known.map(({ group, name, value, "start-ms": from, "end-ms": to }) => line(group, name, value, from, to));
        for (const one of now) {
            const same = was.findIndex(({ label, to }) => label === one.label && to === null);
            // Values newer than the history begin where it ends.
            one.from = same < 0 ? this.history.end_ms : was.splice(same, 1)[0].from;
        }
        for (const one of was) one.to ??= this.history.end_ms;
        return [...was, ...now, ...pending];
    }

    times() {
        const spans = Object.entries(SPANS).map(([name, { title }]) => element("label", {},
            element("input", { type: "radio", name: "span", value: name, checked: name === this.span, onchange: () => this.choosespan(name) }), title));
        this.instant = element("input", { type: "range", min: "0", max: "1000", value: "1000", "aria-label": "Time in the charts", oninput: () => this.pointAt() });
        this.shownAt = element("output", {}, "now");
        this.cursor.listen(() => this.showInstant());
        return element("div", { class: "bar times" },
            element("fieldset", { class: "spans" }, element("legend", { class: "unseen" }, "How far back"), ...spans),
            element("label", { class: "instant" }, this.instant, this.shownAt));
    }

    choosespan(name) {
        this.span = name;
        try {
            sessionStorage.setItem(KEY, name);
        } catch {
            // Kept for the lifetime of the page.
        }
        this.history = null;
        this.cursor.set(null);
        this.follow(this.node);
    }

    pointAt() {
        if (!this.history) return;
        const { end_ms, span_ms } = this.history;
        const part = Number(this.instant.value) / 1000;
        this.cursor.set(part >= 1 ? null : end_ms - span_ms * (1 - part));
    }

    showInstant() {
        const at = this.cursor.at;
        const text = at === null ? "now" : figures.clock(at);
        say(this.shownAt, text);
        if (at === null) this.instant.value = "1000";
        else if (this.history) this.instant.value = String(Math.round(1000 - (this.history.end_ms - at) / this.history.span_ms * 1000));
        const values = this.operations.legendValues.map((value, index) => `${this.operations.series[index].label} ${value.textContent}`).join(", ");
        const limits = this.operations.inForce.length ? `; limits: ${this.operations.inForce.join(", ")}` : "";
        attribute(this.instant, "aria-valuetext", at === null ? "now" : `${text}: ${values} operations per second${limits}`);
    }

    follow(node) {
        this.follower?.stop();
        this.follower = new Follower(node, this.span, (history, error) => {
            // A failed fetch is a TypeError: the connection state is shown at the top.
            say(this.problem, error && !(error instanceof TypeError) ? `The history cannot be loaded: ${error.message}` : "");
            if (history) this.take(history);
        });
    }

    take(history) {
        // The charts request its limits.
        this.history = history;
        for (const unit of ["iops", "bps"]) {
            const [reads, writes] = [history.series[`read-${unit}`] ?? [], history.series[`write-${unit}`] ?? []];
            const sums = Array.from({ length: history.steps }, (_, index) => reads[index] == null && writes[index] == null ? null : (reads[index] ?? 0) + (writes[index] ?? 0));
            const chart = unit === "iops" ? this.operations : this.bytes;
            chart.set({ ...history, series: { ...history.series, sum: sums } });
        }
        this.limits?.setPeak(history);
        for (const chart of [this.heat, this.queue, this.shares]) chart.set(history);
        this.hits.history = history;
        this.hits.shown.hidden = this.hits.isEmpty;
        this.hits.set(history);
        this.fill();
    }

    /// Opens the limit that requests wait for, at the disk or group that has it.
    toHolder() {
        const [whose, by] = [holder(this.node, this.store), held(this.node)];
        if (!whose || !by) return;
        if (whose.key !== this.key) this.choose(whose.key);
        this.limits?.reach(by.limit);
    }

    redraw() {
        for (const chart of this.drawn ?? []) chart.draw();
    }

    fill() {
        if (this.figures.open && this.history) this.rows.replaceChildren(table(this.history));
    }

    write(node) {
        this.node = node;
        const above = this.store.groupsAbove(node);
        const names = above.map(({ name }) => name).join("\n");
        if (this.above.dataset.names !== names) {
            this.above.dataset.names = names;
            this.above.replaceChildren(...above.flatMap((group) => [" in ", element("button", { type: "button", class: "link", onclick: () => this.choose(group.key) }, group.name)]));
        }
        say(this.about, about(node, this.store));
        TILES.forEach(([, show], index) => say(this.tiles[index], show(node)));
        const limit = binding(node);
        this.host.classList.toggle("is-held", isHeld(node));
        if (limit && !node.stopped) {
            // Not rebuilt while it is equal, so that it keeps the keyboard focus.
            if (this.holder.parentNode !== this.held) this.held.replaceChildren("Held by ", this.holder);
            say(this.holder, limit);
        } else say(this.held, node.stopped ? "Stopped by an error of its image: it continues when the cause is removed and a client retries."
            : isHeld(node) ? "Requests wait" : "Nothing waits");
        this.held.classList.toggle("is-stopped", Boolean(node.stopped));
        this.limits.write(node);
        const entries = facts(node);
        const text = JSON.stringify(entries);
        if (this.facts.dataset.entries !== text) {
            this.facts.dataset.entries = text;
            this.facts.replaceChildren(...entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
        }
    }
}

function about(node, store) {
    if (node.kind === "group") {
        const members = [...store.nodes.values()].filter((one) => store.above(one) === node.name);
        const disks = members.filter(({ kind }) => kind === "disk").length;
        return [figures.several(disks, "disk"), members.length > disks ? figures.several(members.length - disks, "group") : null, limitsOf(node)].filter(Boolean).join(" · ");
    }
    const clients = (node.exports ?? []).reduce((sum, { connections }) => sum + (connections ?? 0), 0);
    const over = [...new Set((node.exports ?? []).map(({ type }) => type).filter(Boolean))].join(", ");
    return [
        node.size == null ? null : figures.exactSize(node.size), node.format, node.cache && `cache ${node.cache}`,
        node.exports ? `${figures.several(clients, "client")}${over && ` over ${over}`}` : null, limitsOf(node),
    ].filter(Boolean).join(" · ");
}

const limitsOf = (node) => {
    const own = figures.limits(node.limits) === "-" ? "no limit of its own" : figures.limits(node.limits);
    if (!node.cluster) return own;
    const part = node.cluster.leased ? "a quota lease" : "the fallback share";
    return `${own}, ${part} of the cluster's ${figures.limits(node.cluster.limits)}`;
};

/// Further members of objects by name, formatted by unit.
function facts(node) {
    const shown = (name, value) => typeof value !== "number" ? String(value)
        : /-(ratio|rate)$/.test(name) ? figures.share(value) : name === "memory" ? figures.bytes(value)
            : name.endsWith("-reservation") ? figures.exact(name, value) : figures.count(value);
    const words = (name) => name.endsWith("-reservation") ? name : name.replace(/-(ratio|rate)$/, "").replaceAll("-", " ");
    const reservations = Object.fromEntries(["iops-reservation", "bps-reservation"].map((name) => [name, node[name] ?? null]));
    const found = [];
    for (const [of, title] of [[node["read-ahead"], "read ahead"], [node["l2-cache"], "metadata cache"], [reservations, "reservation"], [node.errors, "errors"]]) {
        if (of === null || of === undefined) continue;
        if (typeof of !== "object") found.push([title, shown(title, of)]);
        else {
            const members = Object.entries(of).filter(([, value]) => value !== null && typeof value !== "object" && !(title === "errors" && value === 0));
            if (members.length) found.push([title, members.map(([name, value]) => `${words(name)} ${shown(name, value)}`).join(" · ")]);
        }
    }
    for (const [limit, bucket] of Object.entries(node.buckets ?? {})) {
        const { "burst-balance-ratio": balance, "burst-duration-ns": duration, "burst-used-up-in-ns": usedUp, "burst-full-in-ns": full } = bucket;
        if (balance === null) continue;
        found.push([`burst of ${limit}`, [
            `${figures.share(balance)} left`, duration === null ? null : `lasts ${figures.seconds(duration)} when full`,
            usedUp === null || balance === 0 ? null : `used up in ${figures.seconds(usedUp)}`, full > 0 ? `full in ${figures.seconds(full)} without load` : null,
        ].filter(Boolean).join(" · ")]);
    }
    for (const { type, "front-end": process, queues: own, sockets, "in-flight": in_flight, requests, kicks, calls, copies } of node.exports ?? []) {
        const queues = own ?? sockets;
        if (typeof queues !== "number") continue;
        const counts = { "in flight": in_flight, requests, kicks, calls, copies };
        const countTexts = Object.entries(counts).filter(([, value]) => typeof value === "number").map(([name, value]) => `${name} ${figures.count(value)}`);
        const who = process ? `${process.name} (${process.pid})` : null;
        found.push([type, [who, figures.several(queues, "queue"), ...countTexts].filter(Boolean).join(" · ")]);
    }
    const control = node["latency-control"];
    if (control?.state) {
        const requests = (node["latency-of"] ?? "all") === "all" ? "" : ` of ${node["latency-of"]}`;
        found.push(["latency target", [
            `${node["latency-target"]} p${node["latency-percentile"]}${requests}`, control.state.replaceAll("-", " "),
            control["measured-ns"] === null ? null : `${figures.time(control["measured-ns"])} measured`,
            control["alone-ns"] === null ? null : `${figures.time(control["alone-ns"])} alone`,
        ].filter(Boolean).join(" · ")]);
    }
    if (typeof control?.["cap-iops"] === "number") found.push(["cap for latency targets", `${figures.count(control["cap-iops"])}/s`]);
    if (node["configured-limits"]) found.push(["configured limits", figures.limits(node["configured-limits"])]);
    if (node.schedule) found.push(["schedule", [node.schedule.when ?? "none of its times", node.schedule.until && `until ${node.schedule.until}`].filter(Boolean).join(" · ")]);
    for (const [member, title] of [["total", "quota"], ["writes", "write-quota"]]) {
        const quota = node["quota-status"]?.[member];
        if (quota) found.push([title, [
            node[title], `${figures.bytes(quota["used-bytes"])} used`, quota["used-bytes"] >= quota["quota-bytes"] && "limited to its rate",
            quota["period-end"] && `until ${quota["period-end"]}`,
        ].filter(Boolean).join(" · ")]);
    }
    for (const [member, title] of [["weight", "weight"], ["watermark", "watermark"], ["enforcement", "limits are"]]) {
        if (node[member] !== null && node[member] !== undefined && typeof node[member] !== "object") found.push([title, member === "watermark" ? `${node[member]}%` : String(node[member])]);
    }
    return found;
}
