// The page as a whole: messages of the daemon go into the store, and are drawn at most once a frame and
// ten times a second.
//
// The selection is in the address after `#`, so that it can be linked and the browser's back button
// closes it.

import { part, say } from "./element.js";
import { Detail } from "./detail.js";
import { Events } from "./events.js";
import * as figures from "./figures.js";
import { Jobs } from "./jobs.js";
import { listen } from "./live.js";
import { Store, operations } from "./store.js";
import { Token } from "./token.js";
import { Tree, sums } from "./tree.js";

const BETWEEN_MS = 100;

const store = new Store();
const announce = (text) => { part("announcement").textContent = text; };
const token = new Token(store);
const tree = new Tree(part("tree"), store, (key, goThere) => choose(key, goThere), () => part("filter").focus());
const jobs = new Jobs(part("jobs"), store, (key) => choose(key, true));
const events = new Events(store, { choose: (key) => choose(key, true), announce });
const detail = new Detail(part("detail"), store, { back, choose: (key) => choose(key), token, announce });
/// Windows wide enough for list and details; the same condition is in style.css.
const isWide = matchMedia("(min-width: 1100px)");

let [isDue, lastMs, version] = [false, 0, null];
/// Key of the disk that is shown beside the list while the address names none.
let suggested = null;

/// Schedules drawing, at most at the rate that is visible.
function soon() {
    if (isDue) return;
    isDue = true;
    setTimeout(() => requestAnimationFrame(() => {
        [isDue, lastMs] = [false, performance.now()];
        draw();
    }), Math.max(0, BETWEEN_MS - (performance.now() - lastMs)));
}

function draw() {
    tree.update();
    jobs.update();
    detail.update();
    token.update();
    // Before the first overview the number of disks is unknown.
    say(part("sums"), store.isKnown ? sums(store) : "");
    titled();
    const { name, version: is, "started-ms": started_ms } = store.daemon;
    say(part("daemon"), [name, is, started_ms ? `up ${figures.age((store.timeMs ?? Date.now()) - started_ms)}` : null].filter(Boolean).join(" · "));
    const devices = [...store.devices.values()].map(device);
    part("devices").hidden = devices.length === 0;
    say(part("devices"), devices.join(" · "));
}

function device({ name, "busy-ratio": share, disks }) {
    const many = Array.isArray(disks) ? disks.length : disks;
    return [`${name}:`, typeof share === "number" ? `${figures.share(share)} busy` : null, many > 0 ? `(${figures.several(many, "disk")})` : null].filter(Boolean).join(" ");
}

// The address.

function chosen() {
    const [, kind, name] = /^#(disk|group)\/(.*)$/s.exec(location.hash) ?? [];
    try {
        return kind ? Store.key(kind, decodeURIComponent(name)) : null;
    } catch {
        return null;
    }
}

/// The most throttled disk; if none is throttled, the busiest.
function suggestion() {
    const value = (disk) => [disk["wait-ratio"] ?? 0, operations(disk) ?? 0];
    const [first] = store.disks().sort((a, b) => {
        const [held, busy] = [value(a), value(b)];
        return held[0] !== busy[0] && busy[0] - held[0] || busy[1] - held[1] || (a.name < b.name ? -1 : 1);
    });
    return first?.key ?? null;
}

/// Key of the disk or group in the right half: from the address, else the suggestion.
function shownKey() {
    const key = chosen();
    if (key !== null || !isWide.matches) return key;
    if (suggested === null || !store.get(suggested)) suggested = store.isKnown ? suggestion() : null;
    return suggested;
}

function choose(key, goThere = false) {
    const [kind, ...name] = key.split("/");
    const hash = `#${kind}/${encodeURIComponent(name.join("/"))}`;
    if (location.hash !== hash) history.pushState({ isOurs: true }, "", hash);
    route();
    if (goThere) part("detail").focus({ preventScroll: true });
}

function back() {
    if (history.state?.isOurs) history.back();
    else {
        history.replaceState(null, "", location.pathname);
        route();
    }
    tree.grid.focus();
}

function titled() {
    const key = chosen();
    document.title = [key?.slice(key.indexOf("/") + 1), "weir", store.daemon.name].filter(Boolean).join(" · ");
}

function view(name) {
    document.body.dataset.view = name;
    for (const button of document.querySelectorAll(".views button")) {
        button.setAttribute("aria-pressed", String(button.dataset.to === name));
    }
    // A hidden element has no size.
    tree.place();
    detail.redraw();
}

function route() {
    const had = detail.key;
    const key = show();
    titled();
    if (key && key !== had) part("detail").scrollTop = 0;
    view(chosen() ? "detail" : document.body.dataset.view === "events" ? "events" : "list");
}

/// Marks the selected or suggested one in all places.
function show() {
    const key = shownKey();
    detail.show(key);
    tree.mark(key, key === chosen());
    events.mark(key);
    return key;
}

isWide.addEventListener("change", route);
addEventListener("popstate", route);
addEventListener("hashchange", route);
// The skip link must not change the address and its selection.
document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    view("list");
    tree.grid.focus();
});
for (const button of document.querySelectorAll(".views button")) button.addEventListener("click", () => view(button.dataset.to));
part("filter").addEventListener("input", ({ target }) => tree.setFilter(target.value));
part("filter").addEventListener("keydown", (event) => {
    if ((event.key === "ArrowDown" || event.key === "Enter") && tree.rows.length) {
        event.preventDefault();
        tree.grid.focus();
        tree.goToFirst();
    }
});
document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches("input:not([type=range], [type=radio], [type=checkbox]), select, textarea");
    if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        view("list");
        part("filter").focus();
    } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
        if (event.target === part("filter")) {
            part("filter").value = "";
            tree.setFilter("");
        }
        if (event.target !== tree.grid) tree.grid.focus();
    }
});

// Colours.

const theme = part("theme");
theme.value = document.documentElement.dataset.theme ?? "auto";
theme.addEventListener("change", () => {
    if (theme.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme.value;
    try {
        localStorage.setItem("weir-theme", theme.value);
    } catch {
        // Kept for the lifetime of the page.
    }
    detail.redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => detail.redraw());

// Events.

say(part("live"), "connecting");
listen((kind, message) => {
    if (kind === "event") {
        events.add(message);
        return;
    }
    if (kind === "delta") store.delta(message);
    else {
        store.overview(message);
        events.load();
        detail.again();
        const is = store.daemon.version ?? null;
        if (version !== null && is !== version) {
            part("notice").hidden = false;
            say(part("notice"), `The daemon is weir ${is} now, but this page is of ${version}: reload it.`);
        } else version = is;
        // Drawn before its state is called live.
        if (detail.key !== shownKey()) show();
        draw();
        return;
    }
    soon();
}, (isLive, sinceMs, why) => {
    document.body.classList.toggle("is-stale", !isLive);
    part("live").className = isLive ? "live is-live" : "live is-lost";
    say(part("live"), isLive ? "live" : `not live since ${figures.clock(sinceMs)}: ${why ?? "the daemon does not answer"}, trying again`);
});
route();
soon();
