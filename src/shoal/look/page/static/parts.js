// Parts that several views have: cards, badges, tables, the question before a request.
import { el, moment, numbers, plural, width } from "./text.js";
import { frozen, request } from "./source.js";

export function card(title, size, ...content) {
  return el("section", { class: `card ${size}` }, title && el("h2", {}, title), ...content);
}

// The class of a colour for a status.
export function statusKind(status) {
  return { waiting: "f-pending", paused: "f-held", "waiting for others": "f-paused" }[status] ?? `f-${status}`;
}

export function stateBadge(row) {
  const kind = { failed: "bad", complete: "good", running: "runs", interrupted: "wait", paused: "wait" }[row.status] ?? "quiet";
  return el("span", { class: `badge ${kind}` }, row.status);
}

export function shares(parts, total) {
  const bar = el("div", { class: "bar", role: "presentation" });
  for (const [kind, value] of parts) if (value > 0) bar.append(width(el("i", { class: kind }), (100 * value) / total));
  return bar;
}

export function legend(entries) {
  return el("ul", { class: "legend" }, entries.map(([kind, text]) => el("li", {}, el("b", { class: kind }), text)));
}

// A table; a cell is a text, a number or an element. Columns: [title, kind], kind "number", "text" or "".
export function table(columns, rows, caption) {
  const head = columns.map(([title, kind]) => el("th", { class: kind, scope: "col", title: title.length > 20 ? title : null }, title));
  const body = rows.map((row) => el("tr", {}, row.map((cell, place) => el("td", { class: columns[place][1] }, cell))));
  return el("div", { class: "scroll" },
    el("table", {}, caption && el("caption", {}, caption), el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

export function pairs(rows) {
  return el("table", {}, el("tbody", {},
    rows.map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "text" }, value)))));
}

export function trialLink(study, trial) {
  return el("a", { href: address(study.name, "trial", trial) }, String(trial));
}

export function address(study, view = "overview", trial = "") {
  const parts = [study, view, ...(trial === "" ? [] : [trial])];
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

let quieting = 0;
export function say(text) {
  const place = document.getElementById("said");
  place.textContent = text;
  clearTimeout(quieting);
  quieting = setTimeout(() => (place.textContent = ""), 8000);
}

const QUESTIONS = {
  "pause": ["Pause", "It saves its state and leaves its job at the next step; a job that compiles does so afterwards. Trials that must be compared with it wait."],
  "resume": ["Resume", "It continues from where it stopped."],
  "stop": ["Stop", "It ends for good at its next step, after compiling where its job compiles. Its reports count; the algorithm continues as if it had failed."],
  "retry": ["Retry", "It continues from its newest checkpoint, or begins anew."],
  "pause study": ["Pause the study", "All jobs save their trials at their next step, those that compile afterwards. The devices are free until the study is resumed."],
  "resume study": ["Resume the study", "Waiting trials are started again."],
  "end study": ["End the study", "All jobs save their trials at their next step, those that compile afterwards. Open trials are stopped for good, and no trial is proposed again."],
};

// A button that asks once, and then sends the request; null in a report. `trials` returns the numbers now, `done` is
// called once the request is written.
export function requestButton(study, verb, trials, kind = "", done = () => {}) {
  if (frozen) return null;
  const [title, consequence] = QUESTIONS[verb];
  return el("button", { type: "button", class: kind, "data-verb": verb, onclick: async () => {
    const chosen = trials ? trials() : null;
    if (chosen && !chosen.length) return say(`Choose at least one trial that can be ${{ pause: "paused", resume: "resumed", stop: "stopped", retry: "retried" }[verb]} first.`);
    const what = chosen ? `${title} ${plural(chosen.length, "trial")}: ${numbers(chosen)}?` : `${title}?`;
    if (!(await asks(what, el("p", {}, consequence), title, verb === "stop" || verb === "end study"))) return undefined;
    return submit(study, chosen ? { verb, trials: chosen } : { verb }, done);
  } }, title);
}

// Sends a request, and says what comes of it.
export async function submit(study, body, done = () => {}) {
  try {
    await request(study.name, body);
    say(study.runs ? "Asked. It appears below Requests once it is done." : "Noted. It is done when the study is resumed.");
    done();
  } catch (error) {
    say(error.message);
  }
}

// Asks a question in the dialog; whether it was answered with `action`.
export function asks(title, content, action, danger = false) {
  const dialog = document.getElementById("ask");
  return new Promise((resolve) => {
    const answer = (value) => () => { dialog.close(value); };
    dialog.replaceChildren(
      el("h2", { id: "ask-title" }, title), content,
      el("div", { class: "row" },
        el("button", { type: "button", onclick: answer("no") }, "Cancel"),
        el("button", { type: "button", class: danger ? "danger" : "main", id: "ask-yes", onclick: answer("yes") }, action)));
    dialog.returnValue = "no";
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
    dialog.showModal();
  });
}

export function requestsList(study) {
  const done = [...study.snapshot.requests].reverse().slice(0, 50);
  const lines = [
    ...study.snapshot.pending.map((each) =>
      el("li", {}, el("span", { class: "badge wait" }, "to be done"), " ", each.said, each.user && ` (by ${each.user})`)),
    ...done.map((each) => el("li", { class: each.refused.length ? "bad" : "" },
      el("span", { class: "quiet" }, `${moment(each.time)} ${each.user || "a user"}: `), each.said.slice(17))),
  ];
  return lines.length ? el("ul", { class: "plain small requests" }, lines) : el("p", { class: "quiet" }, "Nobody has intervened.");
}
