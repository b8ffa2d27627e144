// One model: its rates, its instances, its tensors, a form to try it, and its configuration.

import { NOTHING, bytes, element, number, path, percent, pill, pretty, seconds, tell } from "./dom.js";
import { json } from "./feed.js";
import { tryForm } from "./form.js";
import { Plots, Points } from "./plots.js";
import { Table, flagged, text } from "./tables.js";

const INSTANCES = [
  { title: "Instance", tell: text((row) => row.name) },
  { title: "Device", kind: "middle", tell: text((row) => row.device) },
  { title: "State", tell: state },
  { title: "pid", kind: "number middle", tell: text((row) => row.pid ?? NOTHING) },
  { title: "batches/s", kind: "number", tell: text((row) => row.batches_per_s, number) },
  { title: "busy", kind: "number", tell: text((row) => row.busy, percent) },
  { title: "memory", kind: "number middle", tell: text((row) => row.memory_nbytes, bytes) },
  { title: "restarts", kind: "number middle", tell: flagged((row) => row.restarts, String) },
];

function state(cell, row) {
  if (!cell.firstChild) cell.append(element("span"), element("span", { className: "reason" }));
  pill(row.state ?? "", cell.firstChild);
  tell(cell.lastChild, row.restart_in_s ? `in ${seconds(row.restart_in_s)}` : "");
}

function tensors(title, list, optional) {
  const rows = list.map((one) => element("tr", {},
    element("th", { scope: "row" }, one.name, ...(optional.has(one.name) ? [element("span", { className: "version" }, " optional")] : [])),
    element("td", { className: "mono" }, one.datatype),
    element("td", { className: "mono" }, `[${one.shape.join(", ")}]`)));
  const head = element("tr", {}, ...[title, "Type", "Shape"].map((one) => element("th", { scope: "col" }, one)));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
}

export class ModelView {
  // Of one version of a model, in a place of the page, until another takes it.
  constructor(place, row) {
    this.row = row;
    this.points = new Points();
    this.title = element("h2");
    this.state = element("span");
    this.reason = element("p", { className: "quiet" });
    this.figures = element("p", { className: "quiet" });
    const plots = element("div", { className: "plots" });
    const instances = element("table", { ariaLabel: "Instances" });
    this.more = element("div", {}, element("p", { className: "quiet" }, "Loading…"));
    place.replaceChildren(
      element("a", { href: "#/", className: "back" }, "← All models"),
      this.title, this.reason, this.figures, plots, element("h3", {}, "Instances"), instances, this.more);
    this.instancesTitle = instances.previousSibling;
    this.plots = new Plots(plots);
    this.instances = new Table(instances, INSTANCES, { key: (one) => one.name });
    this.title.append(`${row.name} `, element("span", { className: "quiet" }, row.version ? `v${row.version}` : ""), this.state);
    this.load();
  }

  async load() {
    const { name, version } = this.row;
    const where = `v2/models/${path(name)}/versions/${path(version)}`;
    try {
      this.points.begin(await json(`dashboard/history/${path(name, version)}`));
      this.plots.draw(this.points);
      const [metadata, config] = await Promise.all([json(where), json(`${where}/config`)]);
      this.describe(metadata, config);
    } catch (error) {
      this.more.replaceChildren(element("p", { className: "error", role: "alert" }, error.message));
    }
  }

  describe(metadata, config) {
    const optional = new Set((config.input || []).filter((one) => one.optional).map((one) => one.name));
    this.more.replaceChildren(
      element("div", { className: "halves" },
        element("div", {}, element("h3", {}, "Tensors"), tensors("Input", metadata.inputs, optional), element("h3", {}, ""),
          tensors("Output", metadata.outputs, new Set())),
        element("div", {}, element("h3", {}, "Try it"), tryForm(this.row, metadata, optional))),
      element("details", {}, element("summary", {}, "Configuration"), element("pre", { tabIndex: 0 }, pretty(config))));
  }

  sample(time, row) {
    this.row = row;
    const failed = (row.failures_per_s || 0) + (row.rejections_per_s || 0);
    this.points.add(time, { ...row, failures_per_s: failed });
    this.plots.draw(this.points);
    pill(row.state, this.state);
    tell(this.reason, row.reason || "");
    this.reason.hidden = !row.reason;
    tell(this.figures, row.requests_per_s === undefined ? "" : [
      `${number(row.requests_per_s)} requests/s`, `p50 ${seconds(row.p50_s)}`, `p99 ${seconds(row.p99_s)}`,
      `${number(row.queued)} waiting`, `${number(row.in_flight)} running`, `saturation ${percent(row.saturation)}`,
      ...(row.steps_per_s ? [`${number(row.steps_per_s)} steps/s of ${number(row.batch_size)}`,
        `${number(row.responses_per_s)} responses/s`, `first response p50 ${seconds(row.first_p50_s)}`] : []),
      `${number(row.failures)} failed and ${number(row.rejections)} refused since the start`].join(" · "));
    const shown = (row.instances || []).filter((one) => one.state !== undefined);
    this.instances.show(shown);
    for (const node of [this.instancesTitle, this.instances.node]) node.hidden = shown.length === 0;
  }

  gone() {
    pill("GONE", this.state);
    tell(this.reason, "The server has no such model any more.");
    this.reason.hidden = false;
  }
}
