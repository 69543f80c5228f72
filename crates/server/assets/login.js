// Exchanges a token for a session.
const form = document.getElementById("login");
const problem = document.getElementById("problem");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  problem.textContent = "";
  const token = document.getElementById("token").value.trim();
  const response = await fetch("/v1/session", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ token }),
  });
  if (!response.ok) {
    problem.textContent = response.status === 401 ? "This token is unknown, revoked or has expired." : `The server answered ${response.status}.`;
    return;
  }
  // Only a path of this server: an address from elsewhere must not lead a person away after signing in.
  const next = new URLSearchParams(location.search).get("next") ?? "/";
  const target = new URL(next, location.origin);
  location.assign(target.origin === location.origin ? target.pathname + target.search : "/");
});
