// Disks and groups as a tree with live figures, the most throttled first.
//
// There may be thousands of rows; elements exist only for those in sight. Elements are reused, and a
// figure is written only if it changed. The order is updated every few seconds and not under the
// pointer, so that a click cannot hit a row that has just moved there.
//
// One widget for the keyboard (ARIA's treegrid): it has the focus and refers to the current row.

import { attribute, element, say } from "./element.js";
import * as figures from "./figures.js";
import { Store, binding, held, isHeld, operations, transferred } from "./store.js";

const REORDER_MS = 3000;
/// Rows that exist beyond the visible ones.
const MARGIN = 6;
/// Time within which typed letters are combined.
const TYPING_MS = 800;

/// Column: heading, content, and sort key; `wide` columns are hidden on phones.
const COLUMNS = [
    { id: "name", title: "NAME" },
    { id: "iops", title: "IOPS", of: operations, show: figures.count, says: "operations per second" },
    { id: "read", title: "READ/s", of: (node) => node["read-bps"], show: figures.bytes, says: "bytes read per second" },
    { id: "write", title: "WRITE/s", of: (node) => node["write-bps"], show: figures.bytes, says: "bytes written per second" },
    { id: "wait", title: "WAIT", of: (node) => node["waiting-requests"], show: (value) => value == null ? "-" : String(value), says: "requests that are throttled now" },
    { id: "held", title: "HELD", of: (node) => node["wait-ratio"], show: figures.share, says: "fraction of the last second in which requests were throttled" },
    { id: "p99", title: "P99", of: (node) => node["latency-p99-ns"], show: figures.time, says: "latency that 99 of 100 of the last second's requests stayed below" },
    { id: "limits", title: "HELD BY" },
];

export class Tree {
    /// `leave` is called when the keyboard moves up from the first row.
    constructor(host, store, choose, leave) {
        Object.assign(this, { host, store, choose, leave });
        this.sort = { column: "held", reversed: false };
        this.filter = "";
        this.closed = new Set();
        this.rows = [];
        this.at = new Map();
        this.elements = new Map();
        this.free = [];
        this.ids = new Map();
        [this.active, this.chosen] = [null, null];
        [this.shape, this.orderedMs, this.isPointed] = [-1, 0, false];
        [this.typed, this.typedMs] = ["", 0];
        this.build();
    }

    build() {
        this.headings = COLUMNS.map((column) => {
            const text = element("span", {}, column.title);
            const sorts = column.id === "limits" ? text
                : element("button", { type: "button", title: column.says, onclick: () => this.sortBy(column.id) }, text);
            return element("div", { role: "columnheader", class: `c-${column.id}` }, sorts);
        });
        this.body = element("div", { role: "rowgroup", class: "rows" });
        this.empty = element("p", { class: "nothing", hidden: true });
        const head = element("div", { role: "rowgroup", class: "head" },
            element("div", { role: "row", "aria-rowindex": "1", class: "row" }, ...this.headings));
        this.grid = element("div", {
            role: "treegrid", tabindex: "0", "aria-label": "Disks and groups", "aria-colcount": COLUMNS.length,
            onkeydown: (event) => this.press(event), onscroll: () => this.place(),
            onpointerenter: () => { this.isPointed = true; }, onpointerleave: () => { this.isPointed = false; },
            onfocus: () => { if (!this.at.has(this.active)) this.go(0); },
        }, head, this.body);
        this.body.addEventListener("click", (event) => this.click(event));
        this.host.append(this.grid, this.empty);
        new ResizeObserver(() => this.place()).observe(this.grid);
        this.markSort();
    }

    sortBy(column) {
        const isSame = this.sort.column === column;
        this.sort = { column, reversed: isSame && !this.sort.reversed };
        this.markSort();
        this.order();
    }

    markSort() {
        COLUMNS.forEach(({ id }, index) => {
            const isSorted = this.sort.column === id;
            const ascends = (id === "name") !== this.sort.reversed;
            attribute(this.headings[index], "aria-sort", isSorted ? ascends ? "ascending" : "descending" : null);
        });
    }

