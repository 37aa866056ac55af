// Numbers in the notation of weir's console: `12.3K`, `9.8M`, `1.2ms`, `<1%`.
//
// Rates are rounded. Settings are exact where they can be edited; short forms of limits are rounded if
// the exact form is long. The rules are those of `console::figures`; a test checks both with the same
// examples. Unknown values are shown as `-`.

const UNITS = ["", "K", "M", "G", "T"];
export const UNKNOWN = "-";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/// Fixed decimals, half to even, as Rust formats numbers.
function fixed(value, decimals) {
    const isMiddle = decimals === 0 ? value % 1 === 0.5 : value % 0.5 === 0.25;
    const below = Math.floor(value * 10 ** decimals);
    return (isMiddle && below % 2 === 0 ? below / 10 ** decimals : value).toFixed(decimals);
}

function scaled(value, base) {
    if (!isNumber(value)) return UNKNOWN;
    let rest = Math.max(value, 0);
    let unit = 0;
    // Rounded as displayed, or 999.7 would become 1000 instead of 1.0K.
    while (Math.round(rest) >= base && unit + 1 < UNITS.length) {
        rest /= base;
        unit += 1;
    }
    const tenth = (rest < 99.95 && unit > 0) || (rest < 9.95 && rest % 1 > 0.05);
    return fixed(rest, tenth ? 1 : 0) + UNITS[unit];
}

/// Measured number, by powers of 1000.
export const count = (value) => scaled(value, 1000);

/// Measured bytes, by powers of 1024.
export const bytes = (value) => scaled(value, 1024);

/// Time in nanoseconds.
export function time(nanoseconds) {
    if (!isNumber(nanoseconds)) return UNKNOWN;
    if (nanoseconds < 1000) return `${Math.round(nanoseconds)}ns`;
    const [value, unit] = nanoseconds < 999_500 ? [nanoseconds / 1e3, "us"]
        : nanoseconds < 999_500_000 ? [nanoseconds / 1e6, "ms"] : [nanoseconds / 1e9, "s"];
    return fixed(value, value < 9.95 ? 1 : 0) + unit;
}

/// Duration in nanoseconds, of seconds to days: in minutes above two minutes.
export const seconds = (nanoseconds) => nanoseconds < 120e9 ? time(nanoseconds) : age(nanoseconds / 1e6);

/// Duration in milliseconds.
export function age(milliseconds) {
    if (!isNumber(milliseconds)) return UNKNOWN;
    const seconds = Math.max(0, Math.floor(milliseconds / 1000));
    const [minutes, hours, days] = [60, 3600, 86_400].map((unit) => Math.floor(seconds / unit));
    if (days) return `${days}d ${hours % 24}h`;
    if (hours) return `${hours}h ${minutes % 60}m`;
    return minutes ? `${minutes}m` : `${seconds}s`;
}

/// Share, 0 to 1.
export function share(value) {
    if (!isNumber(value)) return UNKNOWN;
    return value === 0 ? "0%" : value < 0.005 ? "<1%" : `${fixed(value * 100, 0)}%`;
}

/// Size of a setting: `10M`, `1536K`, `1000`.
export function exactSize(value) {
    if (!isNumber(value)) return UNKNOWN;
    let [rest, unit] = [value, 0];
    while (rest && rest % 1024 === 0 && unit + 1 < UNITS.length) {
        rest /= 1024;
        unit += 1;
    }
    return `${rest}${UNITS[unit]}`;
}

/// The six limits, and their short names.
export const KINDS = {
    "bps-total": "bps", "bps-read": "bps-r", "bps-write": "bps-w",
    "iops-total": "iops", "iops-read": "iops-r", "iops-write": "iops-w",
};

/// True if a setting counts bytes.
export const countsBytes = (name) => name.startsWith("bps-") && !name.endsWith("-length") || name === "iops-size";

/// Value of a setting as it would be typed.
export const exact = (name, value) => countsBytes(name) ? exactSize(value) : isNumber(value) ? String(value) : UNKNOWN;

/// Short value of a setting: rounded if the exact size is long.
const short = (name, value) => {
    const text = exact(name, value);
    return countsBytes(name) && text.length > 6 ? bytes(value) : text;
};

/// Short limits, each with its rate and its burst: `["iops 1000", "↑5000×5s"]`.
export function limitParts(of) {
    return Object.entries(KINDS).filter(([kind]) => of?.[kind] > 0 || of?.[`${kind}-per-gib`] > 0).map(([kind, title]) => {
        const perGib = of[`${kind}-per-gib`], bounds = ["min", "max"].map((bound) => of[`${kind}-per-gib-${bound}`]);
        const burst = of[`${kind}-max`] > 0 ? `↑${short(kind, of[`${kind}-max`])}` : "";
        const length = of[`${kind}-max-length`] > 1 ? `×${of[`${kind}-max-length`]}s`
            : burst && of["burst-for"] > 0 ? ` for ${of["burst-for"]}s` : "";
        const range = bounds.map((value, index) => value > 0 ? ` ${["at least", "at most"][index]} ${short(kind, value)}` : "").join("");
        return [`${title} ${of[kind] > 0 ? short(kind, of[kind]) : `${short(kind, perGib)}/GiB${range}`}`, burst + length];
    });
}

/// Limits in one line, `-` without limits: `iops 1000↑5000×5s, bps-r 10M`.
export function limits(of) {
    const all = limitParts(of);
    return all.length ? all.map((parts) => parts.join("")).join(", ") : UNKNOWN;
}

/// Typed text of a setting as a number; null if it is none.
export function parsed(name, text) {
    const typed = text.trim();
    if (typed === "") return 0;
    if (!countsBytes(name)) return /^\d+$/.test(typed) ? Number(typed) : null;
    const [, number, letter, decimal] = /^(\d+(?:\.\d+)?)([KMGTPE]?)(B?)$/i.exec(typed) ?? [];
    if (number === undefined || (decimal && !letter)) return null;
    const power = letter ? "KMGTPE".indexOf(letter.toUpperCase()) + 1 : 0;
    return Math.round(Number(number) * (decimal ? 1000 : 1024) ** power);
}

/// Time of day in the reader's time zone.
export function clock(milliseconds, withSeconds = true) {
    if (!isNumber(milliseconds)) return UNKNOWN;
    const at = new Date(milliseconds);
    const two = (number) => String(number).padStart(2, "0");
    return [at.getHours(), at.getMinutes(), ...withSeconds ? [at.getSeconds()] : []].map(two).join(":");
}

/// `1 disk`, `2 disks`.
export const several = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
