// One chart: uPlot with a legend that reads the curves at the cursor, zoom by dragging, keys, and a table of its numbers.

import { h, fill, say, table } from "./dom.js";
import { compact, duration, number, whole } from "./format.js";
import { colours } from "./paint.js";
import { at, clean } from "./points.js";

const HEIGHT = 230;
const NEAR = "600px"; // a chart is painted when it comes so close to the screen: a run may have hundreds
const TICKS = { step: compact, tokens: compact, flops: compact, time: duration };
const PLACES = {
  step: (x) => `step ${whole(x)}`,
  tokens: (x) => `${compact(x)} tokens`,
  flops: (x) => `${compact(x)} FLOPs`,
  time: duration,
};

export class Chart {
  // spec: {title, unit, log, choices}; onZoom(low, high), or onZoom(null, null) for all of it; onChoose(name) of `choices`.
  constructor(spec, sync, onZoom, onChoose) {
    this.spec = spec;
    this.sync = sync;
    this.onZoom = onZoom;
    this.log = spec.log;
    this.curves = [];
    this.hidden = new Set();
    this.plot = h("div", {
      class: "plot",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "chart",
      onkeydown: (event) => this.key(event),
    });
    this.legend = h("ul", { class: "legend" });
    this.where = h("li", { class: "where" });
    const choice = spec.choices
      ? h(
          "select",
          {
            class: "choice",
            "aria-label": `${spec.title}: which`,
            onchange: (event) => onChoose(event.target.value),
          },
          spec.choices.map((name) => h("option", { value: name }, name)),
        )
      : null;
    this.live = h("p", { class: "unseen", "aria-live": "polite" });
    this.numbers = h("div", { class: "numbers", hidden: true });
    this.logButton = h(
      "button",
      {
        class: "quiet small",
        type: "button",
        "aria-pressed": String(this.log),
        onclick: () => this.setLog(!this.log),
      },
      "log",
    );
    this.tableButton = h(
      "button",
      { class: "quiet small", type: "button", "aria-expanded": "false", onclick: () => this.toggleTable() },
      "numbers",
    );
    this.wideButton = h(
      "button",
      {
        class: "quiet small wide",
        type: "button",
        "aria-pressed": "false",
        "aria-label": `${spec.title}: full width`,
        onclick: () => this.toggleWide(),
      },
      "⤢",
    );
    this.element = h(
      "figure",
      { class: "chart", data: { title: spec.title } },
      h(
        "figcaption",
        {},
        h("span", { class: "title" }, spec.title),
        choice,
        h("span", { class: "unit" }, spec.unit),
        h("span", { class: "tools" }, this.logButton, this.tableButton, this.wideButton),
      ),
      this.plot,
      this.legend,
      this.numbers,
      this.live,
    );
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.plot);
    this.nearness = new IntersectionObserver(
      (entries) => {
        this.near = entries.at(-1).isIntersecting;
        this.paint();
      },
      { rootMargin: NEAR },
    );
    this.nearness.observe(this.plot);
  }

  setLog(log) {
    this.log = log;
    this.logButton.setAttribute("aria-pressed", String(log));
    this.draw(true);
  }

  toggleTable() {
    this.numbers.hidden = !this.numbers.hidden;
    this.tableButton.setAttribute("aria-expanded", String(!this.numbers.hidden));
    this.fillTable();
  }

  toggleWide() {
    const wide = this.element.classList.toggle("is-wide");
    this.wideButton.setAttribute("aria-pressed", String(wide));
  }

  // curves: [{label, colour, dash, x, y, smooth}]; view: {axis, logX, low, high}
  show(curves, view) {
    const shape = JSON.stringify([
      curves.map((curve) => [curve.label, curve.colour, Boolean(curve.smooth)]),
      view,
    ]);
    this.curves = curves;
    this.view = view;
    this.draw(shape !== this.shape);
    this.shape = shape;
  }

  draw(anew) {
    if (!this.view) return;
    const tables = [],
      series = [{}];
    this.clean = [];
    for (const [place, curve] of this.curves.entries()) {
      const shown = !this.hidden.has(curve.label);
      const raw = clean(curve, this.view.logX, this.log);
      const main = curve.smooth ? clean(curve.smooth, this.view.logX, this.log) : raw;
      const few = main[0].length <= (curve.sparse ? 80 : 12);
      if (curve.smooth) {
        tables.push(raw);
        series.push({ stroke: curve.colour, width: 1, alpha: 0.38, show: shown, points: { show: false } });
      }
      tables.push(main);
      series.push({
        stroke: curve.colour,
        width: 1.8,
        dash: curve.dash,
        show: shown,
        points: { show: few, size: 5, fill: curve.colour },
      });
      this.clean[place] = main;
    }
    this.data = tables.length ? uPlot.join(tables) : [[]];
    this.unpainted = { series, anew: anew || Boolean(this.unpainted?.anew) };
    if (anew) this.makeLegend();
    this.paint();
    this.read();
    this.describe();
    if (!this.numbers.hidden) this.fillTable();
  }

  // Bring the canvas up to what was drawn last, as soon as it is near the screen.
  paint() {
    if (!this.near || !this.unpainted) return;
    const { series, anew } = this.unpainted;
    this.unpainted = null;
    if (this.uplot && !anew) {
      this.uplot.setData(this.data, true);
    } else {
      this.uplot?.destroy();
      this.plot.replaceChildren();
      this.uplot = new uPlot(this.options(series), this.data, this.plot);
    }
  }

  options(series) {
    const paint = colours();
    const axis = {
      stroke: paint.ink,
      font: "11px system-ui, sans-serif",
      grid: { stroke: paint.grid, width: 1 },
      ticks: { stroke: paint.grid, width: 1, size: 4 },
    };
    const tick = TICKS[this.view.axis];
    const { low, high } = this.view;
    const range = low === null ? undefined : () => [low, high];
    return {
      width: Math.max(120, this.plot.clientWidth),
      height: this.height(),
      series,
      legend: { show: false },
      scales: {
        x: { time: false, distr: this.view.logX ? 3 : 1, range },
        y: this.log ? { distr: 3 } : { distr: 1, range: spread },
      },
      axes: [
        {
          ...axis,
          size: 32,
          space: 64,
          values: (u, values) => values.map((value) => (value === null ? "" : tick(value))),
        },
        {
          ...axis,
          size: 52,
          values: (u, values) =>
            values.map((value) =>
              value === null ? "" : Math.abs(value) >= 1e4 ? compact(value) : number(value),
            ),
        },
      ],
      cursor: {
        y: false, // the charts share the cursor, and not their values
        sync: { key: this.sync, setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        focus: { prox: 20 },
      },
      hooks: {
        setCursor: [() => this.read()],
        setSelect: [(u) => this.selected(u)],
        ready: [(u) => u.over.addEventListener("dblclick", () => this.onZoom(null, null))],
      },
    };
  }

  height() {
    return this.element.classList.contains("is-wide") ? Math.min(520, Math.round(innerHeight * 0.6)) : HEIGHT;
  }

  selected(u) {
    if (u.select.width < 4) return;
    const low = u.posToVal(u.select.left, "x"),
      high = u.posToVal(u.select.left + u.select.width, "x");
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.onZoom(low, high);
  }

  resize() {
    const width = Math.max(120, this.plot.clientWidth);
    if (this.uplot && (width !== this.uplot.width || this.height() !== this.uplot.height))
      this.uplot.setSize({ width, height: this.height() });
  }

  makeLegend() {
    this.values = this.curves.map(() => [h("span", { class: "value" }), h("span", { class: "early" })]);
    fill(
      this.legend,
      this.where,
      this.curves.map((curve, place) => {
        const swatch = h("span", { class: "swatch" });
        swatch.style.background = curve.colour;
        const button = h(
          "button",
          {
            type: "button",
            class: "quiet small",
            "aria-pressed": String(!this.hidden.has(curve.label)),
            title: "Show or hide this curve",
            onclick: () => this.toggle(curve.label),
          },
          swatch,
          h("span", { class: "label" }, curve.label),
          ...this.values[place],
        );
        return h("li", {}, button);
      }),
    );
  }

  toggle(label) {
    if (!this.hidden.delete(label)) this.hidden.add(label);
    this.draw(true);
  }

  // The place that is read: of the point nearest to the cursor, or the newest.
  place() {
    const { left, idx } = this.uplot?.cursor ?? {};
    return left >= 0 && idx !== null && idx !== undefined ? this.uplot.data[0][idx] : this.data[0].at(-1);
  }

  // What a curve says there; a value of an earlier place (a validation's) names it.
  reading(curve, x) {
    const found = x === undefined ? undefined : at(this.clean[curve], x);
    if (!found) return ["–", ""];
    return [number(found.y), found.x === x ? "" : `at ${TICKS[this.view.axis](found.x)}`];
  }

  // The legend's numbers and their place.
  read() {
    if (!this.values || !this.data) return;
    const x = this.place();
    const over = this.uplot?.cursor.left >= 0;
    say(this.where, x === undefined ? "" : PLACES[this.view.axis](x));
    this.values.forEach(([value, early], curve) => {
      const [text, when] = this.reading(curve, x);
      say(value, text);
      say(early, over ? when : "");
    });
  }

  describe() {
    const words = this.curves.map((curve, place) => `${curve.label}: ${number(this.clean[place][1].at(-1))}`);
    this.plot.setAttribute(
      "aria-label",
      `${this.spec.title} against ${this.view.axis}. Newest: ${words.join("; ")}. Arrow keys read the curve, plus and minus zoom, 0 shows all.`,
    );
  }

  fillTable() {
    const rows = this.curves.map((curve, place) => {
      const ys = this.clean[place][1];
      const [least, most] = ys.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, -Infinity]);
      return [curve.label, ...[ys[0], ys.at(-1), least, most].map((value) => number(value))];
    });
    fill(
      this.numbers,
      table(["curve", "first", "newest", "least", "greatest"], rows, {
        label: `${this.spec.title} in numbers`,
      }),
    );
  }

  key(event) {
    const u = this.uplot;
    if (!u) return;
    const width = u.over.clientWidth;
    const place = u.cursor.left >= 0 ? u.cursor.left : width;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const xs = u.data[0];
      if (!xs.length) return;
      const reach = (event.shiftKey ? Math.ceil(xs.length / 10) : 1) * (event.key === "ArrowLeft" ? -1 : 1);
      const now = u.cursor.left >= 0 ? (u.cursor.idx ?? xs.length - 1) : xs.length;
      const next = Math.min(xs.length - 1, Math.max(0, now + reach));
      u.setCursor({ left: u.valToPos(xs[next], "x"), top: u.over.clientHeight / 2 });
      const words = this.curves.map((curve, n) => [curve.label, ...this.reading(n, xs[next])].join(" ").trim());
      say(this.live, `${PLACES[this.view.axis](xs[next])}: ${words.join(", ")}`);
    } else if (event.key === "+" || event.key === "=" || event.key === "-") {
      const middle = u.posToVal(Math.min(place, width), "x"),
        { min, max } = u.scales.x;
      const reach = (max - min) * (event.key === "-" ? 1 : 0.25);
      this.onZoom(middle - reach, middle + reach);
    } else if (event.key === "0" || event.key === "Escape") {
      this.onZoom(null, null);
    } else return;
    event.preventDefault();
  }

  destroy() {
    this.observer.disconnect();
    this.nearness.disconnect();
    this.uplot?.destroy();
  }
}

// The range of an axis; around a curve that never changes, a little of both sides of it.
function spread(u, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, low + Math.abs(low) / 10];
}