    setFilter(text) {
        this.filter = text.trim().toLowerCase();
        this.order();
    }

    /// Key of the row to mark as selected, which may have no element. Keyboard navigation moves there if the
    /// user selected it.
    mark(key, isAsked = true) {
        this.chosen = key;
        if (isAsked) {
            this.active = key ?? this.active;
            this.reveal(key);
        }
        this.place();
    }

    /// Called when figures have changed.
    update() {
        const isNew = this.shape !== this.store.shape;
        const isOld = Date.now() - this.orderedMs > REORDER_MS && !this.isPointed;
        if (isNew || isOld) this.order();
        else this.place();
    }

    /// All rows in order, without those that are collapsed or filtered out.
    order() {
        [this.shape, this.orderedMs] = [this.store.shape, Date.now()];
        const below = new Map();
        for (const node of this.store.nodes.values()) {
            const above = this.store.groupsAbove(node)[0]?.key ?? null;
            if (!below.has(above)) below.set(above, []);
            below.get(above).push(node);
        }
        const column = COLUMNS.find(({ id }) => id === this.sort.column);
        const worst = new Map();
        const value = (node) => {
            if (!worst.has(node.key)) {
                worst.set(node.key, 0); // A circle of groups ends here.
                const own = column.of?.(node) ?? 0;
                const members = node.kind === "group" ? below.get(node.key) ?? [] : [];
                worst.set(node.key, members.reduce((most, member) => Math.max(most, value(member)), own));
            }
            return worst.get(node.key);
        };
        // Compared as displayed: otherwise rows of a busy host would never stop moving.
        const rank = (node) => column.id === "held" ? Math.round(value(node) * 20) : value(node);
        const byName = (a, b) => a.name < b.name ? -1 : a.name > b.name ? 1 : 0;
        const compare = (a, b) => {
            const by = column.of ? rank(b) - rank(a) || (column.id === "held" ? (operations(b) ?? 0) - (operations(a) ?? 0) : 0) : byName(a, b);
            return (this.sort.reversed ? -by : by) || byName(a, b);
        };
        this.rows = [];
        this.walk(below, null, 1, compare, false);
        this.at = new Map(this.rows.map((row, index) => [row.node.key, index]));
        attribute(this.grid, "aria-rowcount", this.rows.length + 1);
        this.body.style.height = `${this.rows.length * this.height()}px`;
        this.empty.hidden = this.rows.length > 0;
        // Nothing is known before the first overview.
        const none = !this.store.isKnown ? "Loading …" : "No disks or groups.";
        say(this.empty, this.filter ? "No disk or group matches." : none);
        this.place();
    }

    /// True if anything at or below `above` is shown.
    walk(below, above, level, compare, isWanted) {
        const members = [...below.get(above) ?? []].sort(compare);
        const shown = [];
        for (const node of members) {
            const fits = isWanted || this.filter === "" || node.name.toLowerCase().includes(this.filter);
            const row = { node, level, fits, holds: node.kind === "group" && below.has(node.key) };
            const start = this.rows.length;
            this.rows.push(row);
            row.isOpen = row.holds && (this.filter !== "" || !this.closed.has(node.key));
            // A collapsed group is searched for the filter as well, and is expanded then.
            const found = row.isOpen && level < 64 ? this.walk(below, node.key, level + 1, compare, fits && this.filter !== "") : false;
            if (fits || found) shown.push(row);
            else this.rows.length = start;
        }
        shown.forEach((row, index) => Object.assign(row, { position: index + 1, of: shown.length }));
        return shown.length > 0;
    }

    height() {
        return parseFloat(getComputedStyle(this.body).getPropertyValue("--row")) || 26;
    }

