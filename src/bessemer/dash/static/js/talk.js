// A conversation with a checkpoint. The server loads it on the first message.

import { chat } from "./api.js";
import { empty, fill, h, say } from "./dom.js";
import { whole } from "./format.js";

export class Chat {
  constructor(id) {
    this.id = id;
    this.messages = [];
    this.list = h("ol", { class: "talk", "aria-live": "polite", "aria-label": "Conversation" });
    this.step = h("select", { id: "step" });
    this.temperature = h("input", {
      id: "temperature",
      type: "number",
      min: "0",
      max: "2",
      step: "0.1",
      value: "0.8",
    });
    this.most = h("input", { id: "most", type: "number", min: "1", max: "4096", step: "1", value: "128" });
    this.text = h("textarea", {
      id: "message",
      rows: "2",
      placeholder: "Say something…",
      "aria-label": "Message",
      onkeydown: (event) => {
        if (event.key === "Enter" && !event.shiftKey) {
          event.preventDefault();
          this.send();
        }
      },
    });
    this.button = h("button", { type: "submit", class: "primary", id: "send" }, "Send");
    this.place = h("div", {});
    this.pane = h(
      "div",
      {},
      h(
        "div",
        { class: "controls" },
        h("label", { for: "step" }, "Checkpoint", this.step),
        h("label", { for: "temperature" }, "Temperature", this.temperature),
        h("label", { for: "most" }, "Tokens at most", this.most),
        h(
          "button",
          {
            type: "button",
            onclick: () => {
              this.messages = [];
              this.list.replaceChildren();
            },
          },
          "Clear",
        ),
      ),
      this.list,
      h(
        "form",
        {
          class: "say",
          onsubmit: (event) => {
            event.preventDefault();
            this.send();
          },
        },
        this.text,
        this.button,
      ),
    );
    this.element = h("div", { class: "panel chat" }, this.place);
  }

  async refresh(run, session) {
    const steps = run.checkpoints.map((entry) => entry.step);
    const key = JSON.stringify([steps, session.may_act]);
    if (key === this.key) return;
    this.key = key;
    if (!session.may_act) {
      fill(
        this.place,
        empty(
          "The token is needed to chat",
          "It is in the address that bessemer dash printed. The Token button, top right, takes it.",
        ),
      );
      return;
    }
    if (!steps.length) {
      fill(this.place, empty("Nobody to talk to yet", "The first checkpoint can be talked to."));
      return;
    }
    const wanted = this.step.value || /step=(\d+)/.exec(location.hash)?.[1];
    fill(
      this.step,
      steps.map((step) =>
        h("option", { value: String(step), selected: String(step) === wanted }, `step ${whole(step)}`),
      ),
    );
    if (this.pane.parentNode !== this.place) fill(this.place, this.pane);
  }

  async send() {
    if (this.stop) {
      this.stop.abort();
      return;
    }
    const text = this.text.value.trim();
    if (!text) return;
    this.text.value = "";
    this.messages.push({ role: "user", content: text });
    this.add("user", text);
    const answer = this.add("assistant", "");
    say(answer, "loading the model…");
    answer.classList.add("waiting");
    this.stop = new AbortController();
    say(this.button, "Stop");
    let said = "";
    try {
      const body = {
        run: this.id,
        step: Number(this.step.value),
        messages: this.messages,
        max_tokens: Number(this.most.value),
        temperature: Number(this.temperature.value),
      };
      for await (const piece of chat(body, this.stop.signal)) {
        said += piece;
        if (said) {
          answer.classList.remove("waiting");
          say(answer, said);
        }
      }
      if (!said) say(answer, "(nothing)");
    } catch (error) {
      if (error.name === "AbortError") say(answer, said || "(stopped)");
      else {
        say(answer, error.message);
        answer.classList.add("failed");
      }
    }
    answer.classList.remove("waiting");
    answer.dataset.done = "true";
    this.messages.push({ role: "assistant", content: said });
    this.stop = null;
    say(this.button, "Send");
    this.text.focus();
  }

  add(role, text) {
    const words = h("p", { class: "words" }, text);
    this.list.append(
      h("li", { class: role }, h("span", { class: "who" }, role === "user" ? "you" : this.id), words),
    );
    words.scrollIntoView({ block: "nearest" });
    return words;
  }

  destroy() {
    this.stop?.abort();
  }
}
