// What the server is asked. The token travels in a header, never in an address or a cookie; what has not changed is not
// sent again (ETag).

const MOST = 60;
const known = new Map();
let token = stored();

function stored() {
  try {
    return sessionStorage.getItem("bessemer-token") ?? "";
  } catch {
    return "";
  }
}

export function setToken(given) {
  token = given.trim();
  known.clear();
  try {
    sessionStorage.setItem("bessemer-token", token);
  } catch {
    /* kept for this page only */
  }
}

// The printed address ends with #token=…: a part of it that browsers never send. It is taken out of the address bar.
export function takeToken() {
  const found = /[#&]token=([^&]+)/.exec(location.hash);
  if (!found) return;
  setToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", `${location.pathname}#/`);
}

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more = {}) {
  return token ? { Authorization: `Bearer ${token}`, ...more } : more;
}

async function refusal(response) {
  try {
    return new ServerError(response.status, (await response.json()).error.message);
  } catch {
    return new ServerError(response.status, `the server answered ${response.status}`);
  }
}

export async function get(path, query = {}, signal = undefined) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== null && one !== undefined) words.append(name, one);
  }
  const address = `/api/${path}${words.size ? `?${words}` : ""}`;
  const before = known.get(address);
  const response = await fetch(address, {
    headers: headers(before ? { "If-None-Match": before.tag } : {}),
    signal,
    cache: "no-store",
  });
  if (response.status === 304 && before) return before.data;
  if (!response.ok) throw await refusal(response);
  const data = await response.json();
  const tag = response.headers.get("ETag");
  if (tag) {
    known.delete(address);
    known.set(address, { tag, data });
    if (known.size > MOST) known.delete(known.keys().next().value);
  }
  return data;
}

export async function post(path, body) {
  const response = await fetch(`/api/${path}`, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

// An answer of a model, piece by piece.
export async function* chat(body, signal) {
  const response = await fetch("/api/chat", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ServerError(502, event.error.message);
      yield event.choices?.[0]?.delta?.content ?? "";
    }
  }
}
