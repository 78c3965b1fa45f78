// The charts of one run or of several laid over each other: one set of controls, one range, one request for all of it.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { empty, fill, h, say } from "./dom.js";
import { colours, dash } from "./paint.js";

const AXES = [
  ["step", "Step"],
  ["tokens", "Tokens"],
  ["time", "Training time"],
  ["flops", "FLOPs"],
];
const SECTIONS = ["Results", "Optimization", "Speed and memory", "Details"];
const MOST_NAMES = 100; // of one question: a run may watch every parameter
const SMOOTHINGS = [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999];

function remembered() {
  try {
    return JSON.parse(localStorage.getItem("bessemer-view")) ?? {};
  } catch {
    return {};
  }
}

export class Curves {
  constructor(runs) {
    this.runs = runs;
    this.view = { axis: "step", smoothing: 0, logX: false, ...remembered(), low: null, high: null };
    this.charts = new Map();
    this.chosen = new Map(); // of a folded chart: title → metric
    this.sync = `charts-${Math.random()}`;
    this.sections = new Map(); // title → the grid of its charts
    this.grid = h("div", { class: "sections" });
    this.element = h("section", { "aria-label": "Curves" }, this.controls(), this.grid);
    this.repaint = () => {
      this.key = null;
      this.refresh(true);
    };
    window.addEventListener("repaint", this.repaint);
  }

  controls() {
    const axis = h(
      "select",
      { id: "axis", onchange: (event) => this.set({ axis: event.target.value, low: null, high: null }) },
      AXES.map(([value, title]) => h("option", { value, selected: value === this.view.axis }, title)),
    );
    const shown = h("output", { for: "smoothing" });
    const place = Math.max(0, SMOOTHINGS.indexOf(this.view.smoothing));
    const word = (value) => say(shown, value ? String(value) : "off");
    word(this.view.smoothing);
    const smoothing = h("input", {
      id: "smoothing",
      type: "range",
      min: "0",
      max: String(SMOOTHINGS.length - 1),
      step: "1",
      value: String(place),
      oninput: (event) => {
        const value = SMOOTHINGS[event.target.value];
        word(value);
        this.set({ smoothing: value });
      },
    });
    const logX = h("input", {
      id: "log-x",
      type: "checkbox",
      checked: this.view.logX,
      onchange: (event) => this.set({ logX: event.target.checked }),
    });
    const logY = h(
      "button",
      {
        type: "button",
        onclick: () => {
          this.allLog = !this.allLog;
          for (const chart of this.charts.values()) chart.setLog(this.allLog);
        },
      },
      "Log values",
    );
    const newest = h("button", { type: "button", onclick: () => this.newest() }, "Newest half");
    this.reset = h(
      "button",
      { type: "button", id: "reset", disabled: true, onclick: () => this.zoom(null, null) },
      "Show all",
    );
    return h(
      "div",
      { class: "controls", role: "group", "aria-label": "How curves are drawn" },
      h("label", { for: "axis" }, "Against", axis),
      h("label", { for: "smoothing" }, "Smoothing", smoothing, shown),
      h("label", { class: "check", for: "log-x" }, logX, "Log axis"),
      logY,
      newest,
      this.reset,
      h("span", { class: "hint" }, "Drag to zoom, double-click for all."),
    );
  }

  set(change) {
    Object.assign(this.view, change);
    const { axis, smoothing, logX } = this.view;
    try {
      localStorage.setItem("bessemer-view", JSON.stringify({ axis, smoothing, logX }));
    } catch {
      /* for this page only */
    }
    this.reset.disabled = this.view.low === null;
    this.refresh(true);
  }

  // Closer without a mouse: the second half of what is shown.
  newest() {
    const chart = [...this.charts.values()].find((one) => one.uplot && !one.element.hidden);
    if (!chart) return;
    const { min, max } = chart.uplot.scales.x;
    this.zoom((min + max) / 2, max);
  }

  zoom(low, high) {
    this.set({ low, high });
  }

  // Ask what is new and draw it. One question at a time; the newest wish wins.
  async refresh(anew = false) {
    if (this.asking) {
      this.again = this.again || anew;
      return;
    }
    this.asking = true;
    try {
      do {
        this.again = false;
        await this.ask();
      } while (this.again);
    } finally {
      this.asking = false;
    }
  }

