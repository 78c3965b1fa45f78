// The colours and dashes of curves.

import { h } from "./dom.js";

const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

// The theme's colours as a canvas takes them.
export function colours() {
  const probe = document.body.appendChild(h("span", { hidden: true }));
  const read = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const found = {
    ink: read("--muted"),
    grid: read("--grid"),
    curves: [1, 2, 3, 4, 5, 6, 7, 8].map((place) => read(`--curve-${place}`)),
  };
  probe.remove();
  return found;
}

export function dash(place) {
  return DASHES[Math.floor(place / 8) % DASHES.length];
}
