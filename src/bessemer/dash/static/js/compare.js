// Several runs: their curves laid over each other, or the settings in which they differ.

import { get } from "./api.js";
import { Curves } from "./curves.js";
import { empty, fill, h, table } from "./dom.js";
import { address } from "./list.js";

export class Overlay {
  constructor(runs) {
    this.title = "Overlay";
    this.curves = new Curves(runs);
    const chips = runs.map((run, place) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.background = `var(--curve-${1 + (place % 8)})`;
      const others = runs.filter((other) => other !== run).map(encodeURIComponent);
      return h(
        "li",
        {},
        swatch,
        h("a", { href: address(run) }, run),
        others.length
          ? h(
              "a",
              { class: "drop", href: `#/overlay/${others.join(",")}`, "aria-label": `Leave out ${run}` },
              "×",
            )
          : null,
      );
    });
    this.runs = runs;
    this.more = h("select", {
      "aria-label": "Add a run",
      onchange: (event) => {
        location.hash = `#/overlay/${[...runs, event.target.value].map(encodeURIComponent).join(",")}`;
      },
    });
    const settings =
      runs.length > 1
        ? h(
            "a",
            { class: "button", href: `#/diff/${runs.map(encodeURIComponent).join(",")}` },
            "Compare settings",
          )
        : null;
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "head" },
        h(
          "div",
          {},
          h("h1", {}, runs.length === 1 ? "Lay another run over this one" : `${runs.length} runs overlaid`),
          h("ul", { class: "chips" }, chips),
        ),
        h("div", { class: "row" }, this.more, settings),
      ),
      this.curves.element,
    );
  }

  async refresh() {
    const others = (await get("runs")).runs
      .map((run) => run.id)
      .filter((id) => !this.runs.includes(id))
      .sort();
    const key = others.join(",");
    if (key !== this.key)
      fill(
        this.more,
        h("option", { value: "" }, "Add a run…"),
        others.map((id) => h("option", { value: id }, id)),
      );
    this.key = key;
    this.more.hidden = !others.length || this.runs.length >= 20;
    await this.curves.refresh();
  }

  destroy() {
    this.curves.destroy();
  }
}

export class Diff {
  constructor(runs) {
    this.title = "Settings";
    this.runs = runs;
    this.place = h("div", { class: "panel" });
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "head" },
        h("div", {}, h("h1", {}, "Settings that differ"), h("p", { class: "muted" }, runs.join(" · "))),
        h("a", { class: "button", href: `#/overlay/${runs.map(encodeURIComponent).join(",")}` }, "Overlay"),
      ),
      this.place,
    );
  }

  async refresh() {
    const data = await get("diff", { run: this.runs });
    if (data === this.shown) return;
    this.shown = data;
    fill(
      this.place,
      data.rows.length
        ? this.table("Settings that differ", data.runs, data.rows)
        : empty("Nothing differs", "The settings that all of these runs have are the same."),
      this.more("In some of the runs only", data.partial.length, () =>
        this.table("Settings of some runs", data.runs, data.partial),
      ),
      this.more("The same in all", data.same.length, () =>
        table(["Setting", "Value"], data.same.map((one) => [h("code", {}, one.key), h("code", {}, one.value)]), {
          label: "Settings that are the same",
        }),
      ),
    );
  }

  // A table that is made when it is opened.
  more(title, count, make) {
    if (!count) return null;
    const place = h("div");
    return h(
      "details",
      { class: "more", ontoggle: () => place.childNodes.length || fill(place, make()) },
      h("summary", {}, `${title}: ${count === 1 ? "1 setting" : `${count} settings`}`),
      place,
    );
  }

  table(label, runs, rows) {
    const value = (text, row, run) =>
      h(
        "td",
        { class: text !== null && text !== row.values[0] ? "other" : null, data: { run } },
        text === null ? h("span", { class: "muted" }, "–") : h("code", {}, text),
      );
    return h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      h(
        "table",
        { class: "diff" },
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "Setting"),
            runs.map((run) => h("th", { scope: "col" }, h("a", { href: address(run, "settings") }, run))),
          ),
        ),
        h(
          "tbody",
          {},
          rows.map((row) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, row.key),
              row.values.map((text, place) => value(text, row, runs[place])),
            ),
          ),
        ),
      ),
    );
  }
}
