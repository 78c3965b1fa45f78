// Elements. Text only ever becomes a text node: what a run's files hold is shown, never interpreted.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && typeof value === "boolean") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(
    ...children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== false)
      .map(node),
  );
  return element;
}

function node(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter(Boolean).map(node));
  return element;
}

// Changes the text only if it is another: a screen reader is not told the same again, a selection stays.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function table(head, rows, options = {}) {
  const cell = (tag) => (value) =>
    h(
      tag,
      tag === "th" ? { scope: "col" } : typeof value === "number" ? { class: "number" } : {},
      value ?? "–",
    );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": options.label ?? "table" },
    h(
      "table",
      { class: options.class ?? null },
      h("thead", {}, h("tr", {}, head.map(cell("th")))),
      h(
        "tbody",
        {},
        rows.map((row) => h("tr", {}, row.map(cell("td")))),
      ),
    ),
  );
}

export function empty(title, ...words) {
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, title),
    ...words.map((word) => (word instanceof Node ? word : h("p", {}, word))),
  );
}

// A question in a dialog; true when it is answered with yes.
export function ask(title, text, yes, kind = "primary") {
  const dialog = document.getElementById("ask");
  return new Promise((resolve) => {
    fill(
      dialog,
      h("h2", {}, title),
      h("p", {}, text),
      h(
        "form",
        { method: "dialog", class: "row end" },
        h("button", { value: "no" }, "Cancel"),
        h("button", { value: "yes", class: kind }, yes),
      ),
    );
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
    dialog.returnValue = "no";
    dialog.showModal();
  });
}
