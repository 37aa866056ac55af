// Limits of the selected disk or group: edited by slider or number, previewed, then applied.
//
// Edited values are pending until they are applied. For pending values the daemon returns a simulation of
// the last ten minutes. Only the daemon checks the rules; its messages are shown unchanged.
// All pending values are applied together or not at all.

import { Refused, ask, place, token } from "./api.js";
import { attribute, element, say } from "./element.js";
import * as figures from "./figures.js";

/// Delay after the last movement of a slider.
const STILL_MS = 250;
/// The daemon runs one preview at a time; another page's preview replaced this one.
const BUSY = 409;
const AGAIN_MS = 1000;
/// The daemon was too busy: previews run at the lowest priority.
const SILENT = 503;
const LATER_MS = 5000;
/// Positions of a slider; the first is no limit.
const PLACES = 200;
const LOWEST = { iops: 10, bps: 64 * 1024 };
const AT_LEAST = { iops: 20_000, bps: 512 * 1024 ** 2 };

/// Settings other than rates: their names, and if they apply to disks, groups, or both.
const OTHERS = { "burst-for": ["disk", "group"], "iops-size": ["disk", "group"], weight: ["disk", "group"], "iops-reservation": ["disk", "group"], "bps-reservation": ["disk", "group"], watermark: ["group", "disk"], "latency-target": ["disk", "group"], "latency-percentile": ["disk", "group"], "latency-of": ["disk", "group"], "latency-floor": ["disk", "group"] };
/// Settings whose values are texts, with the values that an empty field stands for.
const TEXTS = { "latency-target": "0", "latency-percentile": "99", "latency-of": "all", "latency-floor": "default" };
const NOTES = {
    "burst-for": "duration of a full burst, instead of the lengths",
    "iops-size": "bytes above which one request counts as more than one operation",
    weight: "share under contention",
    "iops-reservation": "reserved operations per second", "bps-reservation": "reserved bytes per second",
    watermark: "device utilization in percent below which limits are lifted",
    "latency-target": "such as 5ms: others on the device are throttled to keep it",
    "latency-percentile": "percentage of requests within the latency target",
    "latency-of": "all, reads or writes",
    "latency-floor": "percentage of the device that remains beside targets of others",
};
/// Limits for each GiB of a disk, with bounds: only disks have a size.
const PER_GIB = Object.keys(figures.KINDS).map((kind) => `${kind}-per-gib`);

const UNITS = { "burst-for": "s", "iops-reservation": "/s", "bps-reservation": "/s", watermark: "%" };

const PREVIEW_ROWS = [
    ["iops", "operations per second", figures.count], ["bps", "bytes per second", figures.bytes],
    ["latency-p50-ns", "latency, p50", figures.time], ["latency-p99-ns", "latency, p99", figures.time],
    ["wait-p50-ns", "wait, p50", figures.time], ["wait-p99-ns", "wait, p99", figures.time],
    ["waiting-ratio", "requests that waited", figures.share],
];

/// Rows of the other disks on a device with a latency target.
const OF_OTHERS = ["iops", "bps", "latency-p99-ns"];

export class Limits {
    constructor(node, store, { token, announce, onPending }) {
        Object.assign(this, { node, store, token, announce, onPending });
        this.fields = new Map();
        this.peak = { iops: 0, bps: 0 };
        this.controller = null;
        this.timer = null;
        this.undo = null;
        this.waits = false;
        token.entered = () => { if (this.waits && !this.isStopped) this.changed(); };
        this.build(node);
    }

