// Jobs and tasks: pages that follow the log, the graph at a past moment, and what can be done.
import { act, ask, call, paragraph } from "./api.js";
import { subscribe } from "./live.js";

const page = document.getElementById("jobs-page");
const { tenant, job, ofTask } = page.dataset;
const own = new URLSearchParams({ tenant });
const jobPath = (verb) => `/v1/jobs/${encodeURIComponent(job)}/${verb}?${own}`;
const taskPath = (id, verb) => `/v1/tasks/${encodeURIComponent(id)}/${verb}?${own}`;

// The parts that the server renders again. Nothing is drawn here.

async function parts(address) {
  const response = await fetch(address);
  if (!response.ok || response.redirected) throw new Error("The page could not be loaded again.");
  return new DOMParser().parseFromString(await response.text(), "text/html");
}

function swap(fresh, only) {
  const focused = document.activeElement?.getAttribute("href");
  for (const old of document.querySelectorAll("[data-live]")) {
    if (only && !only.includes(old.id)) continue;
    const now = fresh.getElementById(old.id);
    if (!now) continue;
    const scrolled = [...old.querySelectorAll(".scroll, .tall")].map((box) => [box.scrollLeft, box.scrollTop]);
    old.replaceWith(document.adoptNode(now));
    [...now.querySelectorAll(".scroll, .tall")].forEach((box, n) => {
      if (scrolled[n]) [box.scrollLeft, box.scrollTop] = scrolled[n];
    });
    if (focused) [...now.querySelectorAll("a[href]")].find((a) => a.getAttribute("href") === focused)?.focus();
  }
}

// Live: a change of the log renders the page again, at most twice a second.

let past = page.dataset.follow === undefined;
let due = false;
let last = 0;

function refreshSoon() {
  if (past || due) return;
  due = true;
  setTimeout(refresh, Math.max(60, last + 500 - performance.now()));
}

async function refresh() {
  due = false;
  last = performance.now();
  if (past) return;
  try {
    const fresh = await parts(location.href);
    if (!past) swap(fresh);
  } catch {
    // The server is away; the next event tries again.
  }
}

const changes = ["Task Pending", "Task Processing Started", "Task Processing Failed", "Task Completed", "Task Failed", "Task Timeout", "Job Created", "Job Tasks Added", "Job Completed", "Job Failure Detected"];

function concerns({ payload }) {
  if (job !== undefined) return payload?.jobId === undefined || payload.jobId === job;
  if (ofTask !== undefined) return payload?.requestId === ofTask;
  return true;
}

if (!past) {
  const patterns = ofTask === undefined ? changes : [...changes, "Task Heartbeat"];
  const take = ({ events }) => {
    if (events.some(concerns)) refreshSoon();
  };
  // Rendered again once the server follows: what happened between the page and the subscription must not be missed.
  subscribe({ patterns, tenant }, take, undefined, refreshSoon);
}

// The slider: each step is one event of the time line. The last step is the present.

let asked = 0;

async function showMoment(step) {
  const moments = [...document.querySelectorAll("#timeline li[data-at]")];
  const slider = document.getElementById("moment");
  const label = document.getElementById("moment-label");
  const moment = moments[step];
  asked += 1;
  const mine = asked;
  for (const item of moments) item.removeAttribute("aria-current");
  if (!moment || step >= Number(slider.max)) {
    past = false;
    label.textContent = "now";
    await refresh();
    return;
  }
  past = true;
  moment.setAttribute("aria-current", "step");
  moment.scrollIntoView({ block: "nearest" });
  const at = moment.dataset.at;
  label.textContent = at;
  try {
    const fresh = await parts(`${location.pathname}?${new URLSearchParams({ tenant, at })}`);
    if (mine === asked) swap(fresh, ["graph", "tasks"]);
  } catch {
    label.textContent = "this moment could not be loaded";
  }
}

document.addEventListener("input", (event) => {
  if (event.target.id === "moment") showMoment(Number(event.target.value));
});

document.addEventListener("click", (event) => {
  const link = event.target.closest("[data-moment]");
  const slider = document.getElementById("moment");
  if (!link || !slider || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const step = [...document.querySelectorAll("#timeline li[data-at]")].indexOf(link.closest("li"));
  slider.value = step;
  showMoment(step);
});

document.addEventListener("change", (event) => {
  if (event.target.matches("select[data-submit]")) event.target.form.submit();
});

// Actions. Each asks first; the audit trail has them.

async function perform(question, work, done) {
  if (!(await ask(question))) return;
  if ((await act(work, done)) !== undefined) refreshSoon();
}

const tasksIn = (list) => (list.length === 1 ? "1 task" : `${list.length} tasks`);

const actions = {
  resume: () =>
    perform(
      { title: `Resume ${job}?`, body: "Its failed tasks run again. Tasks that depend on them follow when they have completed.", yes: "Resume" },
      () => call("POST", jobPath("resume"), {}),
      ({ resumed }) => `${tasksIn(resumed)} started again.`,
    ),
  cancel: () =>
    perform(
      { title: `Cancel ${job}?`, body: "Tasks that run are stopped; tasks that wait do not start. The job can be resumed.", yes: "Cancel the job", danger: true },
      () => call("POST", jobPath("cancel"), {}),
      ({ cancelled }) => `${tasksIn(cancelled)} cancelled.`,
    ),
  add: async () => {
    const text = document.createElement("textarea");
    text.id = "new-tasks";
    text.setAttribute("aria-label", "Tasks as JSON");
    text.spellcheck = false;
    text.value = JSON.stringify([{ taskId: "new-task", name: "work", dependsOn: [], input: {} }], null, 2);
    const body = [paragraph("Tasks as JSON. They may depend on each other and on tasks of the job."), text];
    if (!(await ask({ title: `Add tasks to ${job}?`, body, yes: "Add" }))) return;
    const added = await act(() => call("POST", jobPath("tasks"), { tasks: JSON.parse(text.value) }), (answer) => `${answer.added} added; the job has ${answer.totalTasksNow}.`);
    if (added !== undefined) refreshSoon();
  },
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-act], [data-retry-task], [data-cancel-task]");
  if (!button) return;
  const { act: name, retryTask, cancelTask, completed } = button.dataset;
  if (name !== undefined) actions[name]?.();
  else if (retryTask !== undefined)
    perform(
      { title: `Run ${retryTask} again?`, body: completed === undefined ? "The task waits for a worker again, with a fresh set of attempts." : "The task has completed. It does its work a second time.", yes: "Run again" },
      () => call("POST", taskPath(retryTask, "retry"), { completed: completed !== undefined }),
      ({ run }) => `It waits for a worker, run ${run}.`,
    );
  else
    perform(
      { title: `Cancel ${cancelTask}?`, body: "If a worker has the task, its process is ended. Tasks that depend on it do not start.", yes: "Cancel the task", danger: true },
      () => call("POST", taskPath(cancelTask, "cancel"), {}),
      ({ cancelled }) => (cancelled ? "It is cancelled." : "It had ended before."),
    );
});
