// Numbers as weir's console writes them: `12.3K`, `9.8M`, `1.2ms`, `<1%`.
//
// Rates are rounded. Settings are exact where they can be typed; limits in short are rounded where
// their exact form is long. The rules are those of `console::figures`; a test holds both to the same
// examples. Unknown values are shown as `-`.

const UNITS = ["", "K", "M", "G", "T"];
export const UNKNOWN = "-";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/// With so many decimals, and what lies in the middle to the even one, as Rust writes numbers.
function fixed(value, decimals) {
    const isMiddle = decimals === 0 ? value % 1 === 0.5 : value % 0.5 === 0.25;
    const below = Math.floor(value * 10 ** decimals);
    return (isMiddle && below % 2 === 0 ? below / 10 ** decimals : value).toFixed(decimals);
}

function scaled(value, base) {
    if (!isNumber(value)) return UNKNOWN;
    let rest = Math.max(value, 0);
    let unit = 0;
    // Rounded as it will be shown, or 999.7 would become 1000 and not 1.0K.
    while (Math.round(rest) >= base && unit + 1 < UNITS.length) {
        rest /= base;
        unit += 1;
    }
    const tenth = (rest < 99.95 && unit > 0) || (rest < 9.95 && rest % 1 > 0.05);
    return fixed(rest, tenth ? 1 : 0) + UNITS[unit];
}

/// A measured number; powers of 1000.
export const count = (value) => scaled(value, 1000);

/// Measured bytes; powers of 1024.
export const bytes = (value) => scaled(value, 1024);

/// A time in nanoseconds.
export function time(nanoseconds) {
    if (!isNumber(nanoseconds)) return UNKNOWN;
    if (nanoseconds < 1000) return `${Math.round(nanoseconds)}ns`;
    const [value, unit] = nanoseconds < 999_500 ? [nanoseconds / 1e3, "us"]
        : nanoseconds < 999_500_000 ? [nanoseconds / 1e6, "ms"] : [nanoseconds / 1e9, "s"];
    return fixed(value, value < 9.95 ? 1 : 0) + unit;
}

/// How long something has gone on, in milliseconds.
export function age(milliseconds) {
    if (!isNumber(milliseconds)) return UNKNOWN;
    const seconds = Math.max(0, Math.floor(milliseconds / 1000));
    const [minutes, hours, days] = [60, 3600, 86_400].map((unit) => Math.floor(seconds / unit));
    if (days) return `${days}d ${hours % 24}h`;
    if (hours) return `${hours}h ${minutes % 60}m`;
    return minutes ? `${minutes}m` : `${seconds}s`;
}

/// A share, 0 to 1.
export function share(value) {
    if (!isNumber(value)) return UNKNOWN;
    return value === 0 ? "0%" : value < 0.005 ? "<1%" : `${fixed(value * 100, 0)}%`;
}

/// A size that is a setting: `10M`, `1536K`, `1000`.
export function exactSize(value) {
    if (!isNumber(value)) return UNKNOWN;
    let [rest, unit] = [value, 0];
    while (rest && rest % 1024 === 0 && unit + 1 < UNITS.length) {
        rest /= 1024;
        unit += 1;
    }
    return `${rest}${UNITS[unit]}`;
}

/// The six limits, and how they are called in short.
export const KINDS = {
    "bps-total": "bps", "bps-read": "bps-r", "bps-write": "bps-w",
    "iops-total": "iops", "iops-read": "iops-r", "iops-write": "iops-w",
};

/// Whether a setting counts bytes.
export const countsBytes = (name) => name.startsWith("bps-") && !name.endsWith("-length") || name === "iops-size";

/// A setting's value as it would be typed.
export const exact = (name, value) => countsBytes(name) ? exactSize(value) : isNumber(value) ? String(value) : UNKNOWN;

/// A setting's value in short: rounded where a size has a long exact form.
const short = (name, value) => {
    const text = exact(name, value);
    return countsBytes(name) && text.length > 6 ? bytes(value) : text;
};

/// Limits in short, each as its rate and its burst: `["iops 1000", "↑5000×5s"]`.
export function limitParts(of) {
    return Object.entries(KINDS).filter(([kind]) => of?.[kind] > 0).map(([kind, title]) => {
        const burst = of[`${kind}-max`] > 0 ? `↑${short(kind, of[`${kind}-max`])}` : "";
        const length = of[`${kind}-max-length`] > 1 ? `×${of[`${kind}-max-length`]}s` : "";
        return [`${title} ${short(kind, of[kind])}`, burst + length];
    });
}

/// Limits in one line, `-` if there are none: `iops 1000↑5000×5s, bps-r 10M`.
export function limits(of) {
    const told = limitParts(of);
    return told.length ? told.map((parts) => parts.join("")).join(", ") : UNKNOWN;
}

/// What was typed for a setting, as a number; null where it is none.
export function parsed(name, text) {
    const typed = text.trim();
    if (typed === "") return 0;
    if (!countsBytes(name)) return /^\d+$/.test(typed) ? Number(typed) : null;
    const [, number, letter, decimal] = /^(\d+(?:\.\d+)?)([KMGTPE]?)(B?)$/i.exec(typed) ?? [];
    if (number === undefined || (decimal && !letter)) return null;
    const power = letter ? "KMGTPE".indexOf(letter.toUpperCase()) + 1 : 0;
    return Math.round(Number(number) * (decimal ? 1000 : 1024) ** power);
}

/// The time of day, in the reader's own time zone.
export function clock(milliseconds, withSeconds = true) {
    if (!isNumber(milliseconds)) return UNKNOWN;
    const at = new Date(milliseconds);
    const two = (number) => String(number).padStart(2, "0");
    return [at.getHours(), at.getMinutes(), ...withSeconds ? [at.getSeconds()] : []].map(two).join(":");
}

/// `1 disk`, `2 disks`.
export const several = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
