// Requests to the daemon, and the token that changes need.
//
// The token is kept in this tab's session storage only. There is no cookie, so another site cannot
// make this browser send it. It is sent only with a change, and only to the page's origin.

const KEY = "weir-token";

/// Error response of the daemon, with its message.
export class Refused extends Error {
    constructor(status, message) {
        super(message);
        this.status = status;
    }

    /// True if another token would help.
    get isAboutToken() {
        return this.status === 401 || this.status === 403;
    }
}

/// Stored token, or null.
export function token() {
    try {
        return sessionStorage.getItem(KEY);
    } catch {
        return null;
    }
}

/// Stores the token; null deletes it.
export function keepToken(value) {
    try {
        if (value === null) sessionStorage.removeItem(KEY);
        else sessionStorage.setItem(KEY, value);
    } catch {
        // Without storage the user is asked for the token each time.
    }
}

/// Path of a disk or group: `/api/v1/disks/NAME`.
export const place = (node) => `/api/v1/${node.kind}s/${encodeURIComponent(node.name)}`;

/// Sends a request and returns the response. `using` is a token, sent with changes only.
export async function ask(method, path, { body, using, signal } = {}) {
    const headers = { Accept: "application/json" };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    if (using) headers.Authorization = `Bearer ${using}`;
    const content = body === undefined ? undefined : JSON.stringify(body);
    const answer = await fetch(path, { method, headers, body: content, signal, cache: "no-store", credentials: "omit" });
    const text = await answer.text();
    if (answer.ok) return text === "" ? null : JSON.parse(text);
    throw new Refused(answer.status, errorMessage(text) ?? `the daemon answered ${answer.status} ${answer.statusText}`);
}

/// Message in the text of an error response; null if there is none.
export function errorMessage(text) {
    try {
        const answer = JSON.parse(text);
        const message = answer?.error?.message ?? answer?.message ?? answer?.error;
        return typeof message === "string" ? message : null;
    } catch {
        // Plain text, if it is a sentence and not a page.
        return text && text.length < 500 && !text.startsWith("<") ? text.trim() : null;
    }
}
