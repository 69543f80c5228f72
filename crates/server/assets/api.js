// Requests to the API of the server, messages and questions to the person.

export function call(method, path, body) {
  return callText(method, path, body === undefined ? undefined : JSON.stringify(body));
}

// The same with a body that is JSON already.
export async function callText(method, path, body) {
  const options = { method, headers: {} };
  if (body !== undefined) {
    options.headers["content-type"] = "application/json";
    options.body = body;
  }
  const response = await fetch(path, options);
  if (response.status === 401) {
    location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    throw new Error("The session has ended.");
  }
  const text = await response.text();
  const answer = text ? JSON.parse(text) : null;
  if (!response.ok) {
    const hint = answer?.hint ? ` (${answer.hint})` : "";
    throw new Error(`${answer?.detail ?? response.statusText}${hint}`);
  }
  return answer;
}

export function toast(text, bad = false) {
  const box = document.createElement("div");
  box.className = bad ? "toast bad" : "toast";
  box.textContent = text;
  document.getElementById("toasts").append(box);
  setTimeout(() => box.remove(), bad ? 9000 : 4500);
}

// Asks before an action. Resolves to whether the person agreed.
export function ask({ title, body, yes = "OK", danger = false }) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-title").textContent = title;
  const place = document.getElementById("confirm-body");
  place.replaceChildren(...(typeof body === "string" ? [paragraph(body)] : body));
  const button = document.getElementById("confirm-yes");
  button.textContent = yes;
  button.classList.toggle("danger", danger);
  dialog.returnValue = "";
  dialog.showModal();
  button.focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

export function paragraph(text, className = "") {
  const p = document.createElement("p");
  p.className = className;
  p.textContent = text;
  return p;
}

// Runs an action and shows what became of it.
export async function act(work, done) {
  try {
    const answer = await work();
    toast(typeof done === "function" ? done(answer) : done);
    return answer;
  } catch (error) {
    toast(error.message, true);
    return undefined;
  }
}

// The page again, with what an action changed. The message stays readable first.
export function reloadSoon() {
  setTimeout(() => location.reload(), 700);
}

const thin = new Intl.NumberFormat("en").format;
export const number = (value) => thin(value).replaceAll(",", "\u202f");

// A latency in milliseconds. Short ones have a decimal.
export const latency = (value) => (value < 10 ? `${value.toFixed(1)} ms` : millis(value));

export function millis(value) {
  if (value < 1) return "0";
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60000) return `${(value / 1000).toFixed(1)} s`;
  return span(Math.floor(value / 1000));
}

export function span(seconds) {
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function ago(at) {
  const seconds = Math.round((Date.now() - at) / 1000);
  if (seconds < -1) return `in ${span(-seconds)}`;
  return seconds < 2 ? "just now" : `${span(seconds)} ago`;
}
