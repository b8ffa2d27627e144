// The live page put together: which view is seen, and what each sample is given to.

import { age, pill, tell } from "./dom.js";
import { Config } from "./config.js";
import { Events, announce } from "./events.js";
import { Feed, json } from "./feed.js";
import { ModelView } from "./model.js";
import { Overview, keyOf } from "./overview.js";
import { Plots, Points } from "./plots.js";

const VIEWS = ["overview", "model", "events", "config"];
const node = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.models = new Map();
    this.points = new Points();
    this.plots = new Plots(node("plots"));
    this.overview = new Overview();
    this.events = new Events();
    this.config = new Config(node("config"));
    this.model = null;
    this.last = null;
    this.feed = new Feed({
      open: () => this.opened(), lost: (why) => this.lost(why),
      sample: (sample) => this.sample(sample), events: (events) => this.events.take(events) });
    addEventListener("hashchange", () => this.route());
    node("access").addEventListener("submit", (event) => event.preventDefault());
    node("token").addEventListener("change", () => {
      this.feed.open();
      this.route();
    });
    this.route();
    this.feed.open();
  }

  // ---- the server --------------------------------------------------------------------------------

  async opened() {
    announce(node("notice"), "");
    this.models.clear();
    try {
      this.points.begin(await json("dashboard/history"));
    } catch {
      // The samples make a plot of their own.
    }
  }

  lost(why) {
    announce(node("notice"), `${why.replace(/\.$/, "")}. Trying again…`);
    pill("", node("state"));
    tell(node("state"), "no connection");
  }

  sample(sample) {
    for (const row of sample.models) this.models.set(keyOf(row), row);
    for (const [name, version] of sample.gone) this.models.delete(keyOf({ name, version }));
    const { server, time } = sample;
    const models = [...this.models.values()];
    const queued = models.reduce((sum, row) => sum + (row.queued || 0), 0);
    const failures = server.failures_per_s + server.rejections_per_s;
    this.points.add(time, { ...server, queued, failures_per_s: failures });
    this.last = sample;
    this.heading(server);
    if (!node("overview").hidden) this.draw();
    this.tellModel();
  }

  heading(server) {
    tell(node("name"), server.name);
    document.title = `${server.name} · ${server.state.toLowerCase()}`;
    pill(server.ready ? "READY" : server.state === "SERVING" ? "NOT READY" : server.state, node("state"));
    const restarts = server.restarts ? `, front restarted ${server.restarts} times` : "";
    tell(node("about"), `gpuserve ${server.version}, up ${age(server.uptime_s)}${restarts}`);
  }

  draw() {
    this.plots.draw(this.points);
    if (this.last) this.overview.sample(this.last, [...this.models.values()]);
  }

  // ---- what is seen ------------------------------------------------------------------------------

  route() {
    const [view, name, version] = location.hash.replace(/^#\//, "").split("/").map(decodeURIComponent);
    const seen = view === "models" ? "model" : VIEWS.includes(view) ? view : "overview";
    for (const one of VIEWS) node(one).hidden = one !== seen;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#/${seen === "overview" || seen === "model" ? "" : seen}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.model = null;
    this.wanted = seen === "model" ? { name, version: version === "0" ? "" : version } : null;
    node("model").replaceChildren();
    this.tellModel();
    if (seen === "config") this.config.load();
    if (seen === "overview") this.draw();
    if (this.routed) node("main").focus({ preventScroll: true });
    scrollTo(0, 0);
    this.routed = true;
  }

  tellModel() {
    if (!this.wanted || !this.last) return;
    const row = this.models.get(keyOf(this.wanted));
    if (this.model === null) this.model = new ModelView(node("model"), row || this.wanted);
    if (row) this.model.sample(this.last.time, row);
    else this.model.gone();
  }
}

new Page();