    build(node) {
        this.list = element("div", { class: "settings" });
        this.more = element("select", { "aria-label": "Another limit", onchange: () => this.add(this.more.value, true) });
        this.why = element("p", { class: "why" });
        this.apply = element("button", { type: "submit", class: "main" }, "Apply");
        this.reset = element("button", { type: "button", onclick: () => this.discard() }, "Discard");
        this.back = element("button", { type: "button", hidden: true, onclick: () => this.takeBack() }, "Undo");
        this.result = element("p", { class: "result", role: "status" });
        this.seen = element("div", { class: "preview", "aria-live": "polite" });
        const form = element("form", { novalidate: true, onsubmit: (event) => { event.preventDefault(); this.send(this.pending()); } },
            this.list, element("p", { class: "row" }, this.more), this.why,
            element("p", { class: "row" }, this.apply, this.reset, this.back), this.result);
        this.shown = element("section", { class: "limits", "aria-labelledby": "limits-title" },
            element("h3", { id: "limits-title" }, "Limits"), element("div", { class: "sides" }, form, this.seen));
        for (const name of this.usual(node)) this.add(name, false);
        this.offer();
        this.changed();
    }

    stop() {
        this.isStopped = true;
        this.controller?.abort();
        clearTimeout(this.timer);
    }

    /// After a restart the daemon's recording of the last minutes is a different one.
    again() {
        this.changed();
    }

    usual(node) {
        const set = [...Object.keys(figures.KINDS), ...PER_GIB].filter((kind) => this.value(kind) > 0);
        const totals = ["iops", "bps"].filter((unit) => !set.some((kind) => kind.startsWith(unit))).map((unit) => `${unit}-total`);
        const others = Object.keys(OTHERS).filter((name) => name === "weight" ? this.store.above(node) !== null : name in TEXTS ? this.value(name) !== "" : this.value(name) > 0);
        return [...[...Object.keys(figures.KINDS), ...PER_GIB].filter((kind) => set.includes(kind) || totals.includes(kind)).sort((a, b) => b.startsWith("iops") - a.startsWith("iops")), ...others];
    }

    /// Settings as configured.
    value(name) {
        const node = this.node;
        if (name === "weight") return node.weight ?? 100;
        if (name in TEXTS) return node[name] ?? "";
        if (name.endsWith("-reservation") || name === "watermark") return node[name] ?? 0;
        return (node["configured-limits"] ?? node.limits)?.[name] ?? 0;
    }

    /// Limits that can still be added.
    offer() {
        const kinds = Object.keys(figures.KINDS).filter((kind) => !this.fields.has(kind)).sort((a, b) => b.startsWith("iops") - a.startsWith("iops"));
        const perGib = this.node.kind === "disk" ? PER_GIB.filter((kind) => !this.fields.has(kind)) : [];
        const others = Object.keys(OTHERS).filter((name) => !this.fields.has(name) && OTHERS[name].includes(this.node.kind));
        this.more.replaceChildren(element("option", { value: "" }, "Another limit…"), ...[...kinds, ...perGib, ...others].map((name) => element("option", { value: name }, name)));
    }

    add(name, isRequested) {
        if (name === "" || this.fields.has(name)) return;
        const row = name in figures.KINDS ? this.rate(name) : PER_GIB.includes(name) ? this.perGib(name) : this.other(name);
        this.list.append(row);
        if (!isRequested) return;
        this.offer();
        this.more.value = "";
        this.fields.get(name).focus();
    }

    /// Scrolls to the field of a limit and focuses it.
    reach(name) {
        if (!(name in figures.KINDS)) return;
        this.add(name, true);
        const field = this.fields.get(name);
        field.scrollIntoView({ block: "center" });
        field.focus({ preventScroll: true });
    }

    field(name, label) {
        const input = element("input", {
            type: "text", inputmode: figures.countsBytes(name) || name in TEXTS ? "text" : "numeric", name, autocomplete: "off", spellcheck: "false",
            "aria-label": name, title: label, size: "7", placeholder: name === "weight" ? "100" : name in TEXTS && name !== "latency-target" ? TEXTS[name] : "none", oninput: () => this.touched(name),
        });
        input.value = this.typed(name, this.value(name));
        this.fields.set(name, input);
        return input;
    }

