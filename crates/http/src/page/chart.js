// Line charts with limits, and latencies as a heat map. On canvas: a few hundred lines of code instead
// of a library and its licence.
//
// A canvas is opaque to a screen reader, so each chart has a sentence that describes it, and the page
// has the same data as a table.

import { ROOM, colours, frame, instants, point, prepare, ticks } from "./axes.js";
import { attribute, element, say } from "./element.js";
import { clock, time } from "./figures.js";

/// Fraction of the fullest cell's requests at which a cell is faintest.
const HALVINGS = 14;

/// Below this span, the times below a chart have seconds.
const WITH_SECONDS_MS = 180_000;
/// Limits further above all measured values are left out, or the values would be flattened.
const FAR = 4;

class Chart {
    constructor(title, note, cursor) {
        this.cursor = cursor;
        this.canvas = element("canvas", { role: "img" });
        this.legend = element("p", { class: "legend" });
        this.title = title;
        this.shown = element("figure", {}, element("figcaption", {}, element("h3", { title: note }, title), this.legend), this.canvas);
        this.history = null;
        new ResizeObserver(() => this.draw()).observe(this.canvas);
        cursor.listen(() => this.draw());
        cursor.follow(this.canvas, (place) => this.instant(place));
    }

    set(history) {
        this.history = history;
        this.draw();
    }

    bounds(width) {
        const { end_ms, span_ms } = this.history;
        const from = end_ms - span_ms;
        const scale = (width - ROOM.left - ROOM.right) / span_ms;
        return { from, x: (at) => ROOM.left + (at - from) * scale, scale };
    }

    instant(place) {
        if (!this.history) return null;
        const { from, scale } = this.bounds(this.canvas.clientWidth);
        const at = from + (place - ROOM.left) / scale;
        return at < from || at > this.history.end_ms ? null : at;
    }

    times(width) {
        return instants(this.bounds(width).from, this.history.end_ms, Math.max(2, Math.floor(width / 80)));
    }

    /// Time of day below the chart.
    clock(at) {
        return clock(at, this.history.span_ms < WITH_SECONDS_MS);
    }

    /// Value of a series at the cursor, or its last one.
    value(series) {
        const { start_ms, step_ms } = this.history;
        const index = this.cursor.at === null ? series.length - 1 : Math.floor((this.cursor.at - start_ms) / step_ms);
        return series[index] ?? null;
    }
}

/// `series`: `[{ key, label, colour, thin }]`; `limits()`: `[{ key, label, value, colour, isBurst, isPending,
/// from, to }]`, where `from` is null if the limit was always set, and `to` is null if it is set now.
export class Lines extends Chart {
    constructor({ title, note, series, show, base = 1000, top = null, isWhole = false, limits = () => [] }, cursor) {
        super(title, note, cursor);
        Object.assign(this, { series, show, base, fixed: top, isWhole, limits, inForce: [] });
        this.legendValues = series.map(({ label, colour }) => {
            const value = element("b", {});
            this.legend.append(element("span", { class: `key key-${colour}` }, element("i", { "aria-hidden": "true" }), `${label} `, value));
            return value;
        });
        this.far = element("span", { class: "key far" });
        this.legend.append(this.far);
    }

    /// True if any value of the series is known.
    get isEmpty() {
        return !this.series.some(({ key }) => this.history?.series[key]?.some((value) => value !== null));
    }

    draw() {
        if (!this.history || !this.canvas.isConnected || this.canvas.clientWidth === 0) return;
        const { pen, width, height } = prepare(this.canvas);
        const colour = colours(this.canvas);
        const series = this.series.map(({ key }) => this.history.series[key] ?? []);
        const highest = series.reduce((most, values) => values.reduce((most, value) => Math.max(most, value ?? 0), most), 0);
        const { x, from } = this.bounds(width);
        const limits = this.limits().filter(({ value, to }) => value > 0 && (to === null || to > from));
        const near = limits.filter(({ value, isPending }) => value <= highest * FAR || isPending && highest === 0);
        const top = this.fixed ?? Math.max(this.isWhole ? 4 : 0, Math.max(highest, ...near.map(({ value }) => value)) * 1.12 || 1);
        const y = (value) => height - ROOM.bottom - value / top * (height - ROOM.top - ROOM.bottom);
        const marks = ticks(top, this.base, this.isWhole).map((value) => [value, this.show(value)]);
        frame(pen, { width, height, colour, marks, times: this.times(width), y, x, clock: (at) => this.clock(at) });
        this.series.forEach(({ colour: name, thin }, index) => this.line(pen, series[index], { x, y, colour: colour(name), thin }));
        const within = (at) => Math.min(width - ROOM.right, Math.max(ROOM.left, x(at)));
        const places = near.map(({ value, from, to }) => ({
            y: Math.round(y(value)) + 0.5,
            left: from === null ? ROOM.left : within(from),
            right: to === null ? width - ROOM.right : within(to),
        }));
        near.forEach((limit, index) => {
            const before = near.findIndex(({ key, to }) => to !== null && key === limit.key && to === limit.from);
            this.limit(pen, limit, places[index], { before: places[before], colour });
        });
        near.forEach((limit, index) => {
            if (this.isThere(limit)) this.name(pen, limit, places[index], { width, colour });
        });
        if (this.cursor.at !== null) point(pen, x(this.cursor.at), { height, colour });
        const there = limits.filter((limit) => this.isThere(limit));
        this.inForce = there.filter(({ isPending }) => !isPending).map(({ label }) => label);
        this.describe(series, there.filter((limit) => !near.includes(limit)), limits);
    }

