// Shared by all charts: positions of values and instants, round numbers at the axes, and one cursor
// for all charts.

/// Margins around the plot, in pixels.
export const ROOM = { left: 46, right: 8, top: 8, bottom: 18 };

/// Canvas in the resolution of the screen, and its size in CSS pixels.
export function prepare(canvas) {
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return { pen, width, height };
}

/// Colours of the page's current style.
export function colours(of) {
    const style = getComputedStyle(of);
    return (name) => style.getPropertyValue(`--${name}`).trim();
}

/// Two to five round values between 0 and `top`, of powers of `base`; whole numbers if `isWhole`.
export function ticks(top, base, isWhole = false) {
    if (!(top > 0)) return [0];
    const power = base === 1024 ? 1024 ** Math.floor(Math.log(top) / Math.log(1024)) : 10 ** Math.floor(Math.log10(top));
    const steps = base === 1024 ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].map((step) => step / 4) : power > 1 ? [0.2, 0.25, 0.5, 1, 2] : [0.2, 0.5, 1, 2];
    // Quarters of 1 have more digits than are displayed.
    const step = Math.max(isWhole ? 1 : 0, (steps.find((step) => top / (step * power) <= 4) ?? steps.at(-1)) * power);
    const found = [];
    for (let value = 0; value <= top * 1.0001 && found.length < 12; value += step) found.push(value);
    return found;
}

const MINUTE_MS = 60_000;
const TIMES_MS = [0.25, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440].map((minutes) => minutes * MINUTE_MS);

/// Round times of day between two instants, at most `most`.
export function instants(from, to, most) {
    const step = TIMES_MS.find((step) => (to - from) / step <= most) ?? TIMES_MS.at(-1);
    // Midnight in the reader's time zone.
    const zone = new Date(to).getTimezoneOffset() * MINUTE_MS;
    const found = [];
    for (let at = Math.ceil((from - zone) / step) * step + zone; at <= to; at += step) found.push(at);
    return found;
}

/// Instant at the cursor of all charts; null for now.
export class Cursor {
    #listeners = new Set();
    #at = null;

    get at() {
        return this.#at;
    }

    listen(listener) {
        this.#listeners.add(listener);
    }

    set(at) {
        if (at === this.#at) return;
        this.#at = at;
        for (const listener of this.#listeners) listener(at);
    }

    /// Follows a pointer over a chart; `instant` maps a position to an instant.
    follow(canvas, instant) {
        canvas.addEventListener("pointermove", (event) => this.set(instant(event.offsetX)));
        canvas.addEventListener("pointerleave", () => this.set(null));
    }
}

/// Frame of a chart: horizontal lines with their values, and times of day.
export function frame(pen, { width, height, colour, marks, times, y, x, clock }) {
    pen.font = `11px ${colour("font") || "sans-serif"}`;
    pen.lineWidth = 1;
    pen.fillStyle = colour("dim");
    pen.strokeStyle = colour("grid");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const [value, text] of marks) {
        const at = Math.round(y(value)) + 0.5;
        pen.beginPath();
        pen.moveTo(ROOM.left, at);
        pen.lineTo(width - ROOM.right, at);
        pen.stroke();
        pen.fillText(text, ROOM.left - 6, at);
    }
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    for (const at of times) {
        const text = clock(at);
        const half = pen.measureText(text).width / 2;
        const place = x(at);
        if (place - half < ROOM.left - 20 || place + half > width) continue;
        pen.fillText(text, place, height - 4);
    }
}

/// Line of the cursor.
export function point(pen, at, { height, colour }) {
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 1;
    pen.globalAlpha = 0.5;
    pen.beginPath();
    pen.moveTo(Math.round(at) + 0.5, ROOM.top);
    pen.lineTo(Math.round(at) + 0.5, height - ROOM.bottom);
    pen.stroke();
    pen.globalAlpha = 1;
}
