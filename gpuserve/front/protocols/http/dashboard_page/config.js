// The settings in force. What is secret the server does not tell: only whether it is given.

import { element, tell } from "./dom.js";
import { json } from "./feed.js";

function shown(setting) {
  if ("is_given" in setting) return setting.is_given ? "given, not shown" : "not given";
  return typeof setting.value === "string" ? setting.value || '""' : JSON.stringify(setting.value);
}

function line(setting) {
  const cells = [
    element("th", { scope: "row", className: "mono" }, setting.name),
    element("td", { className: "mono wrap" }, shown(setting)),
    element("td", { className: "quiet wrap middle" }, setting.description),
  ];
  return element("tr", { className: setting.is_default ? "default" : "" }, ...cells);
}

export class Config {
  constructor(place) {
    this.settings = [];
    this.filter = element("input", { type: "search", autocomplete: "off", placeholder: "name or text" });
    this.changed = element("input", { type: "checkbox" });
    this.body = element("tbody");
    this.said = element("p", { className: "quiet" });
    this.said.setAttribute("role", "status");
    for (const input of [this.filter, this.changed]) input.addEventListener("input", () => this.show());
    const head = element("tr", {}, element("th", { scope: "col" }, "Setting"), element("th", { scope: "col" }, "Value"),
      element("th", { scope: "col", className: "middle" }, "What it is"));
    place.replaceChildren(
      element("div", { className: "bar" }, element("h2", {}, "Settings in force"),
        element("label", { className: "check" }, this.changed, "Only what is not the default"),
        element("label", {}, "Filter ", this.filter)),
      this.said, element("table", { ariaLabel: "Settings" }, element("thead", {}, head), this.body),
      element("p", { className: "quiet" }, "The configuration of a model is on its own page. Tokens, keys and what headers carry are never shown."));
  }

  async load() {
    try {
      this.settings = (await json("dashboard/config")).settings;
      tell(this.said, "");
    } catch (error) {
      tell(this.said, error.message);
    }
    this.said.hidden = !this.said.textContent;
    this.show();
  }

  show() {
    const wanted = this.filter.value.trim().toLowerCase();
    const found = this.settings.filter((one) => (!this.changed.checked || !one.is_default)
      && `${one.name} ${one.description}`.toLowerCase().includes(wanted));
    this.body.replaceChildren(...found.map(line));
  }
}
