// The views of a study. Each returns {element, update}; update is called with the numbers of the trials that changed.
import { duration, el, moment, number, numbers, percent, plural, refill } from "./text.js";
import { frozen, loadLog, loadTrial } from "./source.js";
import { address, card, legend, pairs, requestButton, requestsList, shares, stateBadge, table, trialLink } from "./parts.js";
import { chart } from "./chart.js";
import { timeline, timelineLegend } from "./timeline.js";

const STATES = ["complete", "running", "pending", "paused", "stopped", "interrupted", "failed"];

function figure(label, value, ...more) {
  return [el("div", { class: "label" }, label), el("div", { class: "figure" }, value), ...more];
}

export function overviewView(study) {
  const now = el("div", { class: "grid" }), later = el("div", { class: "grid", style: null });
  later.classList.add("below-now");
  const best = chart(220, () => bestSoFar(study));
  const bestCard = card(`Best ${study.goal.metric} so far`, "wide", best.place);
  const gain = card("What is gained", "third");
  later.append(bestCard, gain);
  const lists = el("div", { class: "grid below-now" });
  const draw = () => {
    refill(now, ...summary(study));
    refill(lists, ...overviewLists(study));
  };
  const slow = async (fresh) => {
    gain.replaceChildren(el("h2", {}, "What is gained"), ...gains(await study.needOverview(fresh)));
    best.update();
  };
  return { element: el("div", {}, now, later, lists), update: (trials, first) => { draw(); return slow(!first); }, slow: true };
}

function summary(study) {
  const found = study.snapshot, text = found.text;
  const total = Object.values(found.states).reduce((sum, count) => sum + count, 0);
  const done = found.epochs_total ? Math.min(1, found.epochs_done / found.epochs_total) : 0;
  const best = found.best;
  const value = best && (Array.isArray(best.value) ? best.value.map(number).join(", ") : number(best.value));
  return [
    card("", "third", figure(Array.isArray(found.metric) ? "Best trials of several metrics" : `Best ${found.metric}`, value ?? "–",
      best ? el("p", { class: "small" }, "by trial ", trialLink(study, best.trial)) : el("p", { class: "small quiet" }, text.best === "–" ? "no value yet" : text.best))),
    card("", "third", figure(`${found.unit[0].toUpperCase()}${found.unit.slice(1)} done`, text.epochs,
      shares([["f0", done]], 1), el("p", { class: "small quiet" }, percent(done)))),
    card("", "third", figure(text.left ? "Time left" : "Running time", text.left || text.elapsed,
      el("p", { class: "small quiet" }, text.left ? `${text.elapsed} elapsed` : stateText(study)))),
    card("Trials", "", shares(STATES.map((state) => [`f-${state}`, found.states[state] ?? 0]), Math.max(total, 1)),
      legend(STATES.filter((state) => found.states[state]).map((state) =>
        [`f-${state}`, `${found.states[state]} ${state === "pending" ? "waiting" : state}`]))),
  ];
}

export function stateText(study) {
  const found = study.snapshot;
  if (found.paused.study) return "paused";
  if (found.ended) return "ended";
  return study.runs ? "running" : "no process runs it";
}

function bestSoFar(study) {
  const curve = study.overview?.curve.filter((point) => point.value !== null) ?? [];
  const times = curve.map((point) => point.seconds), values = curve.map((point) => point.value);
  if (curve.length) { times.push(study.overview.total); values.push(values.at(-1)); }
  return { curves: [[times, values]], best: [[times, values]], names: ["best so far"], xLabel: "seconds", yLabel: study.goal.metric,
    step: true, describe: `best ${study.goal.metric} over time, now ${number(values.at(-1) ?? null)}` };
}

function gains(overview) {
  const jobs = overview.bars.filter((bar) => bar.purpose === "train"), trained = jobs.reduce((sum, bar) => sum + bar.end - bar.begin, 0);
  if (!trained) return [el("p", { class: "quiet" }, "No training job has run yet.")];
  const together = jobs.reduce((sum, bar) => sum + bar.trials.length * (bar.end - bar.begin), 0) / trained, saved = overview.saved;
  return [
    ...figure("Trials in a training job, on average", together.toFixed(1)),
    ...figure("Device time saved by fusing and packing, about", saved ? duration(Math.max(0, saved.seconds)) : "not known"),
    el("p", { class: "small quiet" }, saved ? saved.said : "Trials that train alone, and models that were not measured, say nothing of it."),
  ];
}