    line(pen, values, { x, y, colour, thin }) {
        const { start_ms, step_ms } = this.history;
        pen.strokeStyle = colour;
        pen.lineWidth = thin ? 1 : 1.5;
        pen.lineJoin = "round";
        pen.beginPath();
        let isDown = false;
        for (let index = 0; index < values.length; index += 1) {
            if (values[index] === null) {
                isDown = false;
                continue;
            }
            const [at, height] = [x(start_ms + (index + 0.5) * step_ms), y(values[index])];
            if (at < ROOM.left - 1) continue;
            if (isDown) pen.lineTo(at, height);
            else pen.moveTo(at, height);
            // A single point is drawn as a dot.
            if (!isDown && (values[index + 1] ?? null) === null) pen.lineTo(at + 1, height);
            isDown = true;
        }
        pen.stroke();
    }

    /// True if a limit is set at the cursor, or now; always for a pending value.
    isThere({ from, to }) {
        const { at } = this.cursor;
        if (at === null) return to === null;
        return (from === null || from <= at) && (to === null || at < to);
    }

    /// Begins where the previous limit ended, if it follows one.
    limit(pen, { colour: name, isBurst, isPending }, { y, left, right }, { before, colour }) {
        pen.strokeStyle = colour(isPending ? "pending" : name ?? "limit");
        pen.lineWidth = isPending ? 2 : 1.25;
        pen.setLineDash(isPending ? [2, 3] : isBurst ? [2, 4] : [7, 4]);
        pen.beginPath();
        if (before) pen.moveTo(left, before.y);
        pen[before ? "lineTo" : "moveTo"](left, y);
        pen.lineTo(right, y);
        pen.stroke();
        pen.setLineDash([]);
    }

    /// At the end of its line, or at the left if the line is too short.
    name(pen, { label, colour: name, isPending }, { y, right }, { width, colour }) {
        const long = pen.measureText(label).width;
        const edge = Math.max(right - 4, Math.min(width - ROOM.right - 4, ROOM.left + 4 + long));
        pen.textAlign = isPending ? "left" : "right";
        const [at, base] = [isPending ? ROOM.left + 4 : edge, y < ROOM.top + 14 ? y + 12 : y - 4];
        // An outline in the background colour, legible over lines.
        pen.lineWidth = 3;
        pen.strokeStyle = colour("ground");
        pen.strokeText(label, at, base);
        pen.fillStyle = colour(isPending ? "pending" : name ?? "limit");
        pen.fillText(label, at, base);
    }

    describe(series, far, limits) {
        series.forEach((values, index) => say(this.legendValues[index], this.show(this.value(values))));
        say(this.far, far.length ? `far above: ${far.map(({ label }) => label).join(", ")}` : "");
        const known = series.map((values) => values.filter((value) => value !== null));
        // Series without values are not in the legend, unless all are.
        if (known.some(({ length }) => length)) known.forEach(({ length }, index) => { this.legendValues[index].parentElement.hidden = length === 0; });
        const most = (values) => values.reduce((most, value) => Math.max(most, value), 0);
        const parts = this.series.map(({ label }, index) => known[index].length
            ? `${label} ${this.show(known[index].at(-1))} now, ${this.show(most(known[index]))} at most` : `${label} not known`);
        const now = limits.filter(({ to }) => to === null).map(({ label }) => label);
        const drawn = now.length ? `; limits: ${now.join(", ")}` : "";
        attribute(this.canvas, "aria-label", `${this.title}: ${parts.join("; ")}${drawn}`);
    }
}

/// Latencies over time, darker for a larger share of the moment's requests; with p50 and p99.
export class Heat extends Chart {
    constructor({ title, note }, cursor) {
        super(title, note, cursor);
        this.percentiles = [["p50", "p50", "latency-p50-ns"], ["p99", "p99", "latency-p99-ns"]].map(([label, colour, key]) => {
            const value = element("b", {});
            this.legend.append(element("span", { class: `key key-${colour}` }, element("i", { "aria-hidden": "true" }), `${label} `, value));
            return { value, key, colour };
        });
        this.legend.append(element("span", { class: "key scale" }, "fewer ", element("i", { "aria-hidden": "true" }), " more requests"));
    }

