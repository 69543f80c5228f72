// What every page has: theme, keyboard, rows that open, times that stay true.
import { ago, call, toast } from "./api.js";

// Theme: the system's, until the person chooses.
function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function toggleTheme() {
  const theme = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // Without storage the choice lasts for this page.
  }
}

document.getElementById("theme")?.addEventListener("click", toggleTheme);

// Times.
function refreshTimes() {
  for (const time of document.querySelectorAll("time[data-ago]")) {
    const text = ago(Date.parse(time.dateTime));
    if (time.textContent !== text) time.textContent = text;
  }
}
setInterval(refreshTimes, 1000);

// A click on a row opens it, unless it was meant for something in the row.
document.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-href]");
  if (!row || event.target.closest("a, button, input, label, summary")) return;
  if (getSelection()?.toString()) return;
  if (event.ctrlKey || event.metaKey) open(row.dataset.href, "_blank", "noopener");
  else location.assign(row.dataset.href);
});

// Sign out.
document.getElementById("sign-out")?.addEventListener("click", async () => {
  try {
    await call("DELETE", "/v1/session");
    location.assign("/login");
  } catch (error) {
    toast(error.message, true);
  }
});

// Keyboard.
const keys = document.getElementById("keys");
document.getElementById("keys-button")?.addEventListener("click", () => keys.showModal());

function select(step) {
  const rows = [...document.querySelectorAll("tr[data-href]")];
  if (rows.length === 0) return;
  const now = rows.findIndex((row) => row.getAttribute("aria-selected") === "true");
  const next = Math.max(0, Math.min(rows.length - 1, now + step));
  rows[now]?.removeAttribute("aria-selected");
  rows[next].setAttribute("aria-selected", "true");
  rows[next].scrollIntoView({ block: "nearest" });
}

let going = false;

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, [contenteditable]");
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (going) {
    going = false;
    document.querySelector(`a.nav[data-key="${CSS.escape(event.key)}"]`)?.click();
    return;
  }
  const search = document.getElementById("search");
  const chosen = document.querySelector('tr[aria-selected="true"]');
  if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
  } else if (event.key === "j") select(1);
  else if (event.key === "k") select(-1);
  else if (event.key === "Enter" && chosen && event.target === document.body) location.assign(chosen.dataset.href);
  else if (event.key === "n") document.getElementById("next")?.click();
  else if (event.key === "g") {
    going = true;
    setTimeout(() => (going = false), 1500);
  } else if (event.key === "t") toggleTheme();
  else if (event.key === "?") keys.showModal();
});
