// Groups: live figures, pause and resume.
import { act, ask, call, reloadSoon } from "./api.js";
import { subscribe } from "./live.js";
import { showDeadCount, showGroups } from "./overview.js";

const path = (name, verb) => `/v1/groups/${encodeURIComponent(name)}/${verb}`;

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-pause], [data-resume]");
  if (!button) return;
  const pause = button.dataset.pause !== undefined;
  const name = button.dataset.pause ?? button.dataset.resume;
  const question = pause
    ? {
        title: `Pause ${name}?`,
        body: "No process delivers events to the group until it is resumed. Events go on being stored, and wait. Handlers that run now finish.",
        yes: "Pause",
      }
    : { title: `Resume ${name}?`, body: "Events that wait are delivered from now on.", yes: "Resume" };
  if (!(await ask(question))) return;
  const done = pause ? "The group is paused." : "The group is resumed.";
  const answer = await act(() => call("POST", path(name, pause ? "pause" : "resume"), {}), done);
  if (answer !== undefined) reloadSoon();
});

subscribe({ topic: "overview" }, ({ figures }) => {
  showDeadCount(figures.now.dead_letters);
  showGroups(figures.groups);
});
