// What the chosen disk or group did: asked once whole, then only what is new.
//
// The daemon keeps steps of 1 s for 10 minutes, 10 s for 2 hours, 1 min for 2 days. A step that it
// answers again replaces what is here; one that nothing is known of stays a gap.

import { ask, place } from "./api.js";

/// The spans that the daemon keeps: their length, and how they are named.
export const SPANS = {
    "10m": { span_ms: 600_000, title: "10 min" },
    "2h": { span_ms: 7_200_000, title: "2 h" },
    "2d": { span_ms: 172_800_000, title: "2 days" },
};
/// Never asked more often, nor more seldom.
const BETWEEN_MS = [1000, 15_000];
/// Of a daemon that answers what was not asked for.
const MOST_STEPS = 10_000;

/// The same, made safe to draw: every series has every step, the heat map too.
function read(told, span_ms, step_ms = told.step_ms) {
    const lengths = Object.values(told.series ?? {}).map((values) => values?.length ?? 0);
    const rows = told.latency_heat?.rows ?? [];
    const steps = Math.min(MOST_STEPS, Math.max(0, rows.length, ...lengths));
    const series = {};
    for (const [name, values] of Object.entries(told.series ?? {})) {
        series[name] = Array.from({ length: steps }, (_, index) => values?.[index] ?? null);
    }
    const heat = { bounds_ns: told.latency_heat?.bounds_ns ?? [], rows: Array.from({ length: steps }, (_, index) => rows[index] ?? null) };
    const start_ms = told.start_ms ?? 0;
    return { step_ms, span_ms, start_ms, steps, series, heat, end_ms: start_ms + steps * step_ms };
}

/// `known` with what is new behind it, and without what has gone out of the span.
function joined(known, fresh) {
    const { step_ms, span_ms } = fresh;
    const isApart = known.step_ms !== step_ms || known.heat.bounds_ns.length !== fresh.heat.bounds_ns.length;
    if (isApart || fresh.start_ms > known.end_ms || fresh.start_ms <= known.start_ms) return fresh;
    const kept = Math.round((fresh.start_ms - known.start_ms) / step_ms);
    const drop = Math.max(0, kept + fresh.steps - Math.ceil(span_ms / step_ms));
    const join = (old, more) => [...(old ?? Array(known.steps).fill(null)).slice(drop, kept), ...more ?? Array(fresh.steps).fill(null)];
    const names = new Set([...Object.keys(known.series), ...Object.keys(fresh.series)]);
    const series = Object.fromEntries([...names].map((name) => [name, join(known.series[name], fresh.series[name])]));
    const heat = { bounds_ns: fresh.heat.bounds_ns, rows: join(known.heat.rows, fresh.heat.rows) };
    return { ...fresh, start_ms: known.start_ms + drop * step_ms, steps: kept - drop + fresh.steps, series, heat };
}

/// Follows one disk or group over one span, until it is stopped.
export class Follower {
    /// `told(history, error)`, one of them null.
    constructor(node, span, told) {
        Object.assign(this, { node, span, told, known: null, stopped: new AbortController(), timer: null });
        this.onSight = () => { if (!document.hidden && this.timer !== null) this.soon(0); };
        document.addEventListener("visibilitychange", this.onSight);
        this.soon(0);
    }

    stop() {
        this.stopped.abort();
        clearTimeout(this.timer);
        document.removeEventListener("visibilitychange", this.onSight);
    }

    /// Anew and whole, after a daemon has started again.
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
        // Nobody looks: it is asked again when somebody does.
        if (document.hidden) {
            this.timer = setTimeout(() => this.get(), BETWEEN_MS[1]);
            return;
        }
        const { span_ms } = SPANS[this.span];
        const asked = this.known;
        const since = asked ? `&since=${asked.end_ms - asked.step_ms}` : "";
        try {
            const told = await ask("GET", `${place(this.node)}/history?span=${this.span}${since}`, { signal: this.stopped.signal });
            if (!(told?.step_ms > 0)) throw new TypeError("the daemon's history has no steps");
            const fresh = read(told, span_ms);
            if (asked !== this.known) return this.soon(0); // It is to be asked whole, meanwhile.
            if (fresh.steps > 0) this.known = asked ? joined(asked, fresh) : fresh;
            if (this.known) this.told(this.known, null);
        } catch (error) {
            if (this.stopped.signal.aborted) return;
            this.told(null, error);
        }
        const [least, most] = BETWEEN_MS;
        this.soon(Math.min(most, Math.max(least, this.known?.step_ms ?? 0)));
    }
}
