// The first view: figures, plots, every model, the GPUs, the ingress processes.

import { NOTHING, bytes, element, number, path, percent, pill, seconds, tell } from "./dom.js";
import { Table, flagged, text } from "./tables.js";

const ready = (row) => (row.instances || []).filter((one) => one.state === "READY").length;
const restarts = (row) => (row.instances || []).reduce((sum, one) => sum + (one.restarts || 0), 0);
const failing = (row) => (row.failures_per_s || 0) + (row.rejections_per_s || 0);

export const keyOf = (row) => `${row.name}/${row.version}`;
export const addressOf = (row) => `#/models/${path(row.name, row.version || "0")}`;

function name(cell, row) {
  if (!cell.firstChild) cell.append(element("a"), element("span", { className: "version" }), element("span", { className: "reason" }));
  const [link, version, reason] = cell.children;
  link.href = addressOf(row);
  tell(link, row.name);
  tell(version, row.version ? ` v${row.version}` : "");
  tell(reason, row.reason || "");
  reason.hidden = !row.reason;
}

function state(cell, row) {
  if (!cell.firstChild) cell.append(element("span"));
  pill(row.state, cell.firstChild);
}

export function bar(value, cell, what) {
  if (!cell.firstChild) cell.append(element("meter", { min: 0, max: 1, high: 0.9, low: 0.7, optimum: 0 }), element("span"));
  const [meter, told] = cell.children;
  meter.hidden = value === null || value === undefined;
  meter.value = Math.min(1, value || 0);
  meter.setAttribute("aria-label", what);
  tell(told, value === null || value === undefined ? NOTHING : ` ${percent(value)}`);
}

const MODELS = [
  { title: "Model", of: (row) => row.name, tell: name },
  { title: "State", of: (row) => row.state, tell: state },
  { title: "req/s", kind: "number", down: true, of: (row) => row.requests_per_s, tell: text((row) => row.requests_per_s, number) },
  { title: "batch", kind: "number wide", down: true, of: (row) => row.batch_size, tell: text((row) => row.batch_size, number) },
  { title: "queue", kind: "number", down: true, of: (row) => row.queued, tell: text((row) => row.queued, number) },
  { title: "p50", kind: "number middle", down: true, of: (row) => row.p50_s, tell: text((row) => row.p50_s, seconds) },
  { title: "p99", kind: "number", down: true, of: (row) => row.p99_s, tell: text((row) => row.p99_s, seconds) },
  { title: "saturation", kind: "wide", down: true, of: (row) => row.saturation, tell: (cell, row) => bar(row.saturation, cell, `saturation of ${row.name}`) },
  { title: "errors/s", kind: "number middle", down: true, of: failing, tell: flagged(failing, number) },
  { title: "up", kind: "number middle", of: ready, tell: text((row) => row, (row) => row.instances ? row.is_ensemble ? NOTHING : `${ready(row)}/${row.instances.length}` : NOTHING) },
  { title: "restarts", kind: "number wide", down: true, of: restarts, tell: flagged(restarts, String) },
];

const GPUS = [
  { title: "GPU", tell: text((row) => row.device || row.uuid) },
  { title: "State", tell: state },
  { title: "Use", tell: (cell, row) => bar(row.utilization, cell, `use of ${row.device || row.uuid}`) },
  { title: "Memory", tell: (cell, row) => bar(row.memory_nbytes ? row.memory_used_nbytes / row.memory_nbytes : null, cell, `memory of ${row.device || row.uuid}`) },
  { title: "of", kind: "number middle", tell: text((row) => row.memory_nbytes, bytes) },
  { title: "°C", kind: "number middle", tell: text((row) => row.temperature_celsius, number) },
  { title: "W", kind: "number middle", tell: text((row) => row.power_watts, number) },
  { title: "Kind", kind: "wide wrap", tell: text((row) => `${row.name || ""} ${row.uuid}`) },
];

const INGRESS = [
  { title: "Process", tell: text((row) => row.number) },
  { title: "State", tell: state },
  { title: "pid", kind: "number", tell: text((row) => row.pid ?? NOTHING) },
  { title: "connections", kind: "number", tell: text((row) => row.connections, number) },
  { title: "requests", kind: "number", tell: text((row) => row.requests, number) },
  { title: "CPU time", kind: "number middle", tell: text((row) => row.cpu_s, seconds) },
  { title: "restarts", kind: "number middle", tell: flagged((row) => row.restarts, String) },
];

export class Overview {
  constructor(view) {
    this.view = view;
    this.filter = document.getElementById("filter");
    this.none = document.getElementById("no-models");
    const redraw = () => this.show(this.models || []);
    this.filter.addEventListener("input", redraw);
    this.table = new Table(document.getElementById("models"), MODELS, { key: keyOf, sorted: { place: 0, down: false }, onSort: redraw });
    this.gpus = new Table(document.querySelector("#gpus table"), GPUS, { key: (row) => row.uuid });
    this.ingress = new Table(document.querySelector("#ingress table"), INGRESS, { key: (row) => row.number });
    this.figures = new Map();
  }

  sample({ server, gpus, doors }, models) {
    this.show(models);
    for (const [table, rows] of [[this.gpus, gpus], [this.ingress, doors]]) {
      table.node.parentElement.hidden = rows.length === 0;
      table.show(rows);
    }
    const all = models.flatMap((row) => row.instances || []);
    const up = all.filter((one) => one.state === "READY").length;
    const readyModels = models.filter((row) => row.state === "READY").length;
    const failed = server.failures_per_s + server.rejections_per_s;
    const again = all.reduce((sum, one) => sum + (one.restarts || 0), 0);
    this.figure("requests/s", number(server.requests_per_s));
    this.figure("errors/s", number(failed), failed > 0);
    this.figure("p50", seconds(server.p50_s));
    this.figure("p99", seconds(server.p99_s));
    this.figure("waiting", number(models.reduce((sum, row) => sum + (row.queued || 0), 0)));
    this.figure("running", number(models.reduce((sum, row) => sum + (row.in_flight || 0), 0)));
    this.figure("models", `${readyModels}/${models.length}`, readyModels < models.length);
    this.figure("instances", `${up}/${all.length}`, up < all.length);
    this.figure("restarts", String(again), again > 0);
    this.figure("connections", number(server.connections));
  }

  figure(title, value, bad = false) {
    if (!this.figures.has(title)) {
      const [told, one] = [element("dd"), element("div")];
      one.append(element("dt", {}, title), told);
      document.getElementById("figures").append(one);
      this.figures.set(title, { one, told });
    }
    const { one, told } = this.figures.get(title);
    tell(told, value);
    one.classList.toggle("bad", bad);
  }

  show(models) {
    this.models = models;
    const wanted = this.filter.value.trim().toLowerCase();
    const found = models.filter((row) => `${row.name} ${row.version} ${row.state}`.toLowerCase().includes(wanted));
    this.table.show(found);
    this.table.node.hidden = found.length === 0;
    this.none.hidden = found.length > 0;
    tell(this.none, models.length ? `None of ${models.length} models has “${wanted}” in its name or state.` : "This server has no models.");
  }
}
