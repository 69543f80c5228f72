// Dead letters: retry, correct, purge. Every action asks first, and bulk actions show what they would do.
import { act, ask, call, callText, number, paragraph, reloadSoon } from "./api.js";

const list = document.getElementById("letters");

function filter() {
  const wanted = {};
  for (const name of ["type", "group", "error"]) if (list.dataset[name]) wanted[name] = list.dataset[name];
  return wanted;
}

document.addEventListener("click", async (event) => {
  const retry = event.target.closest("[data-retry]");
  if (!retry) return;
  event.preventDefault();
  const { retry: id, of: group } = retry.dataset;
  const agreed = await ask({ title: "Retry this event?", body: `The group ${group} gets it again, with a fresh set of attempts.`, yes: "Retry" });
  if (!agreed) return;
  const path = `/v1/dead-letters/${encodeURIComponent(id)}/retry`;
  const done = await act(() => call("POST", path, { group }), "It waits for its next attempt.");
  if (done !== undefined) reloadSoon();
});

async function preview() {
  const answer = await call("POST", "/v1/dead-letters/preview", filter());
  const parts = [paragraph(`${number(answer.total)} dead letters match:`)];
  const rows = document.createElement("ul");
  for (const tally of answer.tallies.slice(0, 8)) {
    const item = document.createElement("li");
    item.textContent = `${number(tally.count)} × ${tally.event_type} in ${tally.group}: ${tally.error.slice(0, 120)}`;
    rows.append(item);
  }
  if (answer.tallies.length > 8) rows.append(Object.assign(document.createElement("li"), { textContent: `and ${answer.tallies.length - 8} other errors` }));
  parts.push(rows);
  return { total: answer.total, parts };
}

document.getElementById("retry-all")?.addEventListener("click", async () => {
  const found = await act(preview, "Counted.");
  if (!found) return;
  const body = [...found.parts, paragraph("They go back to the groups that failed, oldest first.", "muted")];
  if (!(await ask({ title: "Retry these dead letters?", body, yes: `Retry ${number(found.total)}` }))) return;
  const done = await act(() => call("POST", "/v1/dead-letters/retry", { filter: filter(), expected: found.total }), (answer) => `${number(answer.retried)} wait for their next attempt.`);
  if (done !== undefined) reloadSoon();
});

document.getElementById("purge-all")?.addEventListener("click", async () => {
  const found = await act(preview, "Counted.");
  if (!found) return;
  const body = [...found.parts, paragraph("They are deleted and cannot be brought back. The audit trail keeps who did this.", "bad")];
  if (!(await ask({ title: "Purge these dead letters?", body, yes: `Delete ${number(found.total)}`, danger: true }))) return;
  const done = await act(() => call("POST", "/v1/dead-letters/purge", { filter: filter(), by: "died", expected: found.total }), (answer) => `${number(answer.purged)} deleted.`);
  if (done !== undefined) reloadSoon();
});

// Edit and retry.

const editor = document.getElementById("editor");
const payload = document.getElementById("payload");

// Only white space changes: reading and writing a number again may round it.
function pretty(text) {
  try {
    JSON.parse(text);
  } catch {
    return text;
  }
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s"{}[\],:]+/g) ?? [];
  let out = "";
  tokens.forEach((token, at) => {
    const before = tokens[at - 1];
    if (token === "}" || token === "]") {
      depth -= 1;
      out += before === "{" || before === "[" ? token : line() + token;
    } else {
      if (before === "{" || before === "[") out += line();
      out += token;
      if (token === "{" || token === "[") depth += 1;
      else if (token === ",") out += line();
      else if (token === ":") out += " ";
    }
  });
  return out;
}

function difference(before, after) {
  const old = before.split("\n");
  const now = after.split("\n");
  const nodes = [];
  const line = (text, className) => {
    const span = document.createElement("span");
    span.className = className;
    span.textContent = text;
    nodes.push(span);
  };
  for (const text of old) if (!now.includes(text)) line(`- ${text}`, "diff-del");
  for (const text of now) if (!old.includes(text)) line(`+ ${text}`, "diff-add");
  return nodes;
}

if (editor && payload) {
  const original = pretty(payload.value);
  payload.value = original;
  const problem = document.getElementById("payload-problem");
  const check = () => {
    let valid = true;
    try {
      JSON.parse(payload.value);
      problem.textContent = "";
    } catch (error) {
      valid = false;
      problem.textContent = `This is not JSON: ${error.message}`;
    }
    document.getElementById("send").disabled = !valid;
    document.getElementById("payload-diff").replaceChildren(...difference(original, payload.value));
  };
  payload.addEventListener("input", check);
  document.getElementById("edit").addEventListener("click", () => {
    check();
    editor.returnValue = "";
    editor.showModal();
    payload.focus();
  });
  editor.addEventListener("close", async () => {
    if (editor.returnValue !== "send") return;
    const { id, of: group } = editor.dataset;
    // The payload goes as it is written: a number that JavaScript cannot hold stays whole.
    const body = `{"group":${JSON.stringify(group)},"payload":${payload.value}}`;
    const path = `/v1/dead-letters/${encodeURIComponent(id)}/edit`;
    const done = await act(() => callText("POST", path, body), "The corrected event is published.");
    if (done !== undefined) reloadSoon();
  });
}
