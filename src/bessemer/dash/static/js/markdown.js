// The little markdown that our reports are written in, as elements: nothing in it can become anything but text.

import { h, table } from "./dom.js";

const MOST = 5000;

export function markdown(text) {
  const lines = text.split("\n").slice(0, MOST);
  const parts = [];
  for (let place = 0; place < lines.length; place += 1) {
    const line = lines[place];
    const head = /^(#{1,4}) (.*)/.exec(line);
    const fence = /^(`{3,})/.exec(line);
    if (head) {
      parts.push(h(`h${Math.min(4, head[1].length + 1)}`, {}, head[2]));
    } else if (fence) {
      const end = lines.findIndex((other, number) => number > place && other.trim() === fence[1]);
      const last = end < 0 ? lines.length : end;
      parts.push(h("pre", {}, lines.slice(place + 1, last).join("\n")));
      place = last;
    } else if (line.startsWith("|")) {
      let last = place;
      while (last < lines.length && lines[last].startsWith("|")) last += 1;
      const rows = lines.slice(place, last).map(cells);
      parts.push(table(rows[0], rows.slice(2), { label: "table of the report" }));
      place = last - 1;
    } else if (line.startsWith("- ")) {
      parts.push(h("p", { class: "item" }, inline(line.slice(2))));
    } else if (line.trim() && !line.startsWith("<") && !line.startsWith("![")) {
      parts.push(h("p", {}, inline(line)));
    }
  }
  return parts;
}

function cells(line) {
  return line
    .replace(/^\|/, "")
    .replace(/\|\s*$/, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replace(/\\([\\|])/g, "$1"));
}

function inline(text) {
  return text.split(/(\*\*[^*]+\*\*|`[^`]+`)/).map((part) => {
    if (part.startsWith("**") && part.length > 4) return h("strong", {}, part.slice(2, -2));
    return part.startsWith("`") && part.length > 2 ? h("code", {}, part.slice(1, -1)) : part;
  });
}