    /// Positions the visible rows and writes their figures.
    place() {
        const height = this.height();
        const head = this.grid.firstChild.offsetHeight;
        const first = Math.max(0, Math.floor(this.grid.scrollTop / height) - MARGIN);
        const last = Math.min(this.rows.length, Math.ceil((this.grid.scrollTop + this.grid.clientHeight - head) / height) + MARGIN);
        const wanted = new Map();
        for (let index = first; index < last; index += 1) wanted.set(this.rows[index].node.key, index);
        // The current row of the keyboard always exists, because its id is referenced.
        if (this.at.has(this.active)) wanted.set(this.active, this.at.get(this.active));
        for (const [key, made] of this.elements) {
            if (!wanted.has(key)) {
                this.elements.delete(key);
                this.free.push(made);
                made.row.hidden = true;
                made.row.removeAttribute("id");
            }
        }
        for (const [key, index] of wanted) {
            let made = this.elements.get(key);
            if (!made) this.elements.set(key, made = this.free.pop() ?? this.make());
            this.write(made, this.rows[index], index, height);
        }
        attribute(this.grid, "aria-activedescendant", this.at.has(this.active) ? this.id(this.active) : null);
    }

    id(key) {
        if (!this.ids.has(key)) this.ids.set(key, `row-${this.ids.size}`);
        return this.ids.get(key);
    }

    make() {
        const cells = COLUMNS.map(({ id }) => element("div", { role: "gridcell", class: `c-${id}` }));
        const [twist, name, kind] = [element("span", { class: "twist", "aria-hidden": "true" }), element("span", { class: "name" }), element("span", { class: "unseen" })];
        cells[0].append(twist, name, kind);
        const [bar, share] = [element("span", { class: "share" }), element("span", {})];
        cells[COLUMNS.findIndex(({ id }) => id === "held")].append(bar, share);
        const limit = new LimitCell(cells[cells.length - 1]);
        const row = element("div", { role: "row", class: "row" }, ...cells);
        this.body.append(row);
        return { row, cells, twist, name, kind, bar, share, limit };
    }

    write(made, { node, level, holds, isOpen, position, of }, index, height) {
        const { row, cells } = made;
        row.hidden = false;
        row.dataset.key = node.key;
        row.style.transform = `translateY(${index * height}px)`;
        for (const [name, value] of [
            ["id", this.id(node.key)], ["aria-rowindex", index + 2], ["aria-level", level], ["aria-posinset", position], ["aria-setsize", of],
            ["aria-expanded", holds ? String(isOpen) : null], ["aria-selected", String(node.key === this.chosen)],
        ]) attribute(row, name, value);
        row.className = ["row", node.kind, isHeld(node) && "is-held", node.stopped && "is-stopped", node.key === this.active && "is-active"].filter(Boolean).join(" ");
        row.style.setProperty("--level", level - 1);
        say(made.twist, holds ? isOpen ? "▾" : "▸" : "");
        say(made.name, node.name);
        attribute(made.name, "title", node.name);
        say(made.kind, node.kind === "group" ? ", group" : node.stopped ? ", stopped" : "");
        COLUMNS.forEach(({ id, of: figure, show }, column) => {
            if (!figure) return;
            const value = figure(node);
            if (id === "held") {
                made.bar.style.width = `${Math.min(1, Math.max(0, value ?? 0)) * 100}%`;
                say(made.share, show(value));
            } else say(cells[column], show(value));
        });
        made.limit.write(node, this.grid.clientWidth);
    }

    click(event) {
        const row = event.target.closest("[data-key]");
        if (!row) return;
        const key = row.dataset.key;
        this.active = key;
        if (event.target.closest(".twist") && this.toggle(key)) return;
        this.choose(key);
    }

    /// Expands or collapses a group.
    toggle(key, open = this.closed.has(key)) {
        const row = this.rows[this.at.get(key)];
        if (!row?.holds || this.filter !== "") return false;
        if (open) this.closed.delete(key);
        else this.closed.add(key);
        this.order();
        return true;
    }

    go(index) {
        if (!this.rows.length) return;
        this.active = this.rows[Math.min(this.rows.length - 1, Math.max(0, index))].node.key;
        this.reveal(this.active);
        this.place();
    }

    /// Moves to the first row that matches the filter; rows above are shown for its sake.
    goToFirst() {
        this.go(this.rows.findIndex(({ fits }) => fits));
    }