    typed(name, value) {
        if (name in TEXTS) return value;
        return value === 0 || value === 1 && name.endsWith("-length") ? "" : figures.exact(name, value);
    }

    rate(kind) {
        const unit = kind.split("-")[0];
        const slider = element("input", { type: "range", min: "0", max: String(PLACES), "aria-label": `${kind}, slider`, oninput: () => this.slid(kind) });
        const rate = this.field(kind, unit === "iops" ? "operations per second" : "bytes per second, such as 10M");
        const row = element("div", { class: "setting" }, element("span", { class: "label", "aria-hidden": "true" }, kind), slider, rate,
            element("span", { class: "burst" }, element("span", { "aria-hidden": "true" }, "↑"), this.field(`${kind}-max`, "burst rate, after idle time"),
                element("span", { "aria-hidden": "true" }, "×"), this.field(`${kind}-max-length`, "burst length in seconds; a full burst lasts longer: length × ↑ ÷ (↑ − rate)"), element("span", { "aria-hidden": "true" }, "s")));
        rate.slider = slider;
        this.toSlider(kind);
        return row;
    }

    perGib(name) {
        const unit = figures.countsBytes(name) ? "bytes per second" : "operations per second";
        return element("div", { class: "setting is-plain" }, element("span", { class: "label", "aria-hidden": "true" }, name), this.field(name, `${unit} for each GiB of the disk`),
            element("span", { class: "note" }, "at least ", this.field(`${name}-min`, `${unit}, however small the disk is`), " at most ", this.field(`${name}-max`, `${unit}, however large the disk is`)));
    }

    other(name) {
        return element("div", { class: "setting is-plain" }, element("span", { class: "label", "aria-hidden": "true" }, name), this.field(name, NOTES[name]),
            element("span", { class: "note" }, `${UNITS[name] ?? ""} ${NOTES[name]}`.trim()));
    }

    /// Range of a slider: four times the measured or configured value.
    range(kind) {
        const unit = kind.split("-")[0];
        return [LOWEST[unit], Math.max(AT_LEAST[unit], 4 * this.peak[unit], 4 * this.value(kind))];
    }

    toSlider(kind) {
        const input = this.fields.get(kind);
        const [low, high] = this.range(kind);
        const value = figures.parsed(kind, input.value) ?? 0;
        const place = value > 0 ? 1 + (PLACES - 1) * Math.log(Math.max(value, low) / low) / Math.log(high / low) : 0;
        input.slider.value = String(Math.round(Math.min(PLACES, place)));
        attribute(input.slider, "aria-valuetext", value > 0 ? `${figures.exact(kind, value)} a second` : "no limit");
    }

    slid(kind) {
        const input = this.fields.get(kind);
        const place = Number(input.slider.value);
        const [low, high] = this.range(kind);
        input.value = place === 0 ? "" : figures.exact(kind, round(low * (high / low) ** ((place - 1) / (PLACES - 1)), figures.countsBytes(kind)));
        this.touched(kind);
    }

    touched(name) {
        if (this.fields.get(name).slider) this.toSlider(name);
        // Error of the previous input.
        if (this.result.classList.contains("wrong")) say(this.result, "");
        this.changed();
    }

    /// Measured rates, for the ranges of sliders.
    setPeak(history) {
        const most = (key) => (history.series[key] ?? []).reduce((most, value) => Math.max(most, value ?? 0), 0);
        this.peak = { iops: most("read-iops") + most("write-iops"), bps: most("read-bps") + most("write-bps") };
    }

    /// Values that differ from those in force. Text that is not a number is sent to the daemon unchanged.
    pending() {
        const pending = {};
        for (const [name, input] of this.fields) {
            const now = this.value(name);
            if (name in TEXTS) {
                if (input.value.trim() !== now) pending[name] = input.value.trim() || TEXTS[name];
                continue;
            }
            const value = figures.parsed(name, input.value);
            const plain = input.value.trim() === "" ? name === "weight" ? 100 : 0 : value;
            const isSame = plain === now || name.endsWith("-length") && (plain || 1) === (now || 1);
            if (!isSame) pending[name] = plain ?? input.value.trim();
        }
        return pending;
    }

