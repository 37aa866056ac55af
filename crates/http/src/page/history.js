// History of the selected disk or group: requested once as a whole, then only new steps.
//
// The daemon keeps steps of 1 s for 10 minutes, 10 s for 2 hours, 1 min for 2 days. A step that it
// returns again replaces the stored one; an unknown step is a gap. The limits of the whole span are
// returned each time.

import { ask, place } from "./api.js";

/// Spans that can be selected: length, the daemon's span that contains it, and label.
export const SPANS = {
    "1m": { span_ms: 60_000, kept: "10m", title: "1 min" },
    "10m": { span_ms: 600_000, kept: "10m", title: "10 min" },
    "2h": { span_ms: 7_200_000, kept: "2h", title: "2 h" },
    "2d": { span_ms: 172_800_000, kept: "2d", title: "2 days" },
};
const LEAST_SPAN_MS = 60_000;
/// Least and greatest interval between requests.
const BETWEEN_MS = [1000, 15_000];
/// Error for a daemon whose response does not match the request.
const MOST_STEPS = 10_000;

/// Normalizes a response for drawing: every series has every step. The heat map may have separate steps.
function read(response, span_ms) {
    const { "step-ms": step_ms, "start-ms": start_ms = 0 } = response;
    const steps = Math.min(MOST_STEPS, Math.max(0, ...Object.values(response.series ?? {}).map((values) => values?.length ?? 0)));
    const series = {};
    for (const [name, values] of Object.entries(response.series ?? {})) {
        series[name] = Array.from({ length: steps }, (_, index) => values?.[index] ?? null);
    }
    const map = response["latency-heat"] ?? {};
    const rows = (map.rows ?? []).slice(0, MOST_STEPS);
    const heat = { step_ms: map["step-ms"] > 0 ? map["step-ms"] : step_ms, start_ms: map["start-ms"] ?? start_ms, bounds_ns: map["bounds-ns"] ?? [], rows };
    // An older daemon does not report past limits.
    const limits = response.limits?.filter((line) => typeof line?.name === "string" && line.value > 0) ?? null;
    return { step_ms, span_ms, start_ms, steps, series, heat, limits, end_ms: start_ms + steps * step_ms };
}

/// `fresh` steps, beginning at `start_ms`, appended to the earlier ones within the span.
function joined(known, fresh, span_ms) {
    const { step_ms, start_ms, values } = fresh;
    const kept = Math.round((start_ms - known.start_ms) / step_ms);
    if (known.step_ms !== step_ms || kept < 0 || kept > known.values.length) return fresh;
    const drop = Math.min(kept, Math.max(0, kept + values.length - Math.ceil(span_ms / step_ms)));
    return { step_ms, start_ms: known.start_ms + drop * step_ms, values: [...known.values.slice(drop, kept), ...values] };
}

/// `known` extended by new steps, without those before the span.
function newer(known, fresh) {
    if (!known) return fresh;
    const { step_ms, span_ms, start_ms, steps } = fresh;
    const names = new Set([...Object.keys(known.series), ...Object.keys(fresh.series)]);
    const of = (history, name) => ({ step_ms: history.step_ms, start_ms: history.start_ms, values: history.series[name] ?? Array(history.steps).fill(null) });
    const series = [...names].map((name) => [name, joined(of(known, name), of(fresh, name), span_ms)]);
    const [, first] = series[0] ?? [null, { start_ms, values: { length: steps } }];
    const rows = ({ heat }) => ({ ...heat, values: heat.rows });
    const isSame = known.heat.bounds_ns.length === fresh.heat.bounds_ns.length;
    const heat = isSame ? joined(rows(known), rows(fresh), span_ms) : rows(fresh);
    return {
        ...fresh, start_ms: first.start_ms, steps: first.values.length,
        series: Object.fromEntries(series.map(([name, { values }]) => [name, values])),
        heat: { step_ms: heat.step_ms, start_ms: heat.start_ms, bounds_ns: fresh.heat.bounds_ns, rows: heat.values },
    };
}

/// Last part of steps that begin at `start_ms`: those that end after `from_ms`.
function after({ step_ms, start_ms, values }, from_ms) {
    const drop = Math.min(values.length, Math.max(0, Math.floor((from_ms - start_ms) / step_ms)));
    return { start_ms: start_ms + drop * step_ms, values: values.slice(drop) };
}

/// Part of a history within its span. If less is known, the span is shortened, so that the charts of a
/// daemon that has just started are not a sliver at the right edge.
function shown(history) {
    const { step_ms, start_ms, end_ms, steps } = history;
    const series = Object.values(history.series);
    const first = Array.from({ length: steps }, (_, index) => index).find((index) => series.some((values) => values[index] != null)) ?? steps;
    const known_ms = end_ms - start_ms - first * step_ms;
    const span_ms = Math.min(history.span_ms, Math.max(LEAST_SPAN_MS, known_ms));
    const from_ms = end_ms - span_ms;
    const parts = Object.entries(history.series).map(([name, values]) => [name, after({ step_ms, start_ms, values }, from_ms)]);
    const [, part] = parts[0] ?? [null, { start_ms, values: { length: steps } }];
    const heat = after({ ...history.heat, values: history.heat.rows }, from_ms);
    return {
        ...history, span_ms, start_ms: part.start_ms, steps: part.values.length,
        series: Object.fromEntries(parts.map(([name, { values }]) => [name, values])),
        heat: { ...history.heat, start_ms: heat.start_ms, rows: heat.values },
    };
}

/// Follows one disk or group over one span, until it is stopped.
export class Follower {
    /// Calls `onUpdate(history, error)`, one of them null.
    constructor(node, span, onUpdate) {
        Object.assign(this, { node, span, onUpdate, known: null, stopped: new AbortController(), timer: null });
        this.onSight = () => { if (!document.hidden && this.timer !== null) this.soon(0); };
        document.addEventListener("visibilitychange", this.onSight);
        this.soon(0);
    }

    stop() {
        this.stopped.abort();
        clearTimeout(this.timer);
        document.removeEventListener("visibilitychange", this.onSight);
    }

    /// Requests everything again after a restart of the daemon.
    again() {
        this.known = null;
        if (this.timer !== null) this.soon(0);
    }

    soon(wait) {
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.get(), wait);
    }

    async get() {
        this.timer = null;
        // The page is hidden: the next request is made when it is visible again.
        if (document.hidden) {
            this.timer = setTimeout(() => this.get(), BETWEEN_MS[1]);
            return;
        }
        const { span_ms, kept } = SPANS[this.span];
        const before = this.known;
        const since = before ? `&since=${Math.min(before.end_ms - before.step_ms, before.heat.start_ms + (before.heat.rows.length - 1) * before.heat.step_ms)}` : "";
        try {
            const response = await ask("GET", `${place(this.node)}/history?span=${kept}${since}`, { signal: this.stopped.signal });
            if (!(response?.["step-ms"] > 0)) throw new Error("it has no intervals");
            const fresh = read(response, span_ms);
            if (before !== this.known) return this.soon(0); // A restart discarded it meanwhile: request everything.
            // Not even the last step matches: the clock was set back, so all times changed.
            if (fresh.steps === 0) this.known = null;
            else this.known = newer(before, fresh);
            if (this.known) this.onUpdate(shown(this.known), null);
        } catch (error) {
            if (this.stopped.signal.aborted) return;
            this.onUpdate(null, error);
            // Repeated at once if the daemon returns earlier.
            return this.soon(BETWEEN_MS[1]);
        }
        const [least, most] = BETWEEN_MS;
        this.soon(Math.min(most, Math.max(least, this.known?.step_ms ?? 0)));
    }
}
