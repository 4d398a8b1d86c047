// The table of trials: sorted, filtered, searched; requests for those that are chosen; as CSV.
import { el, lastLine, withError } from "./text.js";
import { frozen } from "./source.js";
import { card, requestButton, say, stateBadge, trialLink } from "./parts.js";
import { addButton } from "./forms.js";

const PAGE = 100, KEYS = 3;

export function trialsView(study) {
  const view = { sort: "", falls: false, text: "", state: "", shown: PAGE, chosen: new Set(), constants: false };
  const place = el("div", { class: "scroll" }), count = el("span", { class: "quiet small" });
  const more = el("button", { type: "button", onclick: () => { view.shown += 5 * PAGE; draw(); } }, "Show more");
  const constants = el("label", {}, el("input", { type: "checkbox", name: "constants", onchange: (event) => { view.constants = event.target.checked; draw(); } }), "constants");
  let missed = false;
  const draw = (always = true) => {
    const all = columnsOf(study), rows = selected(study, view, all);
    const fixed = new Set((study.snapshot.constants ?? []).map((name) => `config.${name}`));
    const shown = all.filter((column) => column.key !== "reason" && (view.constants || !fixed.has(column.key))), key = keyColumns(study);
    const columns = orderedColumns(shown, study);
    const best = study.snapshot.best?.trial ?? null, front = new Set((study.snapshot.front ?? []).map((each) => each.trial));
    const body = rows.slice(0, view.shown).flatMap((row) => {
      const kind = row.trial === best || front.has(row.trial) ? "best" : "", reason = row.state === "paused" && !row.paused_by ? "" : lastLine(row.reason); // its status says it
      const first = el("tr", { class: kind }, frozen ? null : el("td", { class: "key" }, el("input", { type: "checkbox", "aria-label": `choose trial ${row.trial}`, checked: view.chosen.has(row.trial),
        onchange: (event) => (event.target.checked ? view.chosen.add(row.trial) : view.chosen.delete(row.trial)) })),
      columns.map((column) => cell(study, row, column, key.has(column.key))));
      if (!reason) return [first];
      first.classList.add("explained");
      return [first, el("tr", { class: `why ${kind}` }, el("td", { class: "line small quiet", colspan: columns.length + !frozen }, el("div", { title: row.reason.slice(0, 1000) }, reason.slice(0, 600))))];
    });
    const focused = document.activeElement?.dataset?.sort;
    const table = el("table", { class: "trials" }, el("thead", {}, el("tr", {}, frozen ? null : el("th", { class: "choice" }, ""), columns.map((column) => head(column, view, draw, key.has(column.key))))), el("tbody", {}, body));
    if (always || !place.firstChild?.isEqualNode(table)) place.replaceChildren(table);
    if (focused) place.querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
    count.textContent = `${rows.length} of ${study.trials.size} trials`;
    more.hidden = rows.length <= view.shown;
    constants.hidden = !fixed.size;
  };
  // A row that is pressed, or has the focus, must not be replaced; what was missed is drawn afterwards.
  const update = () => {
    missed = place.matches(":active") || place.querySelector("tbody:focus-within") !== null;
    if (!missed) draw(false);
  };
  const catchUp = () => setTimeout(() => { if (missed) update(); });
  place.addEventListener("click", catchUp);
  place.addEventListener("focusout", catchUp);
  const chosen = (verb) => () => [...view.chosen].filter((trial) => study.trials.get(trial)?.actions.includes(verb)).sort((one, other) => one - other);
  const done = () => { view.chosen.clear(); draw(); };
  const states = ["", "running", "waiting", "waiting for others", "paused", "complete", "stopped", "failed", "interrupted"];
  const element = card("Trials", "",
    el("div", { class: "row" },
      el("input", { type: "search", placeholder: "Search values, reasons, devices", "aria-label": "Search", oninput: (event) => { view.text = event.target.value; draw(); } }),
      el("label", {}, "state", el("select", { name: "state", onchange: (event) => { view.state = event.target.value; draw(); } },
        states.map((state) => el("option", { value: state }, state || "all")))),
      constants, count, el("button", { type: "button", id: "csv", onclick: () => save(study, view) }, "CSV"),
      ["pause", "resume", "stop", "retry"].map((verb) => requestButton(study, verb, chosen(verb), verb === "stop" ? "danger" : "", done)), addButton(study)),
    place, more);
  const ordered = async () => { await study.needSpace().catch(() => null); if (element.isConnected) update(); }; // the order of the hyper-parameters alone depends on it
  return { element, update: (trials, first) => { update(); if (first && !study.space) ordered(); } };
}

// The hyper-parameters that explain more of the ranking stand before the others.
function orderedColumns(columns, study) {
  const place = columns.findIndex((column) => column.key.startsWith("config.")), explained = study.space?.explained ?? {};
  const own = columns.filter((column) => column.key.startsWith("config.")), others = columns.filter((column) => !own.includes(column));
  const share = (column) => explained[column.title] ?? 0;
  return [...others.slice(0, Math.max(place, 0)), ...own.sort((one, other) => share(other) - share(one)), ...others.slice(Math.max(place, 0))];
}