    /// Updates the node's figures. Fields that are not being edited follow the values in force.
    write(node) {
        const edited = new Set(Object.keys(this.lastPending ?? {}));
        const was = this.forced;
        this.node = node;
        this.forced = JSON.stringify([node.limits, node["configured-limits"], ...Object.keys(OTHERS).map((name) => node[name])]);
        const access = this.store.access;
        if (was !== undefined && was !== this.forced) {
            for (const kind of [...Object.keys(figures.KINDS), ...PER_GIB]) if (this.value(kind) > 0) this.add(kind, false);
            this.offer();
            for (const [name, input] of this.fields) {
                if (!edited.has(name)) input.value = this.typed(name, this.value(name));
                if (input.slider) this.toSlider(name);
            }
            this.changed();
        } else if (access !== this.access) this.changed();
        this.access = access;
    }

    discard() {
        for (const [name, input] of this.fields) {
            input.value = this.typed(name, this.value(name));
            if (input.slider) this.toSlider(name);
        }
        say(this.result, "");
        this.changed();
    }

    /// Called when a pending value changed.
    changed() {
        const pending = this.pending();
        this.lastPending = pending;
        const names = Object.keys(pending);
        const canChange = this.store.access === "change";
        this.more.disabled = !canChange;
        for (const [name, input] of this.fields) {
            input.classList.toggle("is-pending", name in pending);
            input.disabled = !canChange;
            if (input.slider) input.slider.disabled = !canChange;
        }
        this.apply.disabled = !canChange || names.length === 0;
        this.reset.disabled = names.length === 0;
        say(this.why, canChange ? "" : "Read-only: the daemon was started without --http-token-file.");
        this.onPending();
        this.waits = false;
        clearTimeout(this.timer);
        this.controller?.abort();
        if (names.length) this.timer = setTimeout(() => this.preview(pending), STILL_MS);
        else this.seen.replaceChildren(element("p", { class: "hint" }, !canChange ? "With a token, this shows the effect of changed limits on recent requests." : "Move a slider or type a number: the simulated effect on the last minutes is shown here before it is applied."));
    }

    async preview(pending, using = token()) {
        const controller = this.controller = new AbortController();
        this.seen.classList.add("is-old");
        try {
            const result = await ask("POST", `${place(this.node)}/preview`, { body: pending, using, signal: controller.signal });
            if (!controller.signal.aborted) this.seen.replaceChildren(...previewTable(result, pending, this));
        } catch (error) {
            if (controller.signal.aborted) return;
            if (error.status === BUSY) {
                this.timer = setTimeout(() => this.preview(pending), AGAIN_MS);
                return;
            }
            const needs = this.waits = error instanceof Refused && error.isAboutToken;
            this.seen.replaceChildren(element("p", { class: "wrong" }, needs ? using ? `The token is wrong: ${error.message}` : "The preview needs the daemon's token." : error.message));
            if (needs) this.seen.append(element("button", { type: "button", onclick: () => this.enter() }, "Enter the token"));
            if (error.status === SILENT) this.timer = setTimeout(() => this.preview(pending), LATER_MS);
        }
        this.seen.classList.remove("is-old");
    }

    /// Asks for the token first, then for the preview.
    async enter() {
        await this.token.right(this.node);
        this.changed();
        this.apply.focus();
    }

