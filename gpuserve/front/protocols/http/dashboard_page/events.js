// What has happened, the latest first, in sentences.

import { clock, element, seconds, tell } from "./dom.js";

const KEPT = 500;
const BAD = /died|failed|hung|fenced|refusals/;
const BUSY = /slow|drained|restart/;
const ABOUT = new Set(["time", "number", "kind", "model", "version", "instance"]);

function value(name, one) {
  if (one === null) return "";
  if (name.endsWith("_s") && typeof one === "number") return seconds(one);
  return typeof one === "object" ? JSON.stringify(one) : String(one);
}

function facts(event) {
  return Object.entries(event)
    .filter(([name, one]) => !ABOUT.has(name) && one !== null && one !== "" && name !== "state")
    .map(([name, one]) => `${name.replace(/_s$/, "").replaceAll("_", " ")}: ${value(name, one)}`)
    .join(", ");
}

export function sentence(event) {
  const version = event.version ? ` v${event.version}` : "";
  const about = [event.model ? event.model + version : "", event.instance || ""].filter(Boolean).join(" ");
  const now = event.state ? `${about ? "is" : "The server is"} ${event.state}` : "";
  return [about, now, facts(event)].filter(Boolean).join(about && !now ? " – " : " ").replace(/^(\S.*? is [A-Z]+) /, "$1, ");
}

function line(event) {
  const tone = event.ok === false || BAD.test(event.kind) ? "bad" : BUSY.test(event.kind) ? "busy" : "";
  const time = element("time", { dateTime: new Date(event.time * 1000).toISOString() }, clock(event.time));
  return element("li", { className: tone }, time,
    element("span", { className: "kind" }, event.kind.replaceAll("_", " ")),
    element("span", { className: "text" }, sentence(event)));
}

export class Events {
  constructor() {
    this.all = [];
    this.latest = document.getElementById("latest");
    this.list = document.getElementById("all-events");
    this.filter = document.getElementById("events-filter");
    this.filter.addEventListener("input", () => this.show());
  }

  take(events) {
    // After a break the server tells all again.
    const last = this.all.at(-1)?.number ?? 0;
    const first = events[0]?.number ?? 0;
    if (events.length && events.at(-1).number < last && first <= 1) this.all = [];
    const known = this.all.at(-1)?.number ?? 0;
    this.all = this.all.concat(events.filter((one) => one.number > known)).slice(-KEPT);
    this.show();
  }

  show() {
    const wanted = this.filter.value.trim().toLowerCase();
    const newest = [...this.all].reverse();
    this.latest.replaceChildren(...newest.slice(0, 8).map(line));
    const found = newest.filter((one) => `${one.kind.replaceAll("_", " ")} ${sentence(one)}`.toLowerCase().includes(wanted));
    this.list.replaceChildren(...found.map(line));
    if (!found.length) this.list.append(element("li", {}, element("span", { className: "text" }, "Nothing of the kind has happened.")));
  }
}

export function announce(node, text) {
  node.hidden = !text;
  tell(node, text);
}
