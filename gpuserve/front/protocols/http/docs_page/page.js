"use strict";
// Shows openapi.json, and sends what is written into its forms. Text from the document only ever becomes text
// nodes, attribute values of our own choice, and percent-encoded parts of paths below this server.

const METHODS = ["get", "post", "put", "delete"];
const LEFT_OUT = "x-left-out";
const MAX_FILLED = 1e6;
const base = new URL("./", location.href);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made[key] = value;
  made.append(...children);
  return made;
}

function pretty(value) {
  // Arrays of plain values on one line: a tensor of 64 elements is not 64 lines.
  // Strings are matched to be left alone.
  return JSON.stringify(value, null, 2).replace(/"(?:[^"\\]|\\.)*"|\[[^[\]{}"]*\]/g, (match) =>
    match[0] === '"' ? match : match.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"));
}

function resolved(node, root) {
  return node && node.$ref ? node.$ref.split("/").slice(1).reduce((at, key) => at[key], root) : node;
}

function described(text, root, depth = 0) {
  // A schema as an example of itself: what there is to know, in the shape of the body.
  const schema = resolved(text, root);
  if (!schema || depth > 6) return null;
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.items) return [described(schema.items, root, depth + 1)];
  if (schema.properties) {
    const members = Object.entries(schema.properties);
    return Object.fromEntries(members.map(([key, value]) => [key, described(value, root, depth + 1)]));
  }
  return [].concat(schema.type || schema.description || "any").join(" | ");
}

function filled(body, leftOut) {
  for (const [name, { elements, value }] of Object.entries(leftOut)) {
    const data = new Array(Math.min(elements, MAX_FILLED)).fill(value);
    const tensor = Array.isArray(body.inputs) && body.inputs.find((one) => one.name === name);
    if (tensor) tensor.data = data;
    else body[name] = data;
  }
  return body;
}

function address(path, inputs) {
  const target = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(inputs.get(name).value));
  return new URL(`.${target}`, base);
}

function pathInput({ name, schema }, place) {
  const choices = schema.examples || [];
  const input = element("input", { value: choices[0] || "1", required: true });
  if (choices.length < 2) return { input, label: element("label", {}, name, input) };
  const list = element("datalist", { id: `choices-${place}-${name}` });
  list.append(...choices.map((value) => element("option", { value })));
  input.setAttribute("list", list.id);
  return { input, label: element("label", {}, name, input, list) };
}

async function send(method, path, inputs, body, shown) {
  const { status, text } = shown;
  const headers = {};
  const token = document.getElementById("token").value;
  if (token) headers["triton-access-token"] = token;
  if (body) headers["content-type"] = "application/json";
  status.className = "status";
  status.textContent = "Waiting…";
  text.textContent = "";
  text.hidden = false;
  const began = performance.now();
  try {
    const options = { method: method.toUpperCase(), headers, body: body ? body.value : undefined };
    const answer = await fetch(address(path, inputs), options);
    status.textContent = `${answer.status} ${answer.statusText}`;
    status.classList.toggle("bad", !answer.ok);
    await read(answer, text);
    status.textContent += `, ${Math.round(performance.now() - began)} ms`;
  } catch (error) {
    status.classList.add("bad");
    status.textContent = `No answer: ${error.message}`;
  }
}

async function read(answer, text) {
  // Streams are shown as they come.
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) text.append(part.value);
  if (!(answer.headers.get("content-type") || "").startsWith("application/json")) return;
  if (/\d{16}/.test(text.textContent)) return; // numbers that a script would round
  try {
    text.textContent = pretty(JSON.parse(text.textContent));
  } catch {
    // It stays as it came.
  }
}

function form(method, path, operation, root, place) {
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const inputs = new Map();
  const parts = [];
  if (operation.description) parts.push(element("p", {}, operation.description));
  for (const parameter of (operation.parameters || []).map((one) => resolved(one, root))) {
    if (parameter.in !== "path") continue;
    const { input, label } = pathInput(parameter, place);
    inputs.set(parameter.name, input);
    parts.push(label);
  }
  let body = null;
  if (content) {
    body = element("textarea", { spellcheck: false, ariaLabel: "Body of the request" });
    body.value = content.example ? pretty(content.example) : "";
    body.placeholder = pretty(described(content.schema, root));
    parts.push(element("h3", {}, "Body"), body);
  }
  const shown = { status: element("p", { className: "status" }), text: element("pre", { hidden: true }) };
  shown.status.setAttribute("role", "status");
  const button = element("button", { className: "send", type: "button" }, "Send");
  button.onclick = () => send(method, path, inputs, body, shown);
  parts.push(button);
  if (content && content[LEFT_OUT]) {
    const fill = element("button", { type: "button" }, "Fill large inputs");
    fill.onclick = () => { body.value = pretty(filled(structuredClone(content.example), content[LEFT_OUT])); };
    parts.push(fill);
  }
  parts.push(shown.status, shown.text, ...answers(operation, root));
  return parts;
}

function answers(operation, root) {
  return Object.entries(operation.responses || {}).filter(([code]) => code === "200").flatMap(([code, answer]) => {
    const [type, content] = Object.entries(resolved(answer, root).content || {})[0] || ["empty", {}];
    const value = content.example || (content.schema && described(content.schema, root));
    const title = element("h3", {}, `Answer ${code}, ${type}`);
    return value ? [title, element("pre", {}, pretty(value))] : [title];
  });
}

function show(root) {
  document.title = `${root.info.title} API`;
  document.getElementById("title").textContent = root.info.title;
  document.getElementById("about").textContent = `${root.info.description || ""} Server ${root.info.version}.`;
  const sections = new Map(root.tags.map((tag, number) => [tag.name, element("section", { id: `tag-${number}` })]));
  let place = 0;
  for (const [path, item] of Object.entries(root.paths)) {
    for (const method of METHODS.filter((one) => item[one])) sections.get(item[method].tags[0]).append(
      entry(method, path, item[method], root, ++place));
  }
  for (const [name, section] of sections) {
    if (!section.childElementCount) continue;
    section.prepend(element("h2", {}, name));
    document.getElementById("operations").append(section);
    document.getElementById("tags").append(element("a", { href: `#${section.id}` }, name));
  }
}

function entry(method, path, operation, root, place) {
  const opened = element("div", { className: "body" });
  const made = element("details", {},
    element("summary", {},
      element("span", { className: `method ${method}` }, method.toUpperCase()),
      element("span", { className: "path" }, path),
      element("span", { className: "hint" }, operation.summary || "")),
    opened);
  made.ontoggle = () => {
    if (made.open && !opened.childElementCount) opened.append(...form(method, path, operation, root, place));
  };
  return made;
}

async function load() {
  const about = document.getElementById("about");
  const token = document.getElementById("token").value;
  const answer = await fetch(new URL("openapi.json", base), { headers: token ? { "triton-access-token": token } : {} });
  if (!answer.ok) {
    about.textContent = `openapi.json: ${answer.status}. ${(await answer.json()).error}`;
    return;
  }
  document.getElementById("operations").replaceChildren();
  document.getElementById("tags").replaceChildren();
  show(await answer.json());
}

document.getElementById("token").onchange = () => load();
load();