function overviewLists(study) {
  const found = study.snapshot;
  const waiting = Object.entries(found.waiting);
  const devices = found.devices.map((device) => [device.device, device.kind,
    device.healthy ? (device.jobs.length ? "in use" : "idle") : `not in use (${device.reason})`, percent(device.occupancy),
    device.jobs.map((job) => `${job.job}: ${plural(job.members, "trial")}`).join(", ") || "–"]);
  return [
    waiting.length > 0 && card("Waiting", "half", el("ul", { class: "plain small" }, waiting.map(([reason, some]) =>
      el("li", {}, `${plural(some.count, "trial")} (${some.first.join(", ")}${some.count > some.first.length ? ", …" : ""}): `,
        el("span", { class: "quiet" }, reason || "waits for a place in a job"))))),
    devices.length > 0 && card("Devices now", "half",
      table([["device", ""], ["kind", ""], ["state", ""], ["reserved", "number"], ["jobs", "text"]], devices)),
    card("Requests", "half", requestsList(study)),
    found.note && card("Notes", "half", el("pre", {}, found.note)),
  ].filter(Boolean);
}

export function curvesView(study) {
  const chosen = { metric: study.goal.metric, x: "epoch", logY: false, logX: false };
  const plot = chart(Math.max(320, Math.min(620, innerHeight - 330)), () => learningCurves(study, chosen));
  const pick = async (name, value) => { chosen[name] = value; await study.needCurves(chosen.metric); plot.update(); };
  const select = (label, name, options) => el("label", {}, label, el("select", { name, onchange: (event) => pick(name, event.target.value) },
    options.map(([value, text]) => el("option", { value, selected: value === chosen[name] }, text))));
  const check = (label, name) => el("label", {}, el("input", { type: "checkbox", name, onchange: (event) => pick(name, event.target.checked) }), label);
  const element = card("Learning curves", "",
    el("div", { class: "row" }, select("metric", "metric", study.metrics.map((name) => [name, name])),
      select("against", "x", [["epoch", study.snapshot.unit], ["time", "seconds since the start"]]), check("log values", "logY"), check("log axis", "logX")),
    plot.place, el("p", { class: "small quiet" }, "The best trials are coloured, all others are thin. Drag to zoom, double-click for all."));
  return { element, update: async () => { await study.needCurves(chosen.metric); plot.update(); } };
}

function learningCurves(study, chosen) {
  const found = study.curves?.metric === chosen.metric ? study.curves.curves : {};
  const began = study.overview?.began ?? Math.min(...Object.values(found).map((curve) => curve[1][0] ?? Infinity));
  const pair = (trial) => {
    const [epochs, times, values] = found[trial] ?? [[], [], []];
    return [chosen.x === "epoch" ? epochs : times.map((time) => Math.max(time - began, 0.01)), values];
  };
  const best = study.ranked(chosen.metric).slice(0, 6).filter((trial) => found[trial.trial]?.[0].length);
  return { curves: Object.keys(found).map(pair), best: best.map((trial) => pair(trial.trial)),
    names: best.map((trial) => `trial ${trial.trial}`), xLabel: chosen.x === "epoch" ? study.snapshot.unit : "seconds",
    yLabel: chosen.metric, logX: chosen.logX, logY: chosen.logY,
    describe: `${chosen.metric} of ${plural(Object.keys(found).length, "trial")}; the best is trial ${best[0]?.trial ?? "–"}` };
}

