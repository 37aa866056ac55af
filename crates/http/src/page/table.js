// A history as a table, for readers who cannot see the charts or need the figures.

import { element } from "./element.js";
import * as figures from "./figures.js";

/// Number of rows; each is the mean of its part.
const PARTS = 12;

const COLUMNS = [
    ["read-iops", "reads/s", figures.count], ["write-iops", "writes/s", figures.count],
    ["read-bps", "READ/s", figures.bytes], ["write-bps", "WRITE/s", figures.bytes],
    ["latency-p50-ns", "P50", figures.time], ["latency-p99-ns", "P99", figures.time],
    ["waiting-requests", "WAIT", figures.count], ["wait-ratio", "HELD", figures.share], ["burst-balance-ratio", "burst left", figures.share],
    ["read-ahead-hit-rate", "read ahead", figures.share], ["l2-cache-hit-rate", "cache", figures.share],
];

const known = (values) => values.filter((value) => value !== null);
const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

/// Table of a history, newest part first.
export function series(history) {
    const columns = COLUMNS.filter(([key]) => known(history.series[key] ?? []).length);
    const total = history.span_ms / history.step_ms;
    const row = (name, figure) => element("tr", {}, element("th", { scope: "row" }, name),
        ...columns.map(([key, , show]) => element("td", {}, show(figure(history.series[key])))));
    const parts = [];
    for (let part = PARTS - 1; part >= 0; part -= 1) {
        // The span ends where the history does, and may begin before it.
        const [from, to] = [part, part + 1].map((at) => Math.max(0, Math.round(history.steps - total + at * total / PARTS)));
        if (to > from) {
            const name = `${figures.clock(history.start_ms + from * history.step_ms)} – ${figures.clock(history.start_ms + to * history.step_ms)}`;
            parts.push(row(name, (values) => mean(known(values.slice(from, to)))));
        }
    }
    const highest = row("highest", (values) => known(values).reduce((most, value) => Math.max(most, value), 0));
    return element("table", {}, element("caption", {}, "Means of each part, the newest first"),
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "time"), ...columns.map(([, title]) => element("th", { scope: "col" }, title)))),
        element("tbody", {}, highest, ...parts));
}