// The columns that a narrow window shows: besides the trial, its state and its values those hyper-parameters that
// explain most of the ranking, or the first ones while nothing is known of that.
function keyColumns(study) {
  const explained = study.space?.explained ?? {}, share = (name) => explained[name] ?? 0;
  const parameters = [...study.varying].sort((one, other) => share(other) - share(one)).slice(0, KEYS);
  return new Set(["trial", "state", ...study.snapshot.objectives.map((goal) => `metric.${goal.metric}`), ...parameters.map((name) => `config.${name}`)]);
}

// How far a trial is beyond the constraints: 0 if it is feasible.
function violation(row) {
  return row.feasible ? 0 : row.violation ?? Number.MAX_VALUE;
}

// Columns: {key, title, kind, value(row)}.
function columnsOf(study) {
  const goals = study.snapshot.objectives.map((goal) => goal.metric);
  const metric = (name) => ({ key: `metric.${name}`, title: name, kind: "number", value: (row) => row.metrics[name] });
  return [
    { key: "trial", title: "trial", kind: "number", value: (row) => row.trial },
    { key: "state", title: "state", kind: "", value: (row) => row.status },
    ...goals.map((name) => ({ key: `metric.${name}`, title: name, kind: "number", value: (row) => row.ranked[name], error: (row) => row.errors[name] })),
    ...(study.snapshot.constraints.length ? [{ key: "violation", title: "violation", kind: "number", value: violation }] : []),
    { key: "best_epoch", title: "best epoch", kind: "number", value: (row) => row.best_epoch ?? undefined },
    ...goals.map((name) => ({ key: `last.${name}`, title: goals.length > 1 ? `last ${name}` : "last", kind: "number", value: (row) => row.metrics[name] })),
    { key: "epochs", title: study.snapshot.unit, kind: "number", value: (row) => row.epochs },
    { key: "seconds", title: "seconds", kind: "number", value: (row) => row.seconds },
    ...study.parameters.map((name) => ({ key: `config.${name}`, title: name, kind: "number", value: (row) => row.flat[name] })),
    ...study.metrics.filter((name) => !goals.includes(name)).map(metric),
    { key: "device", title: "device", kind: "", value: (row) => row.device },
    { key: "reason", title: "reason", kind: "text", value: (row) => row.reason },
  ];
}

function cell(study, row, column, key) {
  const value = column.value(row), kind = `${column.kind} ${key ? "key" : ""}`.trim();
  if (column.key === "trial") return el("td", { class: kind }, trialLink(study, row.trial));
  if (column.key === "state") return el("td", { class: kind }, stateBadge(row));
  if (column.key === "seconds") return el("td", { class: "number" }, value.toFixed(1));
  const named = column.key.startsWith("config.") ? column.title : null; // above the value where there are no columns
  return el("td", { class: kind, "data-name": named }, value === undefined ? "–" : withError(value, column.error?.(row)));
}

function head(column, view, draw, key) {
  const sorted = view.sort === column.key;
  const sort = () => { view.falls = sorted ? !view.falls : false; view.sort = column.key; draw(); };
  return el("th", { class: `${column.kind} ${key ? "key" : ""}`.trim(), scope: "col", "aria-sort": sorted ? (view.falls ? "descending" : "ascending") : null },
    el("button", { type: "button", "data-sort": column.key, title: column.title, onclick: sort }, column.title));
}

function selected(study, view, columns) {
  const text = view.text.trim().toLowerCase();
  let rows = [...study.trials.values()];
  if (view.state) rows = rows.filter((row) => row.status === view.state);
  if (text) rows = rows.filter((row) => columns.some((column) => String(column.value(row) ?? "").toLowerCase().includes(text)));
  if (!view.sort) {
    const ranked = study.ranked(study.goal.metric), place = new Map(ranked.map((row, index) => [row.trial, index]));
    const after = (row) => place.get(row.trial) ?? Infinity;
    return rows.sort((one, other) => (after(one) === after(other) ? one.trial - other.trial : after(one) - after(other)));
  }
  const column = columns.find((each) => each.key === view.sort) ?? columns[0];
  const sign = view.falls ? -1 : 1;
  return rows.sort((one, other) => compare(column.value(one), column.value(other), sign) || one.trial - other.trial);
}

// Missing values come last in both directions.
function compare(one, other, sign) {
  const missing = (value) => value === undefined || value === null || value === "";
  if (missing(one) || missing(other)) return missing(one) - missing(other);
  if (typeof one === "number" && typeof other === "number") return sign * (one - other);
  return sign * String(one).localeCompare(String(other));
}

// A value that a spreadsheet would take for a formula gets an apostrophe.
function quoted(value) {
  if (value === undefined || value === null) return "";
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function csv(study, view) {
  const columns = columnsOf(study);
  const lines = [columns.map((column) => quoted(column.key)), ...selected(study, view, columns).map((row) => columns.map((column) => quoted(column.value(row))))];
  return `${lines.map((line) => line.join(",")).join("\r\n")}\r\n`;
}

function save(study, view) {
  const link = el("a", { href: URL.createObjectURL(new Blob([csv(study, view)], { type: "text/csv" })), download: `${study.name.replaceAll("/", "-")}.csv` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  say("The trials that are shown are saved as CSV.");
}
