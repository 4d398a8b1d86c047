// One trial: what it is, its curve, the jobs and devices that it has been on, its checkpoints, why it waits.
import { bytes, duration, el, moment, number, numbers, plural, refill, withError } from "./text.js";
import { frozen, loadLog, loadTrial } from "./source.js";
import { card, pairs, requestButton, stateBadge, table, trialLink } from "./parts.js";
import { chart } from "./chart.js";
import { cloneButton } from "./forms.js";
import { JOB_VERBS } from "./timeline.js";

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
  const head = card("", ""), values = card("", "third"), jobs = card("", ""), saved = card("", ""), log = el("div", {});
  let checkpoints = [], proof = "";
  return { element: place, slow: true, update: async (trials, first) => {
    const row = study.trials.get(trial);
    if (!row) { place.replaceChildren(card("", "", el("p", {}, `There is no trial ${wanted}.`))); return; }
    if (!head.parentElement) place.replaceChildren(head, curveCard, values, jobs, saved); // it may have come meanwhile
    values.replaceChildren(el("h2", {}, "Configuration"), pairs(Object.entries(row.flat).map(([name, value]) => [name, number(value)])),
      el("h3", {}, "Metrics"), Object.keys(row.metrics).length ? table([["metric", "text"], [row.best_epoch === null ? "ranks" : `epoch ${row.best_epoch}`, "number"], ["last", "number"], ["best", "number"]],
        Object.keys(row.metrics).map((name) => [name, withError(row.ranked[name], row.errors[name]), number(row.metrics[name]), number(row.best[name])])) : el("p", { class: "quiet" }, "No value yet."));
    const overview = await study.needOverview(!first);
    jobs.replaceChildren(el("h2", {}, "Jobs and devices"), ...trialJobs(study, overview, trial, log), log);
    if (first || trials.has(trial)) ({ reports, checkpoints, proof } = await loadTrial(study.name, trial));
    refill(head, ...trialHead(study, row, () => checkpoints ?? [], proof));
    refill(saved, el("h2", {}, "Checkpoints"), checkpointTable(study, checkpoints));
    plot.update();
  } };
}

function trialHead(study, row, checkpoints, proof) {
  return [
    el("div", { class: "row" }, el("h2", {}, `Trial ${row.trial}`), stateBadge(row),
      el("span", { class: "quiet" }, `${row.epochs} of ${row.target} ${study.snapshot.unit}, ${number(Number(row.seconds.toPrecision(3)))} s of training`),
      row.actions.map((verb) => requestButton(study, verb, () => [row.trial], verb === "stop" ? "danger" : "")), cloneButton(study, row, checkpoints)),
    row.origin && el("p", { class: "small" }, "began with the weights of trial ", trialLink(study, row.origin.trial), ` at epoch ${row.origin.epoch}`),
    proof && el("p", { class: "small quiet", id: "proof" }, proof),
    ...whyNow(study, row),
  ].filter(Boolean);
}

// Why a trial waits or has ended; and how many others wait for the same.
function whyNow(study, row) {
  if (!["pending", "paused"].includes(row.state)) return [row.reason && (row.reason.includes("\n") ? el("pre", {}, row.reason) : el("p", { class: "quiet" }, row.reason))];
  const found = study.snapshot, waiting = row.state === "pending" ? found.waiting : found.waiting_for_others;
  const why = found.paused.study ? "the study is paused by a user" : study.runs || row.paused_by || row.state === "paused" ? row.reason || "for a place in a job" : "waits until the study is resumed";
  const others = (waiting[row.reason]?.count ?? 1) - 1;
  return [el("p", { id: "why" }, el("b", {}, "It waits: "), why.replace(/^wait(ing|s) /, ""), others > 0 && el("span", { class: "quiet" }, `, as do ${plural(others, "other")}`))];
}

function checkpointTable(study, checkpoints) {
  if (checkpoints === null) return el("p", { class: "quiet" }, "A report has none; shoal page shows them.");
  if (!checkpoints.length) return el("p", { class: "quiet" }, "It has none now.");
  return table([["after", "whole"], ["size", "number"], ["saved", "whole"], ["path in the study's directory", "text"]], checkpoints.map((each) => [
    each.step ? `${each.epoch} ${study.snapshot.unit} and ${plural(each.step, "step")}` : `${each.epoch} ${study.snapshot.unit}`, bytes(each.bytes), moment(each.time), each.path]));
}

function ownCurve(trial, reports, chosen, study) {
  const usable = reports.filter((report) => chosen.metric in report[3]);
  const pair = [usable.map((report) => report[1]), usable.map((report) => report[3][chosen.metric])];
  return { curves: [], best: [pair], better: study.modeOf(chosen.metric), names: [`trial ${trial}`], xLabel: study.snapshot.unit, yLabel: chosen.metric, logY: chosen.logY,
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
  const rows = bars.map((bar) => [bar.job, JOB_VERBS[bar.purpose] ?? bar.purpose, bar.device, numbers(bar.trials), duration(bar.begin), duration(bar.end - bar.begin),
    bar.runs ? "runs" : bar.outcome, ...(frozen ? [] : [el("button", { type: "button", class: "little show-log", onclick: show(bar.job) }, "log")])]);
  const columns = [["job", "whole"], ["does", "whole"], ["device", "whole"], ["with trials", "text"], ["begin", "number"], ["time", "number"], ["outcome", ""], ["", ""]];
  return [rows.length ? table(columns.slice(0, frozen ? 7 : 8), rows) : el("p", { class: "quiet" }, "It has been in no job yet.")];
}
