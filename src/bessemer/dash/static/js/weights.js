// How one parameter's values are distributed, over the steps of a run: a heat map of histograms, their mean and spread
// as curves over it, and a table of the same numbers.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { empty, fill, h, say, table } from "./dom.js";
import { bytes, number, whole } from "./format.js";
import { colours } from "./paint.js";

const CURVES = [
  ["mean", (row) => row.mean, 1, []],
  ["mean + std", (row) => plus(row, 1), 2, [7, 4]],
  ["mean − std", (row) => plus(row, -1), 2, [7, 4]],
  ["greatest", (row) => row.max, 6, [2, 3]],
  ["least", (row) => row.min, 6, [2, 3]],
];

function plus(row, times) {
  return row.mean === null || row.std === null ? null : row.mean + times * row.std;
}

export class Distribution extends Chart {
  constructor(name, onZoom) {
    super({ title: name, unit: "values by step; stronger: more of them", log: false }, `weights-${Math.random()}`, onZoom);
    this.logButton.hidden = this.wideButton.hidden = true; // half of the values are below zero; it is wide
    this.element.classList.add("is-wide");
  }

  put(rows, view) {
    this.rows = rows;
    this.edges = edges(rows.map((row) => row.step));
    const paint = colours().curves;
    const curves = CURVES.map(([label, value, place, dash]) => {
      const known = rows.filter((row) => value(row) !== null);
      return { label, colour: paint[place], dash, x: known.map((row) => row.step), y: known.map(value) };
    });
    this.show(curves, view);
  }

  options(series) {
    const made = super.options(series);
    if (this.view.low === null) made.scales.x.range = () => [this.edges[0], this.edges.at(-1)];
    made.hooks.drawAxes = [(u) => this.heat(u)];
    return made;
  }

  // A column a step, a cell a bin; the more of the values are in it, the stronger, against the column's fullest.
  heat(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = colours().curves[0];
    const place = (value, scale) => Math.round(u.valToPos(value, scale, true));
    this.rows.forEach(({ min, max, counts }, column) => {
      const left = place(this.edges[column], "x");
      const width = Math.max(1, place(this.edges[column + 1], "x") - left);
      const fullest = counts.reduce((most, count) => Math.max(most, count), 0);
      counts.forEach((count, bin) => {
        const top = place(min + ((bin + 1) * (max - min)) / counts.length, "y");
        const end = place(min + (bin * (max - min)) / counts.length, "y");
        ctx.globalAlpha = fullest ? 0.85 * Math.sqrt(count / fullest) : 0;
        if (count) ctx.fillRect(left, top, width, Math.max(1, end - top));
      });
    });
    ctx.restore();
  }

  fillTable() {
    const rows = this.rows.map((row) => [
      whole(row.step),
      ...[row.mean, row.std, row.min, quantile(row, 0.05), quantile(row, 0.5), quantile(row, 0.95), row.max].map(
        (value) => number(value, 5),
      ),
    ]);
    const head = ["step", "mean", "std", "least", "5%", "median", "95%", "greatest"];
    fill(this.numbers, table(head, rows.reverse(), { label: `${this.spec.title} in numbers` }));
  }
}

// The borders of columns: half way between steps; the outer ones are as wide as their neighbours.
function edges(steps) {
  const inner = steps.slice(1).map((step, place) => (step + steps[place]) / 2);
  const first = inner.length ? inner[0] - steps[0] : 0.5;
  const last = inner.length ? steps.at(-1) - inner.at(-1) : 0.5;
  return [steps[0] - first, ...inner, steps.at(-1) + last];
}

// The value below which a share lies, as if a bin were filled evenly.
function quantile({ min, max, counts }, share) {
  const all = counts.reduce((sum, count) => sum + count, 0);
  let wanted = share * all;
  for (const [bin, count] of counts.entries()) {
    if (count && wanted <= count) return min + ((bin + wanted / count) * (max - min)) / counts.length;
    wanted -= count;
  }
  return null;
}

export class Weights {
  constructor(id) {
    this.id = id;
    this.name = null;
    this.view = { axis: "step", logX: false, low: null, high: null };
    this.choice = h("select", { id: "parameter", onchange: (event) => this.choose(event.target.value) });
    this.notes = h("p", { class: "muted" });
    this.place = h("div", {});
    this.controls = h(
      "div",
      { class: "controls", hidden: true },
      h("label", { for: "parameter" }, "Parameter", this.choice),
      this.notes,
    );
    this.element = h("section", { "aria-label": "Distributions of weights" }, this.controls, this.place);
    this.repaint = () => this.draw();
    window.addEventListener("repaint", this.repaint);
  }

  choose(name) {
    this.name = name;
    this.view = { ...this.view, low: null, high: null };
    return this.refresh();
  }

  async refresh() {
    const asked = this.name;
    const data = await get("weights", { run: this.id, name: asked });
    if (asked !== this.name || data === this.data) return;
    this.data = data;
    this.draw();
  }

  draw() {
    const { names, name, rows } = this.data ?? { names: [] };
    this.controls.hidden = !names.length;
    if (!names.length) {
      if (this.data) this.none();
      return;
    }
    if (JSON.stringify(names) !== this.listed) {
      this.listed = JSON.stringify(names);
      fill(
        this.choice,
        names.map((one) => h("option", { value: one }, one)),
      );
    }
    this.choice.value = name;
    say(this.notes, this.words());
    if (this.chart?.spec.title !== name) {
      const open = this.chart && !this.chart.numbers.hidden;
      this.chart?.destroy();
      this.chart = new Distribution(name, (low, high) => this.zoom(low, high));
      this.chart.numbers.hidden = !open;
      this.chart.tableButton.setAttribute("aria-expanded", String(Boolean(open)));
      fill(this.place, this.chart.element);
    }
    this.chart.put(rows, { ...this.view, theme: document.documentElement.dataset.theme });
  }

  words() {
    const { rows, seen, bad, left_out: cut, unread, names } = this.data;
    return [
      rows.length < seen ? `${rows.length} of ${whole(seen)} histograms.` : "",
      cut ? `The first ${names.length} parameters.` : "",
      bad ? `${whole(bad)} lines of weights.jsonl are no rows and are left out.` : "",
      unread ? `${bytes(unread)} of weights.jsonl are still to be read.` : "",
    ]
      .filter(Boolean)
      .join(" ");
  }

  none() {
    const { bad, unread } = this.data;
    this.chart?.destroy();
    this.chart = this.listed = null;
    fill(
      this.place,
      bad || unread
        ? empty("No histograms", this.words())
        : empty(
            "No distributions of weights",
            h("p", {}, "A run writes them at each validation with this setting:"),
            h("pre", {}, "callbacks=[weight_distribution]"),
            h("p", {}, "Single parameters as curves: callbacks=[watchers] logging.watch=[PATTERN]."),
          ),
    );
  }

  zoom(low, high) {
    this.view = { ...this.view, low, high };
    this.draw();
  }

  destroy() {
    window.removeEventListener("repaint", this.repaint);
    this.chart?.destroy();
  }
}
