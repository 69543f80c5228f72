// The WebSocket of the server. Reconnects with a backoff from 1 to 30 seconds and jitter, and continues each
// subscription after the last cursor that arrived.

const subscriptions = new Map();
let socket = null;
let delay = 1000;
let next = 0;

function show(state, text) {
  document.getElementById("live")?.removeAttribute("hidden");
  const dot = document.getElementById("live-dot");
  if (dot) dot.className = `dot ${state}`;
  const label = document.getElementById("live-text");
  if (label) label.textContent = text;
}

function connect() {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  socket = new WebSocket(`${scheme}://${location.host}/ws`, ["everbus.v1"]);
  socket.addEventListener("open", () => {
    delay = 1000;
    show("good", "live");
    for (const [id, subscription] of subscriptions) send(id, subscription);
  });
  socket.addEventListener("message", (message) => receive(JSON.parse(message.data)));
  socket.addEventListener("close", () => {
    socket = null;
    show("warn", "offline");
    const wait = delay * (0.5 + Math.random() / 2);
    delay = Math.min(delay * 2, 30000);
    setTimeout(connect, wait);
  });
}

function send(id, subscription) {
  const message = { type: "subscribe", id, ...subscription.wanted };
  if (subscription.cursor) message.after = subscription.cursor;
  socket.send(JSON.stringify(message));
}

function receive(message) {
  const subscription = subscriptions.get(message.subscription ?? message.id);
  if (!subscription) return;
  if (message.cursor) subscription.cursor = message.cursor;
  if (message.type === "ack") subscription.begun?.();
  if (message.type === "data") subscription.take(message);
  if (message.type === "status" && message.status === "error") subscription.refused?.(message);
}

// Subscribes; returns a function that ends the subscription. `begun` is called whenever the server has taken it.
export function subscribe(wanted, take, refused, begun) {
  next += 1;
  const id = `s${next}`;
  subscriptions.set(id, { wanted, take, refused, begun, cursor: null });
  if (socket === null) connect();
  else if (socket.readyState === WebSocket.OPEN) send(id, subscriptions.get(id));
  return () => {
    subscriptions.delete(id);
    if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type: "unsubscribe", id }));
  };
}
