// Colours before anything is drawn: what was chosen last, or what the system says.
//
// A script and no module, so that a dark page never flashes white. Never keeps anything but the
// word `light` or `dark`.
"use strict";
try {
    const chosen = localStorage.getItem("weir-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
    // Storage is refused: the system decides.
}