export function devicesView(study) {
  const place = el("div", {});
  let zoom = 1;
  const draw = () => {
    const overview = study.overview;
    if (!overview) return;
    const buttons = [1, 4, 16].map((each) => el("button", { type: "button", "aria-pressed": String(each === zoom),
      onclick: () => { zoom = each; draw(); } }, `${each}×`));
    const used = overview.devices.map((use) => [use.device, use.kind, percent(use.busy), percent(use.occupancy), use.jobs, use.failed]);
    const spent = Object.entries(overview.accounting.seconds).filter(([, seconds]) => seconds > 0.0005);
    const all = spent.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    const old = place.querySelector(".scroll")?.scrollLeft ?? 0;
    place.replaceChildren(
      card("Timeline of devices", "", el("div", { class: "row" }, el("span", { class: "quiet small" }, "zoom"), buttons),
        timeline(overview, Math.max((place.clientWidth || 900) - 40, 300), zoom), legend(timelineLegend(overview)),
        el("p", { class: "small quiet" }, "A bar of several colours: several arrays in one process. Cross: the job failed. Hold the pointer over a job for its trials.")),
      el("div", { class: "grid below-now" },
        card("Use of devices", "half", table([["device", ""], ["kind", ""], ["used", "number"], ["reserved", "number"], ["jobs", "number"], ["failed", "number"]], used)),
        card("What the time was spent on", "half", table([["activity", ""], ["seconds", "number"], ["share", "number"]],
          spent.sort((one, other) => other[1] - one[1]).map(([name, seconds]) => [name, seconds.toFixed(1), percent(seconds / all)]), `${duration(overview.accounting.wall_seconds)} of ${plural(overview.accounting.slots, "device")}`))));
    place.querySelector(".scroll").scrollLeft = old;
  };
  return { element: place, update: async (trials, first) => { await study.needOverview(!first); draw(); }, slow: true };
}

export function failuresView(study) {
  const place = el("div", {});
  const draw = () => {
    const found = study.snapshot, overview = study.overview;
    const causes = found.causes.map((cause) => [cause.count, cause.cause, numbers(cause.trials), cause.log ?? "–"]);
    const failing = found.failing.map((each) => el("li", {}, each.next));
    const jobs = overview.failures.map((job) => el("details", {},
      el("summary", {}, `${job.job} on ${job.device}, trials ${numbers(job.trials)}: ${job.outcome}${job.cause ? `: ${job.cause}` : ""}`),
      el("pre", {}, job.message)));
    const failed = [...study.trials.values()].filter((trial) => trial.state === "failed");
    const traces = failed.slice(0, 200).map((trial) => el("details", {},
      el("summary", {}, "trial ", trialLink(study, trial.trial), `: ${trial.reason.trim().split("\n").filter((line) => !line.startsWith("Log: ")).at(-1) ?? ""}`),
      el("pre", {}, trial.reason)));
    place.replaceChildren(...[
      found.stopped && el("div", { class: "banner" }, `The study was stopped, as trials failed alike before any had reported: ${found.stopped.cause}`),
      card("Trials that failed for good, by cause", "", causes.length ? table([["trials", "number"], ["cause", "text"], ["which", "text"], ["log", "text"]], causes) : el("p", { class: "quiet" }, "None."),
        failed.length > 0 && el("div", { class: "row" }, requestButton(study, "retry", () => failed.map((trial) => trial.trial))), traces),
      failing.length > 0 && card("Trials that are tried again", "", el("ul", { class: "plain small" }, failing)),
      card(`Jobs that failed (${overview.failures_total})`, "", jobs.length ? jobs.reverse() : el("p", { class: "quiet" }, "None.")),
    ].filter(Boolean));
    for (const part of place.querySelectorAll(".card + .card")) part.classList.add("below");
  };
  return { element: place, slow: true, update: async (trials, first) => {
    await study.needOverview(!first);
    if (!place.querySelector("details[open]")) draw(); // not below somebody who reads a traceback
  } };
}

