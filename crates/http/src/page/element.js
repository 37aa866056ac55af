// Elements by one function, so that no text ever becomes markup.
//
// Names of disks and messages come from others. They go into text nodes and attributes alone; there
// is no `innerHTML` in this page, and nothing that is like it.

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

/// Sets text where it is another: writing the same again would cost a layout.
export function say(at, text) {
    if (at.textContent !== text) at.textContent = text;
}

/// Sets an attribute, or takes it away for null.
export function attribute(of, name, value) {
    if (value === null) of.removeAttribute(name);
    else if (of.getAttribute(name) !== String(value)) of.setAttribute(name, String(value));
}

/// The part of the page that has this id.
export function part(id) {
    return document.getElementById(id);
}
