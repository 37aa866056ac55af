// The stream of what happens, and whether it is live.
//
// `EventSource` connects again by itself where a connection broke, and not where an answer was wrong
// (a proxy's 502, a daemon that is starting): then a new one is made. A daemon that says nothing for
// SILENT_MS is not live either, though its connection is open.

import { told } from "./api.js";

const STREAM = "/api/v1/stream";
const SILENT_MS = 6000;
const LOOK_MS = 1000;
const AGAIN_MS = [500, 1000, 2000, 4000];

/// Why there is no stream, in the daemon's words: an `EventSource` does not tell.
async function refusal() {
    const asked = new AbortController();
    try {
        const answer = await fetch(STREAM, { signal: asked.signal, cache: "no-store", credentials: "omit" });
        return answer.ok ? null : told(await answer.text());
    } catch {
        return null; // Nobody is there.
    } finally {
        asked.abort();
    }
}

/// Calls `heard(kind, told)` for each message, and `changed(isLive, sinceMs, why)` when that changes;
/// `why` is what the daemon says itself where it refuses, and else null.
export function listen(heard, changed) {
    let [source, isLive, lastMs, tries, reason] = [null, null, 0, 0, null];
    let opening = null;

    const be = (live, why = null) => {
        if (live !== isLive || why !== reason) {
            [isLive, reason] = [live, why];
            changed(live, live ? Date.now() : lastMs || Date.now(), why);
        }
    };
    const open = () => {
        opening = null;
        source?.close();
        source = new EventSource(STREAM);
        for (const kind of ["overview", "delta", "event"]) source.addEventListener(kind, take);
        source.addEventListener("error", () => {
            be(false, reason);
            if (source.readyState === EventSource.CLOSED) {
                refusal().then((why) => { if (!isLive) be(false, why); });
                again();
            }
        });
    };
    const take = ({ type, data }) => {
        let message;
        try {
            message = JSON.parse(data);
        } catch {
            return; // Cut off: what comes next says it again.
        }
        [lastMs, tries] = [Date.now(), 0];
        // Deltas without what they are to are of no use: the overview makes it live.
        if (type === "overview" || isLive) {
            heard(type, message);
            be(true);
        }
    };
    const again = () => {
        if (opening !== null) return;
        opening = setTimeout(open, AGAIN_MS[Math.min(tries, AGAIN_MS.length - 1)]);
        tries += 1;
    };

    open();
    setInterval(() => {
        if (isLive && Date.now() - lastMs > SILENT_MS) {
            be(false);
            source.close();
            again();
        }
    }, LOOK_MS);
}
