// The overview moves: figures and charts every second.
import { latency, millis, number } from "./api.js";
import { draw, spark } from "./charts.js";
import { subscribe } from "./live.js";

const place = document.getElementById("overview");
const points = place ? JSON.parse(place.dataset.points || "[]") : [];
const MOST = 300;

function charts() {
  const times = points.map((point) => point.at);
  const line = (name) => points.map((point) => point[name]);
  const rates = document.getElementById("chart-rates");
  if (rates) draw(rates, times, [line("published"), line("handled"), line("failed")]);
  const latencies = document.getElementById("chart-latency");
  if (latencies) draw(latencies, times, [line("p50"), line("p99")]);
}

function set(id, text) {
  const node = document.getElementById(id);
  if (node && node.textContent !== text) node.textContent = text;
}

export function showGroups(groups) {
  for (const group of groups) {
    const row = document.querySelector(`tr[data-group="${CSS.escape(group.name)}"]`);
    if (!row) continue;
    const figure = (name, text) => {
      const node = row.querySelector(`[data-figure="${name}"]`);
      if (node && node.textContent !== text) node.textContent = text;
    };
    figure("waiting", number(group.behind + group.in_flight + group.waiting));
    figure("behind", number(group.behind));
    figure("in_flight", number(group.in_flight));
    figure("retrying", number(group.waiting));
    figure("oldest", group.behind_ms === 0 ? "–" : millis(group.behind_ms));
    figure("dead", number(group.dead_letters));
    const dead = row.querySelector('[data-figure="dead"]');
    dead?.classList.toggle("bad", group.dead_letters > 0);
    row.querySelector('[data-figure="spark"]')?.replaceChildren(spark(group.spark));
  }
}

export function showDeadCount(count) {
  const node = document.getElementById("dead-count");
  if (!node) return;
  node.textContent = number(count);
  node.hidden = count === 0;
}

function take({ figures }) {
  const now = figures.now;
  set("f-published", now.published.toFixed(1));
  set("f-handled", now.handled.toFixed(1));
  set("f-failed", now.failed.toFixed(1));
  set("f-p50", latency(now.p50));
  set("f-p99", latency(now.p99));
  set("f-waiting", number(now.waiting));
  set("f-dead", number(now.dead_letters));
  set("processes", figures.processes === 1 ? "1 server" : `${figures.processes} servers on this store`);
  showDeadCount(now.dead_letters);
  showGroups(figures.groups);
  const breakers = document.getElementById("breakers");
  if (breakers) {
    breakers.hidden = figures.breakers.length === 0;
    breakers.replaceChildren(
      ...figures.breakers.map((breaker) => {
        const notice = document.createElement("div");
        notice.className = "notice warn";
        notice.textContent = `The circuit breaker ${breaker.name} is ${breaker.state}.`;
        return notice;
      }),
    );
  }
  // A group that appeared since the page was made.
  const known = document.querySelectorAll("#group-rows tr").length;
  if (known === 0 && figures.groups.length > 0) location.reload();
  points.push(now);
  if (points.length > MOST) points.shift();
  charts();
}

if (place) {
  charts();
  addEventListener("resize", charts);
  subscribe({ topic: "overview" }, take);
}
