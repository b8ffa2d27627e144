// The form that sends a request to a model by the v2 protocol, as any client would.

import { element, path, pretty, tell } from "./dom.js";
import { ask } from "./feed.js";

const MAX_FILLED = 4096;
const MAX_SHOWN = 20000;
const NO_JSON = ["FP16", "BF16"];

function example(datatype, shape) {
  const value = datatype === "BYTES" ? "text" : datatype === "BOOL" ? false : 0;
  const count = shape.reduce((product, size) => product * size, 1);
  return count <= MAX_FILLED ? JSON.stringify(new Array(count).fill(value)).replaceAll(",", ", ") : "";
}

function tensorFields(tensor, optional) {
  const shape = tensor.shape.map((size) => (Number(size) < 0 ? 1 : Number(size)));
  const sizes = element("input", { value: shape.join(", "), autocomplete: "off" });
  const data = element("textarea", { value: optional ? "" : example(tensor.datatype, shape), spellcheck: false });
  data.placeholder = optional ? "nothing: this input is left out" : "[…]";
  sizes.addEventListener("change", () => {
    const given = numbers(sizes.value);
    if (given && data.value) data.value = example(tensor.datatype, given);
  });
  const told = `${tensor.name} · ${tensor.datatype} [${tensor.shape.join(", ")}]${optional ? " · optional" : ""}`;
  const fields = element("fieldset", {}, element("legend", { className: "mono" }, told),
    element("label", {}, "Shape", sizes), element("label", {}, "Data (JSON, the elements in order)", data));
  return { tensor, optional, sizes, data, fields };
}

function numbers(text) {
  const given = text.split(",").map((one) => one.trim()).filter(Boolean).map(Number);
  return given.every((one) => Number.isInteger(one) && one >= 0) ? given : null;
}

function read({ tensor, optional, sizes, data }) {
  if (!data.value.trim()) {
    if (optional) return null;
    throw new Error(`${tensor.name}: there is no data`);
  }
  const shape = numbers(sizes.value);
  if (!shape) throw new Error(`${tensor.name}: expected a shape such as 1, 4, given ${sizes.value}`);
  let values;
  try {
    values = JSON.parse(data.value);
  } catch (error) {
    throw new Error(`${tensor.name}: the data is no JSON: ${error.message}`, { cause: error });
  }
  return { name: tensor.name, datatype: tensor.datatype, shape, data: values };
}

function requestOf(fields, decoupled) {
  const inputs = fields.map(read).filter(Boolean);
  if (!decoupled) return { inputs };
  // Streams take values by name, a list where there are several.
  return Object.fromEntries(inputs.map(({ name, data }) => [name, data.length === 1 ? data[0] : data]));
}

async function show(answer, text) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let whole = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    whole += part.value;
    text.textContent = whole.slice(0, MAX_SHOWN);
  }
  if (whole.length > MAX_SHOWN) text.append(`… ${whole.length} characters`);
  else if ((answer.headers.get("content-type") || "").startsWith("application/json") && !/\d{16}/.test(whole)) {
    text.textContent = pretty(JSON.parse(whole));
  }
}

export function tryForm(model, metadata, optional) {
  const fields = metadata.inputs.map((tensor) => tensorFields(tensor, optional.has(tensor.name)));
  const status = element("p", { className: "status" });
  status.setAttribute("role", "status");
  const text = element("pre", { hidden: true, tabIndex: 0, ariaLabel: "Answer" });
  const button = element("button", { className: "send", type: "submit" }, "Send");
  const unknown = metadata.inputs.filter((one) => NO_JSON.includes(one.datatype)).map((one) => one.name);
  if (unknown.length) {
    button.disabled = true;
    status.textContent = `${unknown.join(", ")}: this datatype has no form in JSON; a client sends it in binary.`;
  }
  const form = element("form", { autocomplete: "off", ariaLabel: "Try the model" },
    ...fields.map((one) => one.fields), button, status, text);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(model, fields, { button, status, text });
  });
  return form;
}

async function send(model, fields, { button, status, text }) {
  const end = model.decoupled ? "generate_stream" : "infer";
  status.className = "status";
  text.hidden = true;
  const began = performance.now();
  try {
    const body = JSON.stringify(requestOf(fields, model.decoupled));
    tell(status, "Waiting…");
    button.disabled = true;
    const where = `v2/models/${path(model.name)}/versions/${path(model.version)}/${end}`;
    const answer = await ask(where, { method: "POST", body, headers: { "content-type": "application/json" } });
    text.hidden = false;
    await show(answer, text);
    tell(status, `${answer.status} ${answer.statusText}, ${Math.round(performance.now() - began)} ms`);
    status.classList.toggle("error", !answer.ok);
  } catch (error) {
    status.classList.add("error");
    tell(status, error.message);
  } finally {
    button.disabled = false;
  }
}