    reveal(key) {
        const index = this.at.get(key);
        if (index === undefined) return;
        const height = this.height();
        const room = this.grid.clientHeight - this.grid.firstChild.offsetHeight;
        const top = index * height;
        if (top < this.grid.scrollTop) this.grid.scrollTop = top;
        else if (top + height > this.grid.scrollTop + room) this.grid.scrollTop = top + height - room;
    }

    press(event) {
        if (event.altKey || event.ctrlKey || event.metaKey || event.target !== this.grid) return;
        const index = this.at.get(this.active) ?? 0;
        const row = this.rows[index];
        if (!row) return;
        const page = Math.max(1, Math.floor(this.grid.clientHeight / this.height()) - 2);
        const parent = () => this.rows.findLastIndex((other, at) => at < index && other.level < row.level);
        const act = {
            ArrowDown: () => this.go(index + 1), ArrowUp: () => index === 0 ? this.leave() : this.go(index - 1),
            PageDown: () => this.go(index + page), PageUp: () => this.go(index - page),
            Home: () => this.go(0), End: () => this.go(this.rows.length - 1),
            Enter: () => this.choose(row.node.key, true), " ": () => this.choose(row.node.key, true),
            ArrowRight: () => { if (row.holds) row.isOpen ? this.go(index + 1) : this.toggle(row.node.key, true); },
            ArrowLeft: () => { if (!(row.isOpen && this.toggle(row.node.key, false)) && row.level > 1) this.go(parent()); },
        }[event.key];
        if (act) act();
        else if (event.key.length === 1 && event.key !== "/") this.type(event.key, index);
        else return;
        event.preventDefault();
    }

    /// Moves to the next row whose name begins with the typed text.
    type(letter, index) {
        const now = Date.now();
        this.typed = (now - this.typedMs < TYPING_MS ? this.typed : "") + letter.toLowerCase();
        this.typedMs = now;
        const start = this.typed.length > 1 ? index : index + 1;
        const order = [...this.rows.keys()].map((step) => (start + step) % this.rows.length);
        const found = order.find((at) => this.rows[at].node.name.toLowerCase().startsWith(this.typed));
        if (found !== undefined) this.go(found);
    }
}

/// Visible part of a row's limits. A figure is shown whole or not at all. The name of a group may be
/// truncated, and a mark stands for figures that do not fit.
class LimitCell {
    constructor(cell) {
        Object.assign(this, { cell, whose: element("span", { class: "whose" }), parts: element("span", { class: "parts" }), seen: null });
        cell.append(this.whose, this.parts);
    }

    write(node, width) {
        const by = node.stopped ? null : held(node, true);
        const limits = node.stopped ? [["stopped"]] : by ? [[by.limit]] : figures.limitParts(node.limits);
        const seen = JSON.stringify([by?.whose, limits, width]);
        if (seen === this.seen) return;
        this.seen = seen;
        const isSet = !by && !node.stopped;
        say(this.whose, by?.whose ? `${by.whose}: ` : "");
        this.parts.replaceChildren(...limits.flatMap((parts, at) => [
            at > 0 ? ", " : "", ...parts.filter(Boolean).flatMap((part) => [element("span", {}, part), element("wbr")]),
        ]));
        attribute(this.cell, "title", by ? binding(node) : limits.length ? this.cell.textContent : null);
        this.cell.toggleAttribute("data-none", limits.length === 0);
        this.cell.classList.toggle("is-set", isSet);
        this.cell.toggleAttribute("data-more", isSet && this.parts.scrollHeight > this.parts.clientHeight + 2);
    }
}

/// Sums of all disks, in one line.
export function sums(store) {
    const disks = store.disks();
    const total = (of) => disks.reduce((sum, disk) => sum + (of(disk) ?? 0), 0);
    const held = disks.filter(isHeld).length;
    const stopped = disks.filter(({ stopped }) => stopped).length;
    const groups = store.nodes.size - disks.length;
    return [
        figures.several(disks.length, "disk"), groups ? figures.several(groups, "group") : null,
        `${figures.count(total(operations))} IOPS`, `${figures.bytes(total(transferred))}/s`,
        held ? `${held} held` : "none held", stopped ? `${stopped} stopped` : null,
    ].filter(Boolean).join(" · ");
}
