// The views of a study. Each returns {element, update}; update is called with the numbers of the trials that changed.
import { bytes, duration, el, lastLine, moment, number, numbers, percent, plural, refill } from "./text.js";
import { frozen } from "./source.js";
import { card, legend, requestButton, requestsList, shares, table, trialLink } from "./parts.js";
import { chart } from "./chart.js";
import { addDeviceButton, drainButton, policyButton } from "./forms.js";
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
      best ? el("p", { class: "small" }, "by trial ", trialLink(study, best.trial)) : el("p", { class: "small quiet" }, text.best === "–" ? "no value yet" : text.best),
      text.front ? el("p", { class: "small quiet" }, text.front) : null,
      found.constraints.length ? el("p", { class: "small quiet" }, `subject to ${found.constraints.join(", ")}`) : null)),
    card("", "third", figure(`${found.unit[0].toUpperCase()}${found.unit.slice(1)} done`, text.epochs,
      shares([["f0", done]], 1), el("p", { class: "small quiet" }, percent(done)))),
    card("", "third", figure(text.left ? "Time left" : "Running time", text.left || text.elapsed,
      el("p", { class: "small quiet" }, [text.left ? `${text.elapsed} elapsed` : stateText(study), text.timeout].filter(Boolean).join(", ")))),
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
  const waiting = waitingGroups(study);
  const devices = found.devices.map((device) => [device.device, ...(frozen || found.ended ? [] : [drainButton(study, device)]), device.kind,
    device.healthy ? (device.jobs.length ? "in use" : "idle") : `not in use (${device.reason})`, percent(device.occupancy),
    device.jobs.map((job) => `${job.job}: ${plural(job.members, "trial")}`).join(", ") || "–"]);
  const columns = [["device", "whole"], ...(frozen || found.ended ? [] : [["", ""]]), ["kind", ""], ["state", ""], ["reserved", "number"], ["jobs", "text"]];
  return [
    waiting.length > 0 && card("Waiting", "half", el("ul", { class: "plain small", id: "waiting" }, waiting)),
    (devices.length > 0 || !found.ended) && card("Devices now", "half",
      el("div", { class: "row" }, el("span", { class: "quiet small" }, `policy: ${found.policy.now}`), !found.ended && [policyButton(study), addDeviceButton(study)]),
      devices.length ? table(columns, devices) : el("p", { class: "quiet" }, "No process runs the study.")),
    card("Requests", "half", requestsList(study)),
    found.arrays.length > 0 && card("Fused or plain", "half", el("ul", { class: "plain small", id: "arrays" }, found.arrays.map((each) => el("li", {}, each.text)))),
    found.note && card("Notes", "half", el("pre", {}, found.note)),
    found.edits.length > 0 && card("Edits of the task", "half", el("ul", { class: "plain small" }, found.edits.map((edit) => el("li", {},
      el("span", { class: "quiet" }, `${moment(edit.time)}: `), Object.keys(edit.files).map((path) => path.split("/").at(-1)).join(", "),
      ` edited; ${edit.open.length ? `${plural(edit.open.length, "trial")} had not ended, and those` : "trials"} from ${edit.next} on had not begun`)))),
  ].filter(Boolean);
}

// The reasons of waiting trials; those that differ in numbers alone are one group, with its reasons inside.
function waitingGroups(study) {
  const groups = new Map();
  for (const [reason, some] of Object.entries(study.snapshot.waiting)) {
    const key = reason.replace(/\d+(\.\d+)?/g, "#");
    groups.set(key, [...(groups.get(key) ?? []), [reason || "waits for a place in a job", some]]);
  }
  const which = (some) => [...some.first.flatMap((trial, place) => [place ? ", " : "", trialLink(study, trial)]), some.count > some.first.length ? ", …" : ""];
  const line = ([reason, some]) => [`${plural(some.count, "trial")} (`, ...which(some), "): ", el("span", { class: "quiet" }, reason)];
  const count = (group) => group.reduce((sum, [, some]) => sum + some.count, 0);
  return [...groups.values()].sort((one, other) => count(other) - count(one)).map((group) => (group.length === 1 ? el("li", {}, line(group[0]))
    : el("li", {}, el("details", {}, el("summary", {}, `${plural(count(group), "trial")}, ${group.length} reasons such as: `, el("span", { class: "quiet" }, group[0][0])),
      group.map((each) => el("p", {}, line(each)))))));
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
    const used = overview.devices.map((use) => [use.device, use.kind, percent(use.busy), percent(use.occupancy),
      use.kernels === null ? "–" : percent(use.kernels), use.memory_in_use === null ? "–" : bytes(use.memory_in_use), use.jobs, use.failed]);
    const spent = Object.entries(overview.accounting.seconds).filter(([, seconds]) => seconds > 0.0005);
    const all = spent.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    const old = place.querySelector(".scroll")?.scrollLeft ?? 0;
    place.replaceChildren(
      card("Timeline of devices", "", el("div", { class: "row" }, el("span", { class: "quiet small" }, "zoom"), buttons),
        timeline(overview, Math.max((place.clientWidth || 900) - 40, 300), zoom), legend(timelineLegend(overview)),
        el("p", { class: "small quiet" }, "A bar of several colours: several arrays in one process. Cross: the job failed. Hold the pointer over a job for its trials.")),
      el("div", { class: "grid below-now" },
        card("Use of devices", "half", table([["device", ""], ["kind", ""], ["used", "number"], ["reserved", "number"], ["kernels", "number"], ["memory", "number"], ["jobs", "number"], ["failed", "number"]], used),
          el("p", { class: "small quiet" }, "used: share of the time with a job; reserved: mean share of its compute that jobs reserved; kernels: measured share of the time with a kernel on the GPU; memory: most in use at a time, by any program")),
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
      el("summary", {}, "trial ", trialLink(study, trial.trial), `: ${lastLine(trial.reason)}`),
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
