// All runs: what each is doing, and a choice of some to lay over each other.

import { get } from "./api.js";
import { empty, fill, h, say } from "./dom.js";
import { ago, compact, date, duration, number, percent, whole } from "./format.js";

export const address = (id, tab = "") => `#/run/${encodeURIComponent(id)}${tab ? `/${tab}` : ""}`;

export function pill(state) {
  return h("span", { class: `pill ${state}` }, state);
}

export function progress(step, steps) {
  const share = step !== null && steps ? Math.min(1, step / steps) : null;
  const bar = h("progress", { max: "1", value: String(share ?? 0), "aria-label": "steps done" });
  return h(
    "span",
    { class: "steps" },
    h(
      "span",
      { class: "number" },
      step === null ? "–" : `${whole(step)}${steps ? ` / ${whole(steps)}` : ""}`,
    ),
    share === null ? null : bar,
  );
}

// The number a run is judged by, with its unit.
export function result(row, digits) {
  if (!row.result) return "–";
  const share = row.result.metric.endsWith("pref_acc");
  return h(
    "span",
    { title: row.result.meaning },
    share ? percent(row.result.value) : number(row.result.value, digits),
    " ",
    h(
      "span",
      { class: "unit" },
      row.result.error === null ? "" : `± ${number(row.result.error, digits)} `,
      row.result.unit,
    ),
  );
}

// order: what a column is sorted by, null where there is nothing; down: the largest first at the first click;
// spare: hidden while no run has anything to show.
const COLUMNS = [
  { title: "Run", order: (row) => row.id.toLowerCase() },
  { title: "State", show: (row) => pill(row.state), order: (row) => row.state },
  { title: "Recipe", show: (row) => row.recipe ?? "–", order: (row) => row.recipe, spare: true },
  { title: "Objective", show: (row) => row.objective ?? "–", order: (row) => row.objective, spare: true },
  {
    title: "Size",
    show: (row) => compact(row.parameters),
    order: (row) => row.parameters,
    hint: "Model parameters",
    down: true,
    spare: true,
  },
  { title: "Step", show: (row) => progress(row.step, row.steps), order: (row) => row.step, down: true },
  { title: "Loss", show: (row) => number(row.loss, 3), order: (row) => row.loss, hint: "Smoothed training loss" },
  {
    title: "Result",
    show: (row) => result(row, 3),
    order: (row) => row.result && [row.result.unit, row.result.value],
    hint: "Held-out result",
  },
  { title: "Tokens/s", show: (row) => compact(row.tok_per_s), order: (row) => row.tok_per_s, down: true },
  {
    title: "MFU",
    show: (row) => percent(row.mfu),
    order: (row) => row.mfu,
    hint: "MFU, share of the chip's peak",
    down: true,
    spare: true,
  },
  {
    title: "Left",
    show: (row) => duration(left(row)),
    order: left,
    hint: "Time left",
    spare: true,
  },
  { title: "Started", show: (row) => date(row.began), order: (row) => row.began, down: true, spare: true },
  {
    title: "Active",
    show: (row) => ago(row.beat),
    order: (row) => row.beat,
    hint: "Last heartbeat",
    down: true,
  },
];
const CELLS = COLUMNS.slice(1); // the run's name is the row's heading

function left(row) {
  return row.state === "running" ? row.eta : null;
}

function compare(a, b) {
  if (Array.isArray(a)) return compare(a[0], b[0]) || compare(a[1], b[1]);
  return a < b ? -1 : a > b ? 1 : 0;
}

const missing = (value) => value === null || value === undefined;

// Rows in the order of a column; those without a value come last either way.
export function sorted(rows, { title, down }) {
  const { order } = COLUMNS.find((column) => column.title === title);
  const keyed = rows.map((row) => [order(row), row]);
  keyed.sort(([a], [b]) =>
    missing(a) || missing(b) ? missing(a) - missing(b) : compare(a, b) * (down ? -1 : 1),
  );
  return keyed.map(([, row]) => row);
}

function rememberedSort() {
  try {
    const found = JSON.parse(localStorage.getItem("bessemer-sort"));
    if (COLUMNS.some((column) => column.title === found?.title)) return found;
  } catch {
    /* none, or not ours */
  }
  return { title: "Active", down: true };
}