export function trialView(study, wanted) {
  const trial = Number(wanted), place = el("div", { class: "grid" });
  const chosen = { metric: study.goal.metric, logY: false };
  let reports = [];
  const plot = chart(260, () => ownCurve(trial, reports, chosen, study));
  const options = study.metrics.map((name) => el("option", { value: name, selected: name === chosen.metric }, name));
  const curveCard = card("Curve", "wide",
    el("div", { class: "row" }, el("label", {}, "metric", el("select", { onchange: (event) => { chosen.metric = event.target.value; plot.update(); } }, options)),
      el("label", {}, el("input", { type: "checkbox", onchange: (event) => { chosen.logY = event.target.checked; plot.update(); } }), "log values")),
    plot.place);
  const head = card("", ""), values = card("", "third"), jobs = card("", ""), log = el("div", {});
  place.append(head, curveCard, values, jobs);
  return { element: place, slow: true, update: async (trials, first) => {
    const row = study.trials.get(trial);
    if (!row) { place.replaceChildren(card("", "", el("p", {}, `There is no trial ${wanted}.`))); return; }
    refill(head, ...trialHead(study, row));
    values.replaceChildren(el("h2", {}, "Configuration"), pairs(Object.entries(row.flat).map(([name, value]) => [name, number(value)])),
      el("h3", {}, "Metrics"), table([["metric", "text"], ["last", "number"], ["best", "number"]],
        Object.keys(row.metrics).map((name) => [name, number(row.metrics[name]), number(row.best[name])])));
    const overview = await study.needOverview(!first);
    jobs.replaceChildren(el("h2", {}, "Jobs and devices"), ...trialJobs(study, overview, trial, log), log);
    if (first || trials.has(trial)) reports = (await loadTrial(study.name, trial)).reports;
    plot.update();
  } };
}

function trialHead(study, row) {
  const open = ["pending", "running", "paused", "interrupted"].includes(row.state);
  const held = study.snapshot.paused.trials.includes(row.trial);
  const verbs = row.state === "failed" ? ["retry"] : open ? [held ? "resume" : "pause", "stop"] : [];
  return [
    el("div", { class: "row" }, el("h2", {}, `Trial ${row.trial}`), stateBadge(row.state),
      el("span", { class: "quiet" }, `${row.epochs} of ${row.target} ${study.snapshot.unit}, ${number(row.seconds)} s of training`),
      verbs.map((verb) => requestButton(study, verb, () => [row.trial], verb === "stop" ? "danger" : ""))),
    row.origin && el("p", { class: "small" }, "began with the weights of trial ", trialLink(study, row.origin.trial), ` at epoch ${row.origin.epoch}`),
    row.reason && (row.reason.includes("\n") ? el("pre", {}, row.reason) : el("p", { class: "quiet" }, row.reason)),
  ].filter(Boolean);
}

function ownCurve(trial, reports, chosen, study) {
  const usable = reports.filter((report) => chosen.metric in report[3]);
  const pair = [usable.map((report) => report[1]), usable.map((report) => report[3][chosen.metric])];
  return { curves: [pair], best: [pair], names: [`trial ${trial}`], xLabel: study.snapshot.unit, yLabel: chosen.metric, logY: chosen.logY,
    describe: `${chosen.metric} of trial ${trial} over ${plural(usable.length, "report")}` };
}

function trialJobs(study, overview, trial, log) {
  const bars = overview.bars.filter((bar) => bar.trials.includes(trial)).sort((one, other) => one.begin - other.begin);
  const show = (job) => async () => {
    log.replaceChildren(el("p", { class: "quiet" }, "Loading …"));
    try {
      const found = await loadLog(study.name, job);
      log.replaceChildren(el("h3", {}, `Log of ${job}${found.cut ? ", its end" : ""}`), el("pre", { tabindex: 0, class: "log" }, found.text || "It is empty."));
    } catch (error) {
      log.replaceChildren(el("p", { class: "bad" }, error.message));
    }
  };
  const rows = bars.map((bar) => [bar.job, bar.purpose, bar.device, numbers(bar.trials), duration(bar.begin), duration(bar.end - bar.begin),
    bar.runs ? "runs" : bar.outcome, ...(frozen ? [] : [el("button", { type: "button", class: "show-log", onclick: show(bar.job) }, "log")])]);
  const columns = [["job", ""], ["purpose", ""], ["device", ""], ["with trials", "text"], ["begin", "number"], ["time", "number"], ["outcome", ""], ["", ""]];
  return [rows.length ? table(columns.slice(0, frozen ? 7 : 8), rows) : el("p", { class: "quiet" }, "It has been in no job yet.")];
}
