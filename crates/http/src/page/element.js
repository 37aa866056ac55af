// Creates all elements with one function, so that text is never parsed as markup.
//
// Names of disks and messages are untrusted. They are written to text nodes and attributes only; the
// page never uses `innerHTML` or an equivalent.

/// `element("p", { class: "x", hidden: true, onclick: f }, "text", child)`.
export function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
        if (value === null || value === undefined || value === false) continue;
        if (typeof value === "function") made.addEventListener(name.slice(2), value);
        else made.setAttribute(name, value === true ? "" : String(value));
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
}

/// Sets text if it differs: writing equal text would cost a layout.
export function say(at, text) {
    if (at.textContent !== text) at.textContent = text;
}

/// Sets an attribute; null removes it.
export function attribute(of, name, value) {
    if (value === null) of.removeAttribute(name);
    else if (of.getAttribute(name) !== String(value)) of.setAttribute(name, String(value));
}

/// Element of the page with this id.
export function part(id) {
    return document.getElementById(id);
}
