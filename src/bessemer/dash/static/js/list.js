// All runs: what each is doing, and a choice of some to lay over each other.

import { get } from "./api.js";
import { empty, fill, h, say } from "./dom.js";
import { ago, compact, duration, number, percent, whole } from "./format.js";

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

const COLUMNS = [
  ["State", (row) => pill(row.state)],
  ["Step", (row) => progress(row.step, row.steps)],
  ["Loss", (row) => number(row.loss, 3), "Smoothed training loss"],
  [
    "Held out",
    (row) =>
      row.val_bpb !== null
        ? `${number(row.val_bpb, 3)} bpb`
        : row.val_reward !== null
          ? `${number(row.val_reward, 3)} reward`
          : "–",
    "Bits per byte, or reward, on held-out data",
  ],
  ["Tokens/s", (row) => compact(row.tok_per_s)],
  ["MFU", (row) => percent(row.mfu), "Share of the chip's peak; – where no peak is known"],
  ["Left", (row) => (row.state === "running" ? duration(row.eta) : "–"), "Time left"],
  ["Last sign", (row) => ago(row.beat)],
];

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
      "aria-label": "Find runs by name or state",
      oninput: (event) => {
        this.wanted = event.target.value.toLowerCase();
        this.draw();
      },
    });
    this.overlay = h("a", { class: "button primary", role: "button", "aria-disabled": "true" }, "Overlay");
    this.diff = h("a", { class: "button", role: "button", "aria-disabled": "true" }, "Compare settings");
    this.body = h("tbody");
    this.table = h(
      "table",
      { class: "runs" },
      h("caption", { class: "unseen" }, "Runs, the most recently active first"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, h("span", { class: "unseen" }, "Choose")),
          h("th", { scope: "col" }, "Run"),
          COLUMNS.map(([title, , hint]) => h("th", { scope: "col", title: hint ?? null }, title)),
        ),
      ),
      this.body,
    );
    this.place = h("div", { class: "panel" });
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "head" },
        h("div", {}, h("h1", {}, "Runs"), this.count),
        h("div", { class: "row" }, this.search, this.overlay, this.diff),
      ),
      this.place,
    );
    this.choose();
  }

  async refresh() {
    this.data = await get("runs");
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const { runs, folder, outside, indexing } = this.data;
    const shown = runs.filter(
      (row) => row.id.toLowerCase().includes(this.wanted) || row.state.includes(this.wanted),
    );
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
      fill(this.place, empty("Nothing found", "No run's name or state has these letters."));
      return;
    }
    if (this.table.parentNode !== this.place) fill(this.place, this.table);
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
    const cells = COLUMNS.map(([title]) => h("td", { data: { title } }));
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
      if (now !== before) COLUMNS.forEach(([, make], place) => fill(cells[place], make(data)));
      before = now;
    };
    const row = { element, show };
    this.rows.set(id, row);
    return row;
  }

  choose() {
    const ids = [...this.chosen].map(encodeURIComponent);
    link(this.overlay, ids.length >= 2 && ids.length <= 20, `#/overlay/${ids.join(",")}`, "Tick two to twenty runs");
    link(this.diff, ids.length === 2, `#/diff/${ids.join(",")}`, "Tick two runs");
    say(this.overlay, ids.length ? `Overlay ${ids.length}` : "Overlay");
  }
}

function link(element, works, target, hint) {
  element.setAttribute("aria-disabled", String(!works));
  element.title = works ? "" : hint;
  if (works) element.setAttribute("href", target);
  else element.removeAttribute("href");
}