  async ask() {
    const { charts } = await get("charts", { run: this.runs });
    const names = [...new Set(charts.flatMap((chart) => chart.names))];
    const { axis, low, high, smoothing } = this.view;
    const view = { x: axis, from: low, to: high, smooth: smoothing || null };
    const points = Math.min(1600, Math.max(400, innerWidth));
    const parts = [];
    for (let place = 0; place < names.length; place += MOST_NAMES)
      parts.push({ run: this.runs, name: names.slice(place, place + MOST_NAMES), ...view, points });
    const asked = await Promise.all(parts.map((part) => get("curves", part)));
    const key = JSON.stringify([charts, this.view, document.documentElement.dataset.theme ?? ""]);
    const same = asked.length === this.drawn?.length && asked.every((part, place) => part === this.drawn[place]);
    if (same && key === this.key) return;
    [this.drawn, this.key] = [asked, key];
    this.shown = [this.runs.length > 1 ? apart(charts) : charts.map(folded), asked.flatMap((part) => part.curves)];
    this.draw(...this.shown);
  }

  draw(charts, curves) {
    const wanted = new Set(charts.map((chart) => chart.title));
    for (const [title, chart] of this.charts) {
      if (!wanted.has(title)) {
        chart.destroy();
        chart.element.remove();
        this.charts.delete(title);
      }
    }
    for (const [title, grid] of this.sections) grid.parentNode.hidden = !charts.some((one) => one.section === title);
    if (!charts.length) {
      this.sections.clear();
      fill(this.grid, empty("No metrics yet", "Curves appear here with the first report of the run."));
      return;
    }
    if (!this.charts.size) {
      this.sections.clear();
      this.grid.replaceChildren();
    }
    const paint = colours().curves;
    for (const spec of charts) {
      const names = spec.choices ? [this.chosen.get(spec.title) ?? spec.choices[0]] : spec.names;
      const own = curves
        .filter((curve) => names.includes(curve.name))
        .map((curve) => this.line(curve, spec, paint));
      if (!this.charts.has(spec.title)) {
        const chart = new Chart(
          spec,
          this.sync,
          (low, high) => this.zoom(low, high),
          (name) => {
            this.chosen.set(spec.title, name);
            this.draw(...this.shown);
          },
        );
        this.charts.set(spec.title, chart);
        this.section(spec.section).append(chart.element);
      }
      const chart = this.charts.get(spec.title);
      chart.element.hidden = !own.length && !spec.choices;
      const { axis, logX, low, high } = this.view;
      if (!chart.element.hidden)
        chart.show(own, { axis, logX, low, high, theme: document.documentElement.dataset.theme });
    }
  }

  // The grid of a section. One that appears later goes to its place: the order is that of `SECTIONS`.
  section(title) {
    if (!this.sections.has(title)) {
      const grid = h("div", { class: "charts" });
      const element = h(
        "details",
        { class: "section", open: true, data: { section: title } },
        h("summary", {}, h("h2", {}, title)),
        grid,
      );
      this.sections.set(title, grid);
      const place = SECTIONS.indexOf(title);
      const next = [...this.grid.children].find((other) => SECTIONS.indexOf(other.dataset.section) > place);
      this.grid.insertBefore(element, next ?? null);
    }
    return this.sections.get(title);
  }

  line(curve, spec, paint) {
    const several = this.runs.length > 1;
    const place = several ? this.runs.indexOf(curve.run) : spec.names.indexOf(curve.name);
    const line = {
      label: several ? curve.run : curve.name,
      colour: paint[place % paint.length],
      dash: dash(place),
      x: curve.x,
      y: curve.y,
      sparse: curve.name.startsWith("val_"),
    };
    if (curve.smooth && spec.smooth && !curve.name.startsWith("val_") && curve.name !== "loss_smooth")
      line.smooth = curve.smooth;
    return line;
  }

  destroy() {
    window.removeEventListener("repaint", this.repaint);
    for (const chart of this.charts.values()) chart.destroy();
  }
}

// Curves of one shape: the chart has a choice of them.
function folded(chart) {
  return chart.alike ? { ...chart, choices: chart.names } : chart;
}

// Of several runs, each metric has a chart of its own, or one chart has a choice of them.
function apart(charts) {
  return charts.flatMap((chart) =>
    chart.fold
      ? [{ ...chart, choices: chart.names }]
      : chart.names.map((name) => ({
          ...chart,
          title: chart.names.length > 1 ? `${chart.title}: ${name}` : chart.title,
          names: [name],
        })),
  );
}
