// Requests with values of their own: to clone and to add trials, to change the policy and the devices.
import { el } from "./text.js";
import { frozen } from "./source.js";
import { asks, say, submit } from "./parts.js";

// A button that opens a dialog; `fill` returns its content and a function that returns the request, or a text on what is wrong.
function formButton(study, title, action, fill, like = "") {
  if (frozen) return null;
  return el("button", { type: "button", "data-form": title, onclick: async () => {
    await study.needSpace().catch(() => null); // without it a form has no hints
    const { content, body } = fill();
    if (!(await asks(`${title}${like}`, content, action))) return;
    const wanted = body();
    if (typeof wanted === "string") say(wanted);
    else await submit(study, wanted);
  } }, title);
}

// A labelled input; `value` returns its text.
function input(label, given, hint = "", options = null, kind = "text") {
  const name = `field-${label}`;
  const box = options
    ? el("select", { name }, options.map((each) => el("option", { value: each, selected: each === given }, each === "" ? "–" : each)))
    : el("input", { name, type: kind, value: given, autocomplete: "off", spellcheck: "false", ...(kind === "number" ? { min: 1, step: 1 } : {}) });
  const element = el("label", { class: "field" }, el("span", {}, label), box, hint && el("span", { class: "quiet small" }, hint));
  return { label, given, element, value: () => box.value.trim() };
}

function check(label, on = false, disabled = false, kind = "checkbox", name = "") {
  const box = el("input", { type: kind, name, checked: on, disabled });
  return { element: el("label", { class: "check" }, box, label), value: () => box.checked };
}

// As on the command line: JSON, or else plain text.
function parsed(text) {
  try { return JSON.parse(text); } catch { return text; }
}

function shown(value) {
  return value === undefined ? "" : typeof value === "string" && parsed(value) === value ? value : JSON.stringify(value);
}

function nested(values) {
  const config = {};
  for (const [name, value] of values) {
    const parts = name.split("."), last = parts.pop();
    let place = config;
    for (const part of parts) place = place[part] ??= {};
    place[last] = value;
  }
  return config;
}

// What the space allows for a parameter: its values to choose from, or its range in words.
function domain(space, name) {
  const axis = space?.axes.find((each) => each.name === name);
  if (!axis) return { hint: "", options: null };
  const optional = axis.labels.length > axis.values.length + Math.max(axis.edges.length - 1, 0);
  if (!axis.edges.length) return { hint: "", options: [...(optional ? [""] : []), ...axis.values.map(shown)] };
  return { hint: `${axis.edges[0]} to ${axis.edges.at(-1)}${space.log.includes(name) ? ", log" : ""}`, options: null };
}

function epochsOf(field) {
  const epochs = Number(field.value());
  return Number.isInteger(epochs) && epochs > 0 ? epochs : null;
}

export function cloneButton(study, row, checkpoints) {
  return formButton(study, "Clone", "Clone", () => {
    const fields = Object.entries(row.flat).map(([name, value]) => input(name, shown(value), domain(study.space, name).hint));
    const usable = checkpoints().some((each) => each.step === 0 && each.epoch > 0);
    const weights = check("from its weights", usable, !usable, "radio", "begin"), anew = check("anew", !usable, false, "radio", "begin");
    const outside = check("allow values outside the space");
    const epochs = input("train up to", String(row.epochs >= row.target ? 2 * row.target : row.target), study.snapshot.unit, null, "number");
    const content = el("div", { class: "form" },
      el("p", {}, `A trial like trial ${row.trial}, beside those of the algorithm. Change what is to differ.`),
      fields.map((field) => field.element), epochs.element,
      el("div", { class: "row" }, weights.element, anew.element, outside.element),
      !usable && el("p", { class: "small quiet" }, "It has no checkpoint of the end of an epoch now, so a clone begins anew."));
    return { content, body: () => {
      const changes = Object.fromEntries(fields.filter((field) => field.value() !== field.given).map((field) => [field.label, parsed(field.value())]));
      const wanted = epochsOf(epochs);
      return wanted === null ? `Name a whole number of ${study.snapshot.unit} of at least 1.`
        : { verb: "clone", trial: row.trial, changes, epochs: wanted, anew: anew.value(), outside: outside.value() };
    } };
  }, ` trial ${row.trial}`);
}

export function addButton(study) {
  return formButton(study, "Add a trial", "Add", () => {
    const like = study.trials.get(study.snapshot.best?.trial) ?? study.trials.values().next().value;
    const names = study.space?.axes.map((axis) => axis.name) ?? study.parameters;
    const fields = names.map((name) => { const { hint, options } = domain(study.space, name); return input(name, shown(like?.flat[name]), hint, options); });
    const epochs = input("train", String(like?.target ?? 1), study.snapshot.unit, null, "number"), outside = check("allow values outside the space");
    const content = el("div", { class: "form" },
      el("p", {}, "A trial of your own, beside those of the algorithm. The values are those of the best trial; constants of the space are added."),
      fields.map((field) => field.element), epochs.element, el("div", { class: "row" }, outside.element));
    return { content, body: () => {
      const config = nested(fields.filter((field) => field.value() !== "").map((field) => [field.label, parsed(field.value())]));
      const wanted = epochsOf(epochs);
      return wanted === null ? `Name a whole number of ${study.snapshot.unit} of at least 1.`
        : { verb: "add trial", config, epochs: wanted, outside: outside.value() };
    } };
  });
}

export function policyButton(study) {
  return formButton(study, "Change the policy", "Change", () => {
    const { now, all } = study.snapshot.policy, field = input("policy", now, "", all.includes(now) ? all : [now, ...all]);
    return { content: el("div", { class: "form" }, el("p", {}, "It decides from the next plan on. Jobs that run stay where they are until it says otherwise."), field.element),
      body: () => (field.value() === now ? `The policy is ${now} already.` : { verb: "policy", policy: field.value() }) };
  });
}

export function addDeviceButton(study) {
  return formButton(study, "Add a device", "Add", () => {
    const field = input("device", "", "such as cuda:1; of CPU slots only one that was removed");
    return { content: el("div", { class: "form" }, el("p", {}, "Trials that wait are placed on it, too."), field.element),
      body: () => (field.value() ? { verb: "add devices", devices: field.value().split(/[\s,]+/) } : "Name a device.") };
  });
}

export function drainButton(study, device) {
  if (frozen) return null;
  const verb = device.healthy ? "remove devices" : "add devices", title = device.healthy ? "Drain" : "Add";
  const consequence = device.healthy ? "Its jobs save their trials and stop, and it gets no more. The trials continue elsewhere." : "Trials that wait are placed on it again.";
  return el("button", { type: "button", class: "little", "data-verb": verb, "data-device": device.device, onclick: async () => {
    if (await asks(`${title} ${device.device}?`, el("p", {}, consequence), title)) await submit(study, { verb, devices: [device.device] });
  } }, title);
}
