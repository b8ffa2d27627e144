// What all files of the page use: elements, and numbers as people read them. Text from the server only ever
// becomes text nodes and attribute values of our own choice.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

export function tell(node, text) {
  // What has not changed is left alone, or a reader of the screen would hear it again.
  if (node.textContent !== text) node.textContent = text;
}

export const NOTHING = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined) return NOTHING;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return `${trimmed(value / 1e6, digits)} M`;
  if (size >= 1e4) return `${trimmed(value / 1e3, digits)} k`;
  if (size >= 100) return String(Math.round(value));
  return trimmed(value, digits);
}

function trimmed(value, digits) {
  const text = value.toPrecision(digits);
  return text.includes("e") ? String(Number(text)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export function seconds(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value === 0) return "0";
  if (value >= 1) return `${trimmed(value, 3)} s`;
  if (value >= 1e-3) return `${trimmed(value * 1e3, 3)} ms`;
  return `${Math.round(value * 1e6)} µs`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${trimmed(value, 3)} ${units[at]}`;
}

export function percent(value) {
  return value === null || value === undefined ? NOTHING : `${Math.round(value * 100)} %`;
}

export function age(total) {
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]].flatMap(([unit, size]) => {
    const count = Math.floor(total / size);
    total -= count * size;
    return count ? [`${count} ${unit}`] : [];
  });
  return parts.slice(0, 2).join(" ") || "0 s";
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

export function pretty(value) {
  // Arrays of plain values on one line: a tensor of 64 elements is not 64 lines.
  return JSON.stringify(value, null, 2).replace(/"(?:[^"\\]|\\.)*"|\[[^[\]{}"]*\]/g, (match) =>
    match[0] === '"' ? match : match.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"));
}

const GOOD = ["READY", "SERVING", "HEALTHY", "UP"];
const BUSY = ["LOADING", "STARTING", "LEAVING", "UNLOADING", "ENDING", "SUSPECT"];

export function pill(state, node = element("span")) {
  const kind = GOOD.includes(state) ? "good" : BUSY.includes(state) ? "busy" : state === "" ? "" : "bad";
  node.className = `pill ${kind}`;
  tell(node, state || "not loaded");
  return node;
}

export function path(...segments) {
  return segments.map(encodeURIComponent).join("/");
}
