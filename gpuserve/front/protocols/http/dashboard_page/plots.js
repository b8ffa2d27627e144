// Plots of the last minutes, in SVG. A series is a list of points by time; older ones come from the server's
// history, and each sample adds one.

import { age, clock, element, number, seconds, tell } from "./dom.js";

const WINDOW_S = 900;
const LEAST_S = 60;
const GAP_S = 12;
const FIELDS = ["requests_per_s", "failures_per_s", "batch_size", "queued", "saturation", "p50_s", "p99_s"];
const WIDTH = 480;
const HEIGHT = 136;
const INSIDE = { left: 52, right: 6, top: 8, bottom: 18 };

const rate = (value) => number(value);
const PLOTS = [
  { title: "Requests a second", show: rate, least: 1,
    lines: [["answered", "requests_per_s", "first"], ["failed", "failures_per_s", "bad"]] },
  { title: "Latency", show: seconds, least: 0.001, lines: [["p99", "p99_s", "second"], ["p50", "p50_s", "first"]] },
  { title: "Waiting in the queue", show: rate, least: 1, lines: [["requests", "queued", "first"]] },
  { title: "Rows of a batch", show: rate, least: 1, lines: [["mean", "batch_size", "first"]] },
];

export class Points {
  constructor() {
    this.times = [];
    this.values = Object.fromEntries(FIELDS.map((field) => [field, []]));
  }

  begin(history) {
    // What came while the history was under way stays behind it.
    if (!history.times) return;
    const last = history.times.at(-1) ?? 0;
    const from = this.times.findIndex((time) => time > last);
    const rest = from < 0 ? this.times.length : from;
    this.times = history.times.concat(this.times.slice(rest));
    for (const field of FIELDS) this.values[field] = history.series[field].concat(this.values[field].slice(rest));
  }

  add(time, row) {
    if (time <= this.times.at(-1)) return;
    this.times.push(time);
    for (const field of FIELDS) this.values[field].push(row[field] ?? null);
    while (this.times[0] < time - WINDOW_S) {
      this.times.shift();
      for (const field of FIELDS) this.values[field].shift();
    }
  }

  get now() {
    return this.times.at(-1) ?? Date.now() / 1000;
  }

  get span() {
    // Of a server that has just begun less is shown, and larger.
    return Math.min(WINDOW_S, Math.max(LEAST_S, this.now - (this.times[0] ?? this.now)));
  }
}

