// What is under the tabs of a run, besides curves and chat.

import { get } from "./api.js";
import { empty, fill, h, table } from "./dom.js";
import { ago, bytes, number, whole } from "./format.js";
import { address } from "./list.js";
import { markdown } from "./markdown.js";

class Part {
  constructor(id) {
    this.id = id;
    this.element = h("div", { class: "panel" });
  }

  // Draw only what is new, so that scrolling, selections and open details stay.
  once(data, draw) {
    const key = JSON.stringify(data);
    if (key !== this.key) fill(this.element, draw());
    this.key = key;
  }
}

export class Samples extends Part {
  async refresh() {
    const { samples } = await get("samples", { run: this.id });
    this.once(samples, () => {
      if (!samples.length)
        return empty(
          "No samples yet",
          "What the model writes as it learns appears here, every logging.preview_interval steps.",
        );
      const prompts = new Map();
      for (const sample of samples)
        prompts.set(sample.prompt, [sample, ...(prompts.get(sample.prompt) ?? [])]);
      return [...prompts].map(([prompt, all]) =>
        h(
          "section",
          { class: "sample" },
          h("h3", {}, h("code", {}, prompt || "(no prompt)")),
          h("ol", {}, all.slice(0, 3).map(written)),
          all.length > 3
            ? h(
                "details",
                {},
                h("summary", {}, `${all.length - 3} earlier`),
                h("ol", {}, all.slice(3).map(written)),
              )
            : null,
        ),
      );
    });
  }
}

function written(sample) {
  return h(
    "li",
    {},
    h("span", { class: "step-mark" }, `step ${whole(sample.step)}`),
    h("code", { class: "text" }, sample.completion || "(end of document)"),
  );
}

export class Checkpoints extends Part {
  async refresh(run) {
    this.once(run.checkpoints, () => {
      if (!run.checkpoints.length)
        return empty("No checkpoints", "Complete ones appear here as soon as they are committed.");
      const all = run.checkpoints.reduce((sum, entry) => sum + entry.bytes, 0);
      const rows = run.checkpoints.map((entry) => [
        whole(entry.step),
        bytes(entry.bytes),
        ago(entry.saved),
        h("a", { href: `${address(this.id, "chat")}?step=${entry.step}` }, "chat"),
      ]);
      return [
        table(["Step", "Size", "Saved", ""], rows, { label: "Checkpoints" }),
        h("p", { class: "muted pad" }, `${rows.length === 1 ? "1 checkpoint" : `${rows.length} checkpoints`}, ${bytes(all)}`),
      ];
    });
  }
}

export class Evaluations extends Part {
  async refresh(run) {
    this.once(run.evaluations, () => {
      if (!run.evaluations.length)
        return empty(
          "No evaluations yet",
          h("p", {}, "Measure this run:"),
          h("pre", {}, `bessemer eval ${this.id} --tasks bpb`),
        );
      const all = table(
        ["Task", "Step", "Value", "Measure"],
        run.evaluations.map((one) => [
          one.task,
          whole(one.step),
          h("strong", {}, number(one.value)),
          one.metric,
        ]),
        { label: "Evaluations" },
      );
      return [
        all,
        ...run.evaluations
          .filter((one) => one.parts.length)
          .map((one) =>
            h(
              "section",
              { class: "evaluation" },
              h(
                "h3",
                {},
                one.task,
                h("span", { class: "muted" }, ` at step ${whole(one.step)}, ${one.parts.length} parts`),
              ),
              table(
                ["Task", "Accuracy", "Centred"],
                one.parts.map((part) => [part.task, number(part.value), number(part.centred)]),
                { label: one.task },
              ),
            ),
          ),
      ];
    });
  }
}

export class Settings extends Part {
  async refresh(run) {
    this.once([run.config, run.origins, run.derived, run.facts], () => {
      const keys = Object.keys(run.config);
      if (!keys.length) return empty("No settings", "This run has no config.yaml that can be read.");
      const rows = keys.map((key) =>
        h(
          "tr",
          { data: { key: `${key} ${run.config[key]}`.toLowerCase(), given: String(key in run.origins) } },
          h("th", { scope: "row" }, key),
          h("td", {}, h("code", {}, run.config[key])),
          h("td", { class: "muted" }, run.origins[key] ?? "default"),
        ),
      );
      const filter = () => {
        for (const row of rows)
          row.hidden =
            !row.dataset.key.includes(find.value.toLowerCase()) ||
            (given.checked && row.dataset.given === "false");
      };
      const find = h("input", {
        type: "search",
        placeholder: "Find settings…",
        "aria-label": "Find settings",
        oninput: filter,
      });
      const given = h("input", { type: "checkbox", id: "given", onchange: filter });
      return [
        h(
          "div",
          { class: "controls" },
          find,
          h("label", { class: "check", for: "given" }, given, "Only those that are not defaults"),
        ),
        h(
          "div",
          { class: "scroll", tabindex: "0", role: "region", "aria-label": "Settings" },
          h(
            "table",
            { class: "settings" },
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                ["Setting", "Value", "From"].map((title) => h("th", { scope: "col" }, title)),
              ),
            ),
            h("tbody", {}, rows),
          ),
        ),
        run.derived.length
          ? [
              h("h3", { class: "pad" }, "Decided by the program"),
              table(
                ["What", "Value", "Why"],
                run.derived.map((one) => [one.name, h("code", {}, one.value), one.reason]),
                { label: "Decisions" },
              ),
            ]
          : null,
        h("h3", { class: "pad" }, "Versions and devices"),
        table(
          ["", ""],
          Object.entries({
            ...run.facts.versions,
            ...flat(run.facts.devices),
            determinism: run.facts.determinism,
          }).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]),
          { label: "Versions" },
        ),
      ];
    });
  }
}

function flat(value) {
  return value && typeof value === "object" && !Array.isArray(value) ? value : {};
}

export class Report extends Part {
  async refresh() {
    const { text } = await get("report", { run: this.id });
    this.once(text, () =>
      text === null
        ? empty(
            "No report yet",
            h("p", {}, "It is written when the run ends, or now, by:"),
            h("pre", {}, `bessemer report ${this.id}`),
          )
        : h("article", { class: "report" }, markdown(text)),
    );
  }
}

export class Log extends Part {
  async refresh() {
    const { text } = await get("log", { run: this.id });
    const before = this.element.querySelector(".log");
    const down = !before || before.scrollHeight - before.scrollTop - before.clientHeight < 40;
    this.once(text, () =>
      text
        ? h("pre", { class: "log", tabindex: "0" }, text)
        : empty("No log", "This run has not said anything yet."),
    );
    const pre = this.element.querySelector(".log");
    if (pre && down) pre.scrollTop = pre.scrollHeight;
  }
}
