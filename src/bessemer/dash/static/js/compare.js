// Several runs: their curves laid over each other, or the settings in which they differ.

import { get } from "./api.js";
import { Curves } from "./curves.js";
import { empty, fill, h } from "./dom.js";
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
    if (!data.rows.length) {
      fill(this.place, empty("The settings are the same", `All ${data.same} of them.`));
      return;
    }
    const value = (text, row) =>
      h(
        "td",
        { class: text !== row.values[0] ? "other" : null },
        text === null ? h("span", { class: "muted" }, "not there") : h("code", {}, text),
      );
    fill(
      this.place,
      h(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings that differ" },
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
              data.runs.map((run) =>
                h("th", { scope: "col" }, h("a", { href: address(run, "settings") }, run)),
              ),
            ),
          ),
          h(
            "tbody",
            {},
            data.rows.map((row) =>
              h(
                "tr",
                {},
                h("th", { scope: "row" }, row.key),
                row.values.map((text) => value(text, row)),
              ),
            ),
          ),
        ),
      ),
      h("p", { class: "muted pad" }, `${data.same} other settings are the same.`),
    );
  }
}
