// Elements without innerHTML: text is always a text node, so nothing a model or a server says can become markup.

/** el("p.quiet", {title: "x", on: {click}}, "text", child): an element with classes, attributes, handlers, children. */
export function el(selector, attributes = {}, ...children) {
  const [tag, ...classes] = selector.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

/** One of the symbols at the top of index.html. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

export const byId = (id) => document.getElementById(id);

/** A small button with an icon and a name for screen readers. */
export function iconButton(name, label, click) {
  return el("button.plain", { type: "button", title: label, "aria-label": label, on: { click } }, icon(name));
}

/** A button that copies what `text()` gives, and says so for a moment. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const ok = await copy(text());
    button.replaceChildren(icon(ok ? "done" : "alert"));
    button.title = ok ? "Copied" : "The browser does not allow copying here";
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.title = label;
    }, 1500);
  });
  return button;
}

// navigator.clipboard exists on https and localhost only; a server in the local network is often neither.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea.sr", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const ok = document.execCommand("copy");
    area.remove();
    return ok;
  }
}

/** Storage that may be forbidden or full: then nothing is remembered, and nothing breaks. */
export function remembered(storage, name, fallback) {
  try {
    return JSON.parse(storage().getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function remember(storage, name, value) {
  try {
    if (value == null) storage().removeItem(name);
    else storage().setItem(name, JSON.stringify(value));
  } catch {
    // as above
  }
}

export const lasting = () => localStorage;
export const thisTab = () => sessionStorage;