export class List {
  constructor() {
    this.title = "Runs";
    this.chosen = new Set();
    this.wanted = "";
    this.rows = new Map();
    this.count = h("p", { class: "muted", role: "status" });
    this.search = h("input", {
      type: "search",
      id: "search",
      placeholder: "Find runs…",
      "aria-label": "Find runs by name, state, recipe or objective",
      oninput: (event) => {
        this.wanted = event.target.value.toLowerCase();
        this.draw();
      },
    });
    this.overlay = h("a", { class: "button primary", role: "button", "aria-disabled": "true" }, "Overlay");
    this.diff = h("a", { class: "button", role: "button", "aria-disabled": "true" }, "Compare settings");
    this.sort = rememberedSort();
    this.heads = COLUMNS.map(({ title, hint }) =>
      h(
        "th",
        { scope: "col", title: hint ?? null, data: { title } },
        h("button", { type: "button", class: "sort", onclick: () => this.sortBy(title) }, title),
      ),
    );
    this.order = h(
      "select",
      { id: "order", "aria-label": "Sort by", onchange: (event) => this.sortBy(event.target.value, false) },
      COLUMNS.map(({ title, hint }) => h("option", { value: title }, `Sort by ${(hint ?? title).toLowerCase()}`)),
    );
    this.body = h("tbody");
    this.table = h(
      "table",
      { class: "runs" },
      h("caption", { class: "unseen" }, "Runs; the headings sort them"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col", class: "choose" }, h("span", { class: "unseen" }, "Choose")),
          this.heads,
        ),
      ),
      this.body,
    );
    this.scroll = h("div", { class: "scroll" }, this.table);
    this.place = h("div", { class: "panel" });
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "head" },
        h("div", {}, h("h1", {}, "Runs"), this.count),
        h("div", { class: "row" }, this.search, this.order, this.overlay, this.diff),
      ),
      this.place,
    );
    this.choose();
    this.showSort();
  }

  // The column's usual direction first, the other at the next click.
  sortBy(title, turn = true) {
    const down = Boolean(COLUMNS.find((column) => column.title === title).down);
    this.sort = { title, down: turn && this.sort.title === title ? !this.sort.down : down };
    try {
      localStorage.setItem("bessemer-sort", JSON.stringify(this.sort));
    } catch {
      /* for this page only */
    }
    this.showSort();
    this.draw();
  }

  showSort() {
    const way = this.sort.down ? "descending" : "ascending";
    for (const head of this.heads)
      head.setAttribute("aria-sort", head.dataset.title === this.sort.title ? way : "none");
    this.order.value = this.sort.title;
  }

  async refresh() {
    this.data = await get("runs");
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const { runs, folder, outside, indexing } = this.data;
    const found = runs.filter((row) =>
      [row.id, row.state, row.recipe, row.objective].some((word) => word?.toLowerCase().includes(this.wanted)),
    );
    const shown = sorted(found, this.sort);
    const going = runs.filter((row) => row.state === "running").length;
    say(
      this.count,
      `${runs.length} in ${folder}${going ? `, ${going} running` : ""}${outside ? `; ${outside} that link elsewhere are not shown` : ""}${indexing ? `; indexing long runs: ${indexing.done} of ${indexing.of}` : ""}`,
    );
    if (!runs.length) {
      fill(
        this.place,
        empty(
          "No runs here yet",
          h("p", {}, "Start one, and it appears by itself:"),
          h("pre", {}, "bessemer train"),
        ),
      );
      return;
    }
    if (!shown.length) {
      fill(this.place, empty("Nothing found", "No run's name, state, recipe or objective has these letters."));
      return;
    }
    if (this.scroll.parentNode !== this.place) fill(this.place, this.scroll);
    for (const [place, { title, order, spare }] of COLUMNS.entries()) {
      const hidden = Boolean(spare) && runs.every((row) => missing(order(row)));
      this.heads[place].hidden = hidden;
      this.table.classList.toggle(`no-${title.toLowerCase()}`, hidden);
    }
    const ids = new Set(shown.map((row) => row.id));
    for (const [id, row] of this.rows)
      if (!ids.has(id)) {
        row.element.remove();
        this.rows.delete(id);
      }
    shown.forEach((data, place) => {
      const row = this.rows.get(data.id) ?? this.make(data.id);
      row.show(data);
      if (this.body.children[place] !== row.element)
        this.body.insertBefore(row.element, this.body.children[place] ?? null);
    });
  }

  make(id) {
    const box = h("input", {
      type: "checkbox",
      "aria-label": `Choose ${id}`,
      checked: this.chosen.has(id),
      onchange: (event) => {
        if (event.target.checked) this.chosen.add(id);
        else this.chosen.delete(id);
        this.choose();
      },
    });
    const cells = CELLS.map(({ title }) => h("td", { data: { title } }));
    const [head, ...phase] = id.split("/phases/");
    const name = h("a", { href: address(id) }, phase.length ? phase[0] : head);
    const element = h(
      "tr",
      { data: { run: id } },
      h("td", { class: "choose" }, box),
      h(
        "th",
        { scope: "row", class: phase.length ? "phase" : null },
        name,
        phase.length ? h("span", { class: "muted" }, ` in ${head}`) : null,
      ),
      cells,
    );
    let before = "";
    const show = (data) => {
      const now = JSON.stringify(data) + (data.beat === null ? "" : Math.floor(Date.now() / 10000));
      if (now !== before) CELLS.forEach(({ show: make }, place) => fill(cells[place], make(data)));
      before = now;
    };
    const row = { element, show };
    this.rows.set(id, row);
    return row;
  }

  choose() {
    const ids = [...this.chosen].map(encodeURIComponent);
    link(this.overlay, ids.length >= 2 && ids.length <= 20, `#/overlay/${ids.join(",")}`, "Tick two to twenty runs");
    link(this.diff, ids.length >= 2 && ids.length <= 20, `#/diff/${ids.join(",")}`, "Tick two to twenty runs");
    say(this.overlay, ids.length ? `Overlay ${ids.length}` : "Overlay");
  }
}

function link(element, works, target, hint) {
  element.setAttribute("aria-disabled", String(!works));
  element.title = works ? "" : hint;
  if (works) element.setAttribute("href", target);
  else element.removeAttribute("href");
}
