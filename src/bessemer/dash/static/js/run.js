// One run: its numbers now, what may be done with it, and its parts under tabs.

import { get, post } from "./api.js";
import { Curves } from "./curves.js";
import { ask, fill, h, say } from "./dom.js";
import { ago, compact, date, duration, number, percent } from "./format.js";
import { address, pill, progress, result } from "./list.js";
import { Checkpoints, Evaluations, Log, Report, Samples, Settings } from "./parts.js";
import { Chat } from "./talk.js";
import { Weights } from "./weights.js";

const TABS = [
  ["curves", "Curves", (run) => new Curves([run])],
  ["samples", "Samples", (run) => new Samples(run)],
  ["checkpoints", "Checkpoints", (run) => new Checkpoints(run)],
  ["evaluations", "Evaluations", (run) => new Evaluations(run)],
  ["weights", "Weights", (run) => new Weights(run)],
  ["settings", "Settings", (run) => new Settings(run)],
  ["report", "Report", (run) => new Report(run)],
  ["log", "Log", (run) => new Log(run)],
  ["chat", "Chat", (run) => new Chat(run)],
];
const TILES = [
  ["Loss", (run) => number(run.loss)],
  ["Result", (run) => result(run)],
  ["Tokens", (run) => compact(run.tokens)],
  ["Tokens/s", (run) => compact(run.tok_per_s)],
  ["MFU", (run) => (run.mfu === null ? "" : percent(run.mfu))],
  ["Parameters", (run) => compact(run.parameters)],
  ["Training time", (run) => duration(run.seconds)],
  ["Left", (run) => (run.state === "running" ? duration(run.eta) : "")],
];

export class Run {
  constructor(id, tab) {
    this.id = id;
    this.title = id;
    this.state = h("span", { class: "state" });
    this.tiles = TILES.map(() => h("dd"));
    this.buttons = h("div", { class: "row" });
    this.notes = h("div", { class: "notes" });
    this.steps = h("div", { class: "wide-steps" });
    this.health = h("p", { class: "health", id: "health", role: "status" });
    this.panel = h("div", { role: "tabpanel", id: "panel", tabindex: "-1" });
    this.tabs = TABS.map(([name, title]) =>
      h(
        "a",
        {
          role: "tab",
          id: `tab-${name}`,
          href: address(id, name),
          "aria-controls": "panel",
          onkeydown: (event) => this.arrow(event, name),
        },
        title,
      ),
    );
    this.element = h(
      "div",
      {},
      h("div", { class: "head" }, h("div", {}, h("h1", {}, id), this.state), this.buttons),
      this.notes,
      this.health,
      this.steps,
      h(
        "dl",
        { class: "tiles" },
        TILES.map(([title], place) => h("div", {}, h("dt", {}, title), this.tiles[place])),
      ),
      h("div", { class: "tabs", role: "tablist", "aria-label": "Parts of the run" }, this.tabs),
      this.panel,
    );
    this.open(tab);
  }

  open(tab) {
    const place = Math.max(
      0,
      TABS.findIndex(([name]) => name === tab),
    );
    this.tab = TABS[place][0];
    this.tabs.forEach((element, other) => {
      element.setAttribute("aria-selected", String(other === place));
      element.setAttribute("tabindex", other === place ? "0" : "-1");
    });
    this.panel.setAttribute("aria-labelledby", `tab-${this.tab}`);
    requestAnimationFrame(() => this.reveal(this.tabs[place])); // once it is on the page
    this.part?.destroy?.();
    this.part = TABS[place][2](this.id);
    fill(this.panel, this.part.element);
  }

  // Tabs that a narrow screen cuts off scroll sideways until the chosen one is seen; the page itself stays.
  reveal(tab) {
    const bar = tab.parentNode;
    const [inside, outside] = [tab.getBoundingClientRect(), bar.getBoundingClientRect()];
    bar.scrollLeft += inside.left - outside.left - (outside.width - inside.width) / 2;
  }

  arrow(event, name) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const place = (TABS.findIndex(([other]) => other === name) + step + TABS.length) % TABS.length;
    this.tabs[place].focus();
    location.hash = this.tabs[place].getAttribute("href");
  }

  async refresh() {
    const run = await get("run", { run: this.id });
    const session = await get("session");
    TILES.forEach(([, value], place) => {
      const now = value(run);
      if (typeof now === "string") say(this.tiles[place], now);
      else if (this.tiles[place].textContent !== now.textContent) fill(this.tiles[place], now);
      this.tiles[place].parentNode.hidden = now === "";
    });
    fill(
      this.state,
      pill(run.state),
      h(
        "span",
        { class: "muted" },
        [
          run.objective && run.recipe && run.recipe !== run.objective
            ? `${run.objective}, recipe ${run.recipe}`
            : run.objective,
          run.began === null ? null : `started ${date(run.began)}`,
          `active ${ago(run.beat)}${run.host ? ` on ${run.host}` : ""}`,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    );
    this.health.hidden = !run.health;
    this.health.classList.toggle("good", run.health?.good === true);
    say(this.health, run.health?.words ?? "");
    fill(this.steps, progress(run.step, run.steps));
    const resumed =
      run.resumed && run.resumed.failed
        ? [`The last resume ended with code ${run.resumed.exit_code}: ${run.resumed.said}`]
        : [];
    fill(
      this.notes,
      [...(run.message ? [run.message] : []), ...resumed, ...run.problems].map((text) =>
        h("p", { class: "note" }, text),
      ),
    );
    this.act(run, session.may_act);
    await this.part.refresh(run, session);
  }

  act(run, may) {
    const wanted =
      run.state === "running"
        ? "stop"
        : ["stopped", "crashed", "failed"].includes(run.state) && !run.id.includes("/")
          ? "resume"
          : null;
    const starting = run.resumed && run.resumed.exit_code === null && run.state !== "running";
    const key = `${wanted} ${may} ${starting}`;
    if (key === this.acted) return;
    this.acted = key;
    const hint = may ? null : "Needs the token: the Token button, top right";
    const button = (title, kind, click) =>
      h("button", { type: "button", id: "act", class: kind, disabled: !may, title: hint, onclick: click }, title);
    fill(
      this.buttons,
      starting
        ? h("span", { class: "muted" }, "resuming…")
        : wanted === "stop"
          ? button("Stop", "danger", () => this.stop())
          : wanted === "resume"
            ? button("Resume", "primary", () => this.resume())
            : null,
      h("a", { class: "button", href: `#/overlay/${encodeURIComponent(run.id)}` }, "Overlay…"),
    );
  }

  async stop() {
    if (
      await ask(
        "Stop this run?",
        `${this.id} finishes its step, saves a checkpoint and ends. Resume continues it exactly.`,
        "Stop it",
        "danger",
      )
    )
      this.tell(await post("stop", { run: this.id }));
  }

  async resume() {
    if (
      await ask(
        "Resume this run?",
        `bessemer resume ${this.id} starts on this machine, from its newest checkpoint.`,
        "Resume it",
      )
    )
      this.tell(await post("resume", { run: this.id }));
  }

  tell(answer) {
    this.notes.prepend(
      h("p", { class: "note good", role: "status" }, answer.message ?? `Resuming as pid ${answer.pid}.`),
    );
  }

  destroy() {
    this.part?.destroy?.();
  }
}