function svg(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

class Plot {
  constructor({ title, show, least, lines }) {
    Object.assign(this, { title, show, least, lines });
    this.chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.paths = lines.map(([, , kind]) => svg("path", { class: kind, "vector-effect": "non-scaling-stroke" }));
    this.under = lines.length === 1 || lines[0][2] === "first" ? svg("path", { class: "under" }) : null;
    this.cursor = svg("line", { class: "at", y1: INSIDE.top, y2: HEIGHT - INSIDE.bottom, visibility: "hidden" });
    const rulers = [0, 0.5, 1].map((part) => svg("line", {
      class: "grid", x1: INSIDE.left, x2: WIDTH - INSIDE.right, y1: y(part), y2: y(part), "vector-effect": "non-scaling-stroke" }));
    this.labels = [0, 0.5, 1].map((part) => svg("text", { x: INSIDE.left - 6, y: y(part) + 4, "text-anchor": "end" }));
    this.times = [[0, "start"], [0.5, "middle"], [1, "end"]].map(([part, anchor]) =>
      svg("text", { x: x(part), y: HEIGHT - 4, "text-anchor": anchor }));
    this.chart.append(...rulers, ...(this.under ? [this.under] : []), ...this.paths, this.cursor, ...this.labels, ...this.times);
    this.keys = lines.map(([, , kind]) => element("span", { className: `key ${kind}` }));
    this.when = element("span", { className: "quiet" });
    this.figure = element("figure", {}, element("figcaption", {}, element("b", {}, title), this.when, ...this.keys), this.chart);
    this.pointed = null;
    this.chart.addEventListener("pointermove", (event) => this.point(event));
    this.chart.addEventListener("pointerleave", () => this.point(null));
    // The letters would be stretched with the rest: the box is as wide as it is shown.
    new ResizeObserver(() => this.points && this.draw(this.points)).observe(this.chart);
  }

  point(event) {
    const box = this.chart.getBoundingClientRect();
    this.pointed = event && ((event.clientX - box.left) / box.width * this.width - INSIDE.left) / (this.width - INSIDE.left - INSIDE.right);
    if (this.points) this.draw(this.points);
  }

  get width() {
    return Math.max(200, this.chart.clientWidth || WIDTH);
  }

  draw(points) {
    this.points = points;
    const width = this.width;
    this.chart.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const columns = this.lines.map(([, field]) => points.values[field]);
    const top = rounded(Math.max(this.least, ...columns.flat().filter((value) => value !== null)));
    const across = (time) => x(1 - (points.now - time) / points.span, width);
    const up = (value) => y(value / top);
    this.paths.forEach((path, place) => path.setAttribute("d", line(points.times, columns[place], across, up)));
    if (this.under) this.under.setAttribute("d", area(points.times, columns[0], across, up));
    [0, 0.5, 1].forEach((part, place) => tell(this.labels[place], this.show(part * top)));
    this.chart.querySelectorAll(".grid").forEach((ruler) => ruler.setAttribute("x2", width - INSIDE.right));
    [[`${age(points.span)} ago`, 0], ["", 0.5], ["now", 1]].forEach(([text, part], place) => {
      this.times[place].setAttribute("x", x(part, width));
      tell(this.times[place], text);
    });
    this.say(points, columns, across);
  }

  say(points, columns, across) {
    // The values at the pointer, or else the last ones.
    let at = points.times.length - 1;
    const pointed = this.pointed !== null && this.pointed >= 0 && this.pointed <= 1 && at >= 0;
    if (pointed) {
      const time = points.now - (1 - this.pointed) * points.span;
      at = points.times.findIndex((one) => one >= time);
      if (at < 0) at = points.times.length - 1;
      for (const key of ["x1", "x2"]) this.cursor.setAttribute(key, across(points.times[at]));
    }
    this.cursor.setAttribute("visibility", pointed ? "visible" : "hidden");
    tell(this.when, pointed ? clock(points.times[at]) : "");
    const told = this.lines.map(([name], place) => `${name} ${this.show(columns[place][at])}`);
    told.forEach((text, place) => tell(this.keys[place], text));
    this.chart.setAttribute("aria-label", `${this.title}, the last ${age(points.span)}; now ${told.join(", ")}`);
  }
}

function x(part, width = WIDTH) {
  return INSIDE.left + Math.max(0, Math.min(1, part)) * (width - INSIDE.left - INSIDE.right);
}

function y(part) {
  return INSIDE.top + (1 - part) * (HEIGHT - INSIDE.top - INSIDE.bottom);
}

function rounded(value) {
  // The next number that people count by.
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((step) => step * size).find((step) => step >= value * 0.999);
}

function runs(times, values) {
  // The stretches without a gap, as lists of places.
  const found = [];
  let last = null;
  values.forEach((value, at) => {
    if (value === null) return;
    if (last !== at - 1 || times[at] - times[last] > GAP_S) found.push([]);
    found.at(-1).push(at);
    last = at;
  });
  return found;
}

function line(times, values, across, up) {
  const text = (at) => `${across(times[at]).toFixed(1)},${up(values[at]).toFixed(1)}`;
  // One value alone is a dot, which has to have some length.
  return runs(times, values).map((run) => `M${run.map(text).join("L")}${run.length === 1 ? "h0.1" : ""}`).join("");
}

function area(times, values, across, up) {
  return runs(times, values).map((run) => {
    const ends = [run[0], run.at(-1)].map((at) => across(times[at]).toFixed(1));
    const over = run.map((at) => `L${across(times[at]).toFixed(1)},${up(values[at]).toFixed(1)}`).join("");
    return `M${ends[0]},${y(0)}${over}L${ends[1]},${y(0)}Z`;
  }).join("");
}

export class Plots {
  constructor(place) {
    this.plots = PLOTS.map((one) => new Plot(one));
    place.replaceChildren(...this.plots.map((one) => one.figure));
  }

  draw(points) {
    this.plots.forEach((one) => one.draw(points));
  }
}
