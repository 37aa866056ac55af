// The stream of what happens, and whether it is live.
//
// `EventSource` connects again by itself where a connection broke, and not where an answer was wrong
// (a proxy's 502, a daemon that is starting): then a new one is made. A daemon that says nothing for
// SILENT_MS is not live either, though its connection is open.

const SILENT_MS = 6000;
const LOOK_MS = 1000;
const AGAIN_MS = [500, 1000, 2000, 4000];

/// Calls `heard(kind, told)` for each message, and `changed(isLive, sinceMs)` when that changes.
export function listen(heard, changed) {
    let [source, isLive, lastMs, tries] = [null, null, 0, 0];
    let opening = null;

    const be = (live) => {
        if (live !== isLive) {
            isLive = live;
            changed(live, live ? Date.now() : lastMs || Date.now());
        }
    };
    const open = () => {
        opening = null;
        source?.close();
        source = new EventSource("/api/v1/stream");
        for (const kind of ["overview", "delta", "event"]) source.addEventListener(kind, take);
        source.addEventListener("error", () => {
            be(false);
            if (source.readyState === EventSource.CLOSED) again();
        });
    };
    const take = ({ type, data }) => {
        let told;
        try {
            told = JSON.parse(data);
        } catch {
            return; // Cut off: what comes next says it again.
        }
        [lastMs, tries] = [Date.now(), 0];
        // Deltas without what they are to are of no use: the overview makes it live.
        if (type === "overview" || isLive) {
            heard(type, told);
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
