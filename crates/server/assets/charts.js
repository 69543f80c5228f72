// Line charts as SVG. Colours come from the style sheet by class.

const NS = "http://www.w3.org/2000/svg";

function make(name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// A round number at or above the largest value.
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 2.5, 5, 10]) if (value <= step * power) return step * power;
  return value;
}

function label(value) {
  if (value >= 1000) return `${+(value / 1000).toFixed(1)}k`;
  return `${+value.toFixed(2)}`;
}

// Draws `series` (lists of numbers, the same length as `times`) into an svg element.
export function draw(svg, times, series) {
  const width = svg.clientWidth || 600;
  const height = svg.clientHeight || 150;
  const left = 38;
  const bottom = 18;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const top = ceiling(Math.max(0, ...series.flat()));
  const x = (n) => left + ((width - left - 4) * n) / Math.max(1, times.length - 1);
  const y = (value) => 6 + (height - bottom - 6) * (1 - value / top);
  const nodes = [];
  for (const part of [0, 0.5, 1]) {
    const at = y(top * part);
    nodes.push(make("line", { class: "grid", x1: left, x2: width - 4, y1: at, y2: at }));
    nodes.push(make("text", { class: "axis", x: left - 6, y: at + 4, "text-anchor": "end" }, label(top * part)));
  }
  if (times.length > 1) {
    const seconds = Math.round((times.at(-1) - times[0]) / 1000);
    const span = seconds >= 120 ? `${Math.round(seconds / 60)} min ago` : `${seconds} s ago`;
    nodes.push(make("text", { class: "axis", x: left, y: height - 3 }, span));
    nodes.push(make("text", { class: "axis", x: width - 4, y: height - 3, "text-anchor": "end" }, "now"));
    series.forEach((values, n) => {
      const points = values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
      const area = `${left},${y(0)} ${points.join(" ")} ${x(values.length - 1)},${y(0)}`;
      if (n === 0) nodes.push(make("polygon", { class: `area c${n + 1}`, points: area }));
      nodes.push(make("polyline", { class: `line c${n + 1}`, points: points.join(" ") }));
    });
  } else {
    nodes.push(make("text", { class: "axis", x: width / 2, y: height / 2, "text-anchor": "middle" }, "collecting"));
  }
  svg.replaceChildren(...nodes);
}

// A line without axes.
export function spark(values) {
  const most = Math.max(1, ...values);
  const last = Math.max(1, values.length - 1);
  const points = values.map((value, n) => `${((n * 100) / last).toFixed(1)},${(23 - (value * 22) / most).toFixed(1)}`);
  const svg = make("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(make("polyline", { class: "line", points: points.join(" ") }));
  return svg;
}
