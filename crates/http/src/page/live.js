// The event stream, and its connection state.
//
// `EventSource` reconnects after a broken connection, but not after an error response (a proxy's 502, a
// daemon that is starting): a new one is created then. A stream without messages for SILENT_MS counts
// as disconnected although its connection is open.

import { errorMessage } from "./api.js";

const STREAM = "/api/v1/stream";
const SILENT_MS = 6000;
const LOOK_MS = 1000;
const AGAIN_MS = [500, 1000, 2000, 4000];

/// Error message of the daemon, which `EventSource` does not expose.
async function refusal() {
    const controller = new AbortController();
    try {
        const answer = await fetch(STREAM, { signal: controller.signal, cache: "no-store", credentials: "omit" });
        return answer.ok ? null : errorMessage(await answer.text());
    } catch {
        return null; // The daemon does not answer.
    } finally {
        controller.abort();
    }
}

/// Calls `onMessage(kind, message)` for each message, and `onState(isLive, sinceMs, why)` when the state
/// changes; `why` is the daemon's message if it rejected the stream, else null.
export function listen(onMessage, onState) {
    let [source, isLive, lastMs, tries, reason] = [null, null, 0, 0, null];
    let opening = null;

    const setState = (live, why = null) => {
        if (live !== isLive || why !== reason) {
            [isLive, reason] = [live, why];
            onState(live, live ? Date.now() : lastMs || Date.now(), why);
        }
    };
    const open = () => {
        opening = null;
        source?.close();
        source = new EventSource(STREAM);
        for (const kind of ["overview", "delta", "event"]) source.addEventListener(kind, take);
        source.addEventListener("error", () => {
            setState(false, reason);
            if (source.readyState === EventSource.CLOSED) {
                refusal().then((why) => { if (!isLive) setState(false, why); });
                again();
            }
        });
    };
    const take = ({ type, data }) => {
        let message;
        try {
            message = JSON.parse(data);
        } catch {
            return; // Truncated: later messages contain the same state.
        }
        [lastMs, tries] = [Date.now(), 0];
        // Deltas are useless before an overview, which makes the stream live.
        if (type === "overview" || isLive) {
            onMessage(type, message);
            setState(true);
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
            setState(false);
            source.close();
            again();
        }
    }, LOOK_MS);
}