    draw() {
        if (!this.history || !this.canvas.isConnected || this.canvas.clientWidth === 0) return;
        const { pen, width, height } = prepare(this.canvas);
        const colour = colours(this.canvas);
        const { rows, bounds_ns } = this.history.heat;
        const [low, high] = this.range(rows, bounds_ns);
        const scale = (height - ROOM.top - ROOM.bottom) / (Math.log(high) - Math.log(low));
        const y = (value) => height - ROOM.bottom - (Math.log(Math.min(high, Math.max(low, value))) - Math.log(low)) * scale;
        const { x } = this.bounds(width);
        this.cells(pen, { width, height, rows, bounds: bounds_ns, low, high, x, y, hue: colour("heat") });
        const decades = [];
        for (let power = 10 ** Math.ceil(Math.log10(low)); power <= high; power *= 10) decades.push([power, time(power)]);
        frame(pen, { width, height, colour, marks: decades, times: this.times(width), y, x, clock: (at) => this.clock(at) });
        for (const { key, colour: name } of this.percentiles) {
            Lines.prototype.line.call(this, pen, this.history.series[key] ?? [], { x, y, colour: colour(name) });
        }
        if (this.cursor.at !== null) point(pen, x(this.cursor.at), { height, colour });
        this.describe();
    }

    /// Range of latencies that is drawn: slightly more than all that occurred.
    range(rows, bounds) {
        let [first, last] = [Infinity, -Infinity];
        for (const row of rows) {
            row?.forEach((requests, index) => {
                if (requests > 0) [first, last] = [Math.min(first, index), Math.max(last, index)];
            });
        }
        const known = this.percentiles.flatMap(({ key }) => (this.history.series[key] ?? []).filter((value) => value > 0));
        const lows = [...known, ...first < Infinity && bounds.length ? [bounds[Math.max(0, first - 1)]] : []];
        const highs = [...known, ...last >= 0 && bounds.length ? [bounds[Math.min(bounds.length - 1, last)]] : []];
        const low = Math.max(1000, lows.reduce((a, b) => Math.min(a, b), lows.length ? Infinity : 1e5));
        const high = highs.reduce((a, b) => Math.max(a, b), highs.length ? 0 : 1e8);
        return [low / 1.5, Math.max(high * 1.5, low * 20)];
    }

    /// Tens of thousands of cells: drawn once, and copied while the cursor moves.
    cells(pen, { width, height, hue, ...of }) {
        const { canvas } = pen;
        const made = [this.history, canvas.width, canvas.height, hue];
        if (this.made?.some((one, index) => one !== made[index]) ?? true) {
            this.made = made;
            this.fields = new OffscreenCanvas(canvas.width, canvas.height);
            const fields = this.fields.getContext("2d");
            fields.scale(canvas.width / width, canvas.height / height);
            this.fill(fields, { hue, ...of });
        }
        pen.drawImage(this.fields, 0, 0, width, height);
    }

    fill(pen, { rows, bounds, low, high, x, y, hue }) {
        const { start_ms, step_ms } = this.history.heat;
        pen.fillStyle = hue;
        rows.forEach((row, step) => {
            const most = row?.reduce((a, b) => Math.max(a, b ?? 0), 0) ?? 0;
            if (!most) return;
            // The newest column is incomplete: it ends at the chart's end.
            const [from, to] = [Math.max(ROOM.left, x(start_ms + step * step_ms)), Math.min(x(this.history.end_ms), x(start_ms + (step + 1) * step_ms))];
            if (to <= from) return;
            const wide = Math.max(1, to - from + 0.2);
            row.forEach((requests, index) => {
                if (!requests) return;
                const [top, bottom] = [y(bounds[index] ?? high), y(index ? bounds[index - 1] : low)];
                // A few requests beside many have to be visible: they are the tail.
                pen.globalAlpha = 0.07 + 0.83 * Math.max(0, 1 - Math.log2(most / requests) / HALVINGS) ** 2;
                pen.fillRect(from, top, wide, Math.max(1, bottom - top));
            });
        });
    }

    describe() {
        const parts = this.percentiles.map(({ value, key, colour }) => {
            const values = this.history.series[key] ?? [];
            say(value, time(this.value(values)));
            const known = values.filter((one) => one !== null);
            return known.length ? `${colour} ${time(known.at(-1))} now, ${time(Math.max(...known))} at most` : `${colour} not known`;
        });
        attribute(this.canvas, "aria-label", `${this.title}: ${parts.join("; ")}`);
    }
}
