// Requests to the daemon, and the token that changes need.
//
// The token lies in this tab's session storage and nowhere else: no cookie, so no other site can
// make this browser send it. It goes out only with a change, and only to where the page came from.

const KEY = "weir-token";

/// What the daemon refused, with its own words.
export class Refused extends Error {
    constructor(status, message) {
        super(message);
        this.status = status;
    }

    /// Whether another token would help.
    get isAboutToken() {
        return this.status === 401 || this.status === 403;
    }
}

/// What is kept, or null.
export function token() {
    try {
        return sessionStorage.getItem(KEY);
    } catch {
        return null;
    }
}

/// Keeps it, or forgets it for null.
export function keepToken(value) {
    try {
        if (value === null) sessionStorage.removeItem(KEY);
        else sessionStorage.setItem(KEY, value);
    } catch {
        // Without storage it is asked for each time.
    }
}

/// Where a disk or group is: `/api/v1/disks/NAME`.
export const place = (node) => `/api/v1/${node.kind}s/${encodeURIComponent(node.name)}`;

/// Asks, and gives what was answered. `using` is a token; it is sent with nothing else.
export async function ask(method, path, { body, using, signal } = {}) {
    const headers = { Accept: "application/json" };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (using) headers.Authorization = `Bearer ${using}`;
    const content = body === undefined ? undefined : JSON.stringify(body);
    const answer = await fetch(path, { method, headers, body: content, signal, cache: "no-store", credentials: "omit" });
    const text = await answer.text();
    if (answer.ok) return text === "" ? null : JSON.parse(text);
    throw new Refused(answer.status, told(text) ?? `the daemon answered ${answer.status} ${answer.statusText}`);
}

/// Why something was refused, of an answer's text; null where that does not tell.
export function told(text) {
    try {
        const answer = JSON.parse(text);
        const said = answer?.error?.message ?? answer?.message ?? answer?.error;
        return typeof said === "string" ? said : null;
    } catch {
        // Plain text, as long as it is a sentence and no page.
        return text && text.length < 500 && !text.startsWith("<") ? text.trim() : null;
    }
}
