// Sets the colours before anything is drawn: the last selection, or the system's preference.
//
// A classic script, not a module, so that a dark page does not flash white. Stores only the word `light`
// or `dark`.
"use strict";
try {
    const chosen = localStorage.getItem("weir-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
    // Storage is blocked: the system decides.
}