    /// Applies all changes together; asks for the token if there is none.
    async send(pending, isUndo = false) {
        const names = Object.keys(pending);
        if (!names.length || this.apply.disabled && !isUndo) return;
        const before = Object.fromEntries(names.map((name) => [name, this.value(name) === "" ? TEXTS[name] : this.value(name)]));
        const isPressed = [this.apply, this.back].includes(document.activeElement);
        try {
            const updated = await this.token.with((using) => ask("PATCH", `${place(this.node)}/limits`, { body: pending, using }));
            if (updated === undefined || this.isStopped) return; // The dialog for the token was cancelled.
            // Shown until the stream reports the same.
            Object.assign(this.node, updated);
            for (const name of names) this.fields.get(name).value = this.typed(name, this.value(name));
            this.lastPending = {};
            this.write(this.node);
            for (const [name, input] of this.fields) if (input.slider) this.toSlider(name);
            this.changed();
            this.undo = isUndo ? null : before;
            this.back.hidden = isUndo;
            // A disabled button loses the focus. The active element is no reliable sign: the stream may have reported
            // the change while the dialog for the token was open.
            if (isPressed) (isUndo ? this.fields.get(names[0]) : this.back).focus();
            const text = names.map((name) => `${name} ${this.settingText(name, before[name])} → ${this.settingText(name, this.value(name))}`).join(", ");
            this.result.className = "result";
            say(this.result, `In force: ${text}`);
        } catch (error) {
            this.result.className = "result wrong";
            say(this.result, error.message);
        }
    }

    settingText(name, value) {
        if (name === "latency-target" && (value || "0") === "0") return "none";
        if (name in TEXTS) return value || TEXTS[name];
        return value === 0 ? "none" : figures.exact(name, value);
    }

    takeBack() {
        if (this.undo) this.send(this.undo, true);
    }
}

/// Two digits, and whole units for bytes, so that a slider yields round numbers.
function round(value, isBytes) {
    const unit = isBytes ? 1024 ** Math.floor(Math.log(value) / Math.log(1024)) : 1;
    const power = 10 ** Math.max(0, Math.floor(Math.log10(value / unit)) - 1);
    return Math.round(value / unit / power) * power * unit;
}

/// Figures as recorded and with the pending values.
function previewTable(result, pending, of) {
    const changes = Object.entries(pending).map(([name, value]) => `${name} ${of.settingText(name, of.value(name))} → ${typeof value === "number" ? of.settingText(name, value) : value}`).join(", ");
    const { requests, seconds } = result ?? {};
    const [now, then] = [result?.now ?? {}, result?.then ?? {}];
    // The recording may be shorter than ten minutes, after more requests than it can hold.
    const span = typeof seconds !== "number" ? null : seconds < 120 ? `${Math.round(seconds)}s` : figures.age(seconds * 1000);
    const others = result?.others;
    if (!requests) return [element("p", { class: "hint" }, `It had no requests ${span === null ? "lately" : `in the last ${span}`}, so there is nothing to simulate.`), element("p", { class: "hint" }, changes)];
    const row = (now, then, prefix) => ([key, title, show]) => {
        const [one, other] = [show(now[key]), show(then[key])];
        const isBad = key !== "iops" && key !== "bps" && then[key] > now[key] * 1.1 && one !== other;
        return element("tr", {}, element("th", { scope: "row" }, prefix + title), element("td", {}, one), element("td", { class: one === other ? "" : isBad ? "worse" : "other" }, other));
    };
    const rows = PREVIEW_ROWS.filter(([key]) => now[key] != null || then[key] != null).map(row(now, then, ""));
    // Disks that a latency target throttles, or protects from this one.
    if (others?.now || others?.then) rows.push(...PREVIEW_ROWS.filter(([key]) => OF_OTHERS.includes(key)).map(row(others.now ?? {}, others.then ?? {}, "others on its device: ")));
    return [element("table", {}, element("caption", {}, `${figures.count(requests)} requests of the last ${span}, measured, and simulated with ${changes}`),
        element("thead", {}, element("tr", {}, element("td", {}), element("th", { scope: "col" }, "now"), element("th", { scope: "col" }, "then"))),
        element("tbody", {}, ...rows))];
}
