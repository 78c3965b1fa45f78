// The page: which view is shown, and once a second the question whether there is anything new.

import { get, setToken, takeToken, ServerError } from "./api.js";
import { Diff, Overlay } from "./compare.js";
import { ask, empty, fill, h, say } from "./dom.js";
import { List } from "./list.js";
import { Run } from "./run.js";

const EVERY = 1000; // milliseconds between questions; four times that while the page is hidden
const main = document.getElementById("main");
let view = null;
let opened = "";

function words() {
  const [path] = location.hash.replace(/^#\/?/, "").split("?");
  return path.split("/");
}

// An address may be typed by hand: what cannot be decoded is taken as it stands.
function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const list = (text) => text.split(",").filter(Boolean).map(decode);

function make([kind, what = "", tab = ""]) {
  if (kind === "run" && what) return new Run(decode(what), tab);
  if (kind === "overlay" && what) return new Overlay(list(what));
  if (kind === "diff" && what) return new Diff(list(what));
  return new List();
}

function open() {
  const now = words();
  if (view instanceof Run && now[0] === "run" && decode(now[1] ?? "") === view.id) {
    view.open(now[2] ?? "");
  } else {
    view?.destroy?.();
    view = make(now);
    fill(main, view.element);
    if (opened) main.focus({ preventScroll: false });
  }
  opened = location.hash;
  document.title = `${view.title} · Bessemer`;
  fill(
    document.getElementById("trail"),
    view instanceof List
      ? null
      : [
          h("a", { href: "#/" }, "Runs"),
          h("span", { "aria-hidden": "true" }, "/"),
          h("span", { "aria-current": "page" }, view.title),
        ],
  );
  tick();
}

function trouble(text) {
  const element = document.getElementById("trouble");
  element.hidden = !text;
  say(element, text ?? "");
}

let ticking = null;

async function tick() {
  if (ticking) return ticking;
  const asked = view;
  ticking = asked
    .refresh()
    .then(
      () => {
        trouble(null);
        live("live", "good");
        if (view === asked && view.element.parentNode !== main) fill(main, view.element); // an error stood in its place
      },
      (error) => {
        if (view === asked) failed(error);
      },
    )
    .finally(() => {
      ticking = null;
    });
  await ticking;
  if (view !== asked) return tick();
}

function live(text, kind) {
  const element = document.getElementById("live");
  say(element, text);
  element.className = `live ${kind}`;
}

function failed(error) {
  if (error instanceof ServerError && error.status === 401) {
    live("locked", "bad");
    fill(
      main,
      empty(
        "A token is needed",
        h("p", {}, "It is at the end of the address that bessemer dash printed."),
        h("button", { class: "primary", type: "button", onclick: askToken }, "Enter the token"),
      ),
    );
  } else if (error instanceof ServerError && error.status === 404) {
    live("live", "good");
    fill(main, empty("There is no such run", error.message, h("p", {}, h("a", { href: "#/" }, "All runs"))));
  } else if (error instanceof ServerError) {
    live("live", "good");
    trouble(error.message);
  } else if (error.name !== "AbortError") {
    live("offline", "bad");
    trouble("bessemer dash does not answer. What you see is the last state; it is asked again every second.");
    if (!(error instanceof TypeError)) console.error(error);
  }
}

async function askToken() {
  const field = h("input", { type: "password", id: "token", autocomplete: "off", "aria-label": "Token" });
  const answer = ask("Token", "From the address that bessemer dash printed. It stays in this tab.", "Use it");
  document.querySelector("#ask form").before(field);
  field.focus();
  if (await answer) {
    setToken(field.value);
    const { may_act: right } = await get("session");
    showKey(right);
    if (!right) trouble("This token is not the right one.");
    opened = "";
    view?.destroy?.();
    view = null;
    open();
  }
}

function showKey(right) {
  const key = document.getElementById("key");
  say(key, right ? "Token ✓" : "Token");
  key.title = right
    ? "Stop, resume and chat are allowed"
    : "Enter the token: it allows stop, resume and chat";
}

function changeTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("bessemer-theme", next);
  } catch {
    /* for this page only */
  }
  window.dispatchEvent(new Event("repaint"));
}

document.getElementById("theme").addEventListener("click", changeTheme);
document.getElementById("key").addEventListener("click", askToken);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  window.dispatchEvent(new Event("repaint")),
);
window.addEventListener("unhandledrejection", (event) => {
  trouble(event.reason?.message ?? "something went wrong");
});

takeToken();
window.addEventListener("hashchange", () => {
  if (/[#&]token=/.test(location.hash)) takeToken();
  open();
});
open();
get("session").then(
  ({ may_act: right }) => showKey(right),
  () => {},
);
(async () => {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, document.hidden ? 4 * EVERY : EVERY));
    await tick();
  }
})();
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) tick();
});
