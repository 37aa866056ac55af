// Recent events, newest first: limits that were hit, errors, clients, changes.

import { Refused, ask } from "./api.js";
import { element, part, say } from "./element.js";
import { clock } from "./figures.js";
import { Store } from "./store.js";

const MOST = 500;
const SHOWN = 200;
const GRAVE = ["error", "warning", "warn", "critical"];

export class Events {
    constructor(store, { choose, announce }) {
        Object.assign(this, { store, choose, announce });
        [this.list, this.only] = [part("events"), part("events-chosen")];
        this.events = [];
        this.chosen = null;
        this.lastId = 0;
        this.only.addEventListener("change", () => this.draw());
        this.list.addEventListener("click", (event) => {
            const key = event.target.closest("button")?.dataset.key;
            if (key) this.choose(key);
        });
        this.draw();
    }

    /// All events that the daemon still has. Their numbers restart with the daemon.
    async load() {
        try {
            const response = await ask("GET", "/api/v1/events");
            const events = Array.isArray(response) ? response : response?.events ?? [];
            this.events = newest(events.reverse(), MOST);
            this.draw();
        } catch (error) {
            // Events of the stream are shown in any case. Without events the panel takes no space.
            if (error instanceof Refused && error.status === 404) document.body.classList.add("has-no-events");
        }
    }

    add(event) {
        if (this.events.some((known) => known.id === event.id && known["time-ms"] === event["time-ms"])) return;
        document.body.classList.remove("has-no-events");
        this.events = newest([event, ...this.events], MOST);
        if (GRAVE.includes(event.severity)) this.announce(`${event.severity}: ${event.message}`);
        this.draw();
    }

    mark(key) {
        this.chosen = key;
        if (this.only.checked) this.draw();
    }

    draw() {
        if (this.isDue) return;
        this.isDue = true;
        requestAnimationFrame(() => {
            this.isDue = false;
            const key = (event) => event.disk ? Store.key("disk", event.disk) : event.group ? Store.key("group", event.group) : null;
            const wanted = this.only.checked ? this.events.filter((event) => key(event) === this.chosen) : this.events;
            const rows = newest(wanted, SHOWN).map((event) => this.row(event, key(event)));
            if (!rows.length) rows.push(element("li", { class: "nothing" }, "No events yet."));
            this.list.replaceChildren(...rows);
        });
    }

    row(event, key) {
        const at = element("time", {}, clock(event["time-ms"]));
        const date = new Date(event["time-ms"] ?? NaN);
        if (!Number.isNaN(date.getTime())) at.setAttribute("datetime", date.toISOString());
        const name = event.disk ?? event.group;
        const whose = key && this.store.get(key) ? element("button", { type: "button", class: "link", "data-key": key, tabindex: "-1" }, name) : name ? element("span", {}, name) : null;
        const grave = GRAVE.includes(event.severity);
        const message = event.message ?? event.kind ?? "";
        // If the message contains the name, the name is the link; otherwise the link precedes the message.
        const [from, to] = name ? place(message, event.disk ? "disk" : "group", name) : [0, 0];
        const parts = [message.slice(0, from), whose, whose && to === 0 ? " " : null, message.slice(to)];
        return element("li", { class: grave ? "is-grave" : null }, at, " ", grave ? element("b", {}, event.severity) : null, grave ? " " : null, ...parts);
    }
}

/// Bounded, with severe events first, so that clients that connect and disconnect do not hide an error.
function newest(events, most) {
    const grave = new Set(events.filter(({ severity }) => GRAVE.includes(severity)).slice(0, most / 4));
    let others = most - grave.size;
    return events.filter((event) => grave.has(event) || others-- > 0);
}

/// Position of a name in a message: after the word for its type, else as a whole word, since a short
/// name may be part of another word.
function place(message, of, name) {
    const isPart = (letter) => letter !== undefined && /[\p{L}\p{N}_.-]/u.test(letter);
    const places = [];
    for (let at = message.indexOf(name); at >= 0; at = message.indexOf(name, at + 1)) {
        if (!isPart(message[at - 1]) && !isPart(message[at + name.length])) places.push(at);
    }
    const at = places.find((at) => message.slice(0, at).endsWith(`${of} `)) ?? places[0] ?? -1;
    return at < 0 ? [0, 0] : [at, at + name.length];
}
