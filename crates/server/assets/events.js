// The live tail of events, and replaying one of them.
import { act, ago, ask, call, toast } from "./api.js";
import { subscribe } from "./live.js";

const rows = document.getElementById("event-rows");
const button = document.getElementById("tail");
const MOST = 200;
let stop = null;

function cell(className, label, content) {
  const td = document.createElement("td");
  td.className = className;
  if (label) td.dataset.label = label;
  td.append(content);
  return td;
}

function clipped(text, more = "") {
  const span = document.createElement("span");
  span.className = `clip ${more}`;
  span.title = text;
  span.textContent = text;
  return span;
}

function row(event) {
  const tr = document.createElement("tr");
  tr.className = "new";
  tr.dataset.href = `/events/${event.id}`;
  const id = document.createElement("a");
  id.className = "mono";
  id.href = `/events/${event.id}`;
  id.title = event.id;
  id.textContent = event.id.length > 14 ? `…${event.id.slice(-12)}` : event.id;
  const time = document.createElement("time");
  time.dateTime = event.received_at;
  time.title = event.received_at;
  time.dataset.ago = "";
  time.textContent = ago(Date.parse(event.received_at));
  const entity = event.entity ? `${event.entity.type ?? event.entity.kind}:${event.entity.id}` : (event.key ?? "");
  const lead = cell("lead", "", clipped(event.type));
  if (event.tenant) lead.append(clipped(event.tenant, "small faint"));
  const text = event.payload === undefined ? (event.payload_text ?? "") : JSON.stringify(event.payload);
  const payload = clipped(text.slice(0, 160), "mono small muted");
  payload.removeAttribute("title");
  tr.append(
    lead,
    cell("line", "", payload),
    cell("", "Entity", clipped(entity)),
    cell("", "Id", id),
    cell("num", "Received", time),
  );
  return tr;
}

function take({ events }) {
  const empty = document.querySelector("#main .empty");
  if (empty) empty.hidden = true;
  rows.closest(".scroll").hidden = false;
  for (const event of events.slice(-MOST)) rows.prepend(row(event));
  while (rows.children.length > MOST) rows.lastElementChild.remove();
}

function toggle() {
  if (stop) {
    stop();
    stop = null;
  } else {
    const form = new FormData(document.getElementById("filters"));
    const wanted = { patterns: [] };
    if (form.get("type")) wanted.patterns.push(form.get("type"));
    if (form.get("tenant")) wanted.tenant = form.get("tenant");
    stop = subscribe(wanted, take);
  }
  button.setAttribute("aria-pressed", String(stop !== null));
  button.textContent = stop ? "Live tail is on" : "Live tail";
}

if (button && rows) {
  button.addEventListener("click", toggle);
  // The first page of an unfiltered list follows by itself.
  if (location.search === "") toggle();
}

document.addEventListener("click", async (event) => {
  const replay = event.target.closest("[data-replay]");
  if (!replay) return;
  const groups = [...document.querySelectorAll("[data-handled-by]")].map((group) => group.dataset.handledBy);
  const input = document.createElement("input");
  input.placeholder = "the name of a group";
  input.setAttribute("aria-label", "Group");
  input.setAttribute("list", "replay-groups");
  if (groups.length === 1) input.value = groups[0];
  const names = document.createElement("datalist");
  names.id = "replay-groups";
  names.append(...groups.map((group) => new Option(group)));
  const text = document.createElement("p");
  text.textContent = "The event runs again in this group, even if the group has handled it. The group must be able to handle it twice.";
  if (!(await ask({ title: "Replay this event?", body: [text, input, names], yes: "Replay" }))) return;
  const group = input.value.trim();
  if (group === "") return toast("A replay needs the name of a group.", true);
  const body = { id: replay.dataset.replay, group };
  await act(() => call("POST", "/v1/replays", body), "The replay has begun.");
});
