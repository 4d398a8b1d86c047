// The views of a study. Each returns {element, update}; update is called with the numbers of the trials that changed.
import { bytes, duration, el, lastLine, moment, number, numbers, percent, plural, refill } from "./text.js";
import { frozen } from "./source.js";
import { address, card, legend, requestButton, requestsList, shares, statusKind, table, trialLink } from "./parts.js";
import { chart } from "./chart.js";
import { addDeviceButton, drainButton, policyButton } from "./forms.js";
import { timeline, timelineLegend } from "./timeline.js";

const STATES = ["complete", "running", "waiting", "waiting for others", "paused", "stopped", "interrupted", "failed"];
const NOTES = 3; // most lines of the study's note that are shown among its problems

function figure(label, value, ...more) {
  return [el("div", { class: "label" }, label), el("div", { class: "figure" }, value), ...more];
}

// What a person asks first: what is best, whether it gets better, when it is done, what is wrong.
export function overviewView(study) {
  const now = el("div", { class: "grid" }), later = el("div", { class: "grid below-now" }), lists = el("div", { class: "grid below-now" });
  const best = chart(220, () => bestSoFar(study)), since = el("p", { class: "small quiet", id: "since" });
  const gain = card("What is gained", "third");
  later.append(card("Is it getting better?", "wide", since, best.place), gain);
  const draw = () => {
    refill(now, ...summary(study));
    refill(lists, ...overviewLists(study));
  };
  const slow = async (fresh) => {
    gain.replaceChildren(el("h2", {}, "What is gained"), ...gains(await study.needOverview(fresh), study.snapshot));
    since.textContent = improvement(study);
    best.update();
    refill(now, ...summary(study));
  };
  return { element: el("div", {}, now, later, lists), update: (trials, first) => { draw(); return slow(!first); }, slow: true };
}

function summary(study) {
  const found = study.snapshot, text = found.text;
  const total = Object.values(found.status).reduce((sum, count) => sum + count, 0);
  const done = found.epochs_total ? Math.min(1, found.epochs_done / found.epochs_total) : 0;
  const best = found.best, states = STATES.filter((status) => found.status[status]).map((status) => [status, found.status[status]]);
  const value = best && (Array.isArray(best.value) ? best.value.map(number).join(", ") : number(best.value));
  return [
    card("What is best?", "third", figure(Array.isArray(found.metric) ? "Best trials of several metrics" : `Best ${found.metric}`, value ?? "–",
      best ? el("p", { class: "small" }, "by trial ", trialLink(study, best.trial), best.epoch === null ? "" : ` at ${found.unit === "epochs" ? "epoch" : "report"} ${best.epoch}`,
        JSON.stringify(best.last) === JSON.stringify(best.value) ? "" : `; last value ${[best.last].flat().map(number).join(", ")}`) : el("p", { class: "small quiet" }, text.best === "–" ? "no value yet" : text.best),
      best && bestConfig(study, best),
      text.front ? el("p", { class: "small quiet" }, text.front) : null,
      found.constraints.length ? el("p", { class: "small quiet" }, `subject to ${found.constraints.join(", ")}`) : null)),
    card("When is it done?", "third", figure(text.left ? "Time left" : "Running time", text.left || text.elapsed,
      shares([["f0", done]], 1), el("p", { class: "small quiet" }, `${found.unit}: ${text.epochs}${found.epochs_most > found.epochs_total ? "" : `, ${percent(done)}`}`),
      ...text.now.map((line) => el("p", { class: "small quiet" }, line)),
      el("p", { class: "small quiet" }, [text.left || found.runs > 1 ? text.time : text.state, text.timeout].filter(Boolean).join(", ")))),
    card("What is wrong?", "third", el("ul", { class: "plain small", id: "wrong" }, problems(study).map((each) => el("li", {}, each)))),
    card("Trials", "", shares(states.map(([status, count]) => [statusKind(status), count]), Math.max(total, 1)),
      legend(states.map(([status, count]) => [statusKind(status), `${count} ${status}`]))),
  ];
}

// The searched values of the best trial; constants say nothing of it.
function bestConfig(study, best) {
  const flat = study.trials.get(best.trial)?.flat ?? {};
  const known = study.varying.filter((name) => name in flat).map((name) => `${name} ${number(flat[name])}`);
  return el("p", { class: "small quiet" }, known.join(", "));
}

// Lines on what needs a person, the most urgent first; the largest loss of device time once it is known.
function problems(study) {
  const found = study.snapshot, overview = study.overview, failed = found.states.failed ?? 0, held = found.paused.trials.length;
  const there = (view, text) => el("a", { href: address(study.name, view) }, text);
  const loss = overview?.diagnosis.losses[0];
  const lines = [
    found.stopped && [el("span", { class: "bad" }, "The study was stopped: "), `trials failed alike before any had reported: ${found.stopped.cause}`],
    failed > 0 && [el("span", { class: "bad" }, there("failures", `${plural(failed, "trial")} failed`)), found.causes.length ? `: ${found.causes[0].cause}` : ""],
    found.failing.length > 0 && [there("failures", `${plural(found.failing.length, "trial")} failed`), " and will be tried again"],
    found.devices.some((device) => !device.healthy) && [el("span", { class: "bad" }, `Not in use: ${found.devices.filter((device) => !device.healthy).map((device) => device.device).join(", ")}`)],
    !found.ended && found.paused.study && "The study is paused by a user.",
    !found.ended && !found.paused.study && held > 0 && `${plural(held, "trial")} paused by a user: ${numbers(found.paused.trials)}`,
    !found.ended && !study.runs && "The study is not running: continue it with shoal resume.",
    ...noteLines(found).slice(0, NOTES),
  ].filter(Boolean);
  return [...(lines.length ? lines : [el("span", { class: "good" }, "Nothing is known to be wrong.")]),
    loss && [there("diagnosis", "Largest loss of device time"), `: ${loss.name}, ${percent(loss.share)}`]].filter(Boolean);
}

function noteLines(found) {
  return found.note.split("\n").filter(Boolean);
}

// When the best value improved last, on the clock of the running time.
function improvement(study) {
  const { curve, total } = study.overview, last = curve.findLast((point) => point.value !== null);
  if (!last) return "No value yet.";
  return `The best value has changed ${plural(curve.length, "time")}, last at ${duration(last.seconds)} of ${duration(total)} of running time.`;
}

function bestSoFar(study) {
  const curve = study.overview?.curve.filter((point) => point.value !== null) ?? [];
  const times = curve.map((point) => point.seconds), values = curve.map((point) => point.value);
  if (curve.length) { times.push(study.overview.total); values.push(values.at(-1)); }
  return { curves: [], best: [[times, values]], names: ["best so far"], xLabel: "seconds", yLabel: study.goal.metric,
    step: true, better: study.goal.mode, describe: `best ${study.goal.metric} over time, now ${number(values.at(-1) ?? null)}` };
}

// The gain is what is recorded at the end of a run, as everywhere; until then there is its speed-up.
function gains(overview, found) {
  const jobs = overview.bars.filter((bar) => bar.purpose === "train"), trained = jobs.reduce((sum, bar) => sum + bar.end - bar.begin, 0);
  if (!trained) return [el("p", { class: "quiet" }, "No training job has run yet.")];
  const together = jobs.reduce((sum, bar) => sum + bar.trials.length * (bar.end - bar.begin), 0) / trained, saved = overview.savings;
  return [
    ...figure("Trials in a training job, on average", together.toFixed(1)),
    ...figure("Device time gained by fusing and packing, less that of measuring, about", saved ? (saved.saved > 0 ? duration(saved.saved) : "none") : "not known"),
    el("p", { class: "small quiet" }, saved ? saved.text : found.ended
      ? "Trials that train alone, and models that were not measured, say nothing of it." : "It is known when the study ends."),
    !saved && found.speedup && el("p", { class: "small quiet" }, found.speedup.text),
  ].filter(Boolean);
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
      devices.length ? table(columns, devices) : el("p", { class: "quiet" }, "The study is not running.")),
    card("Requests", "half", requestsList(study)),
    found.arrays.length > 0 && card("Fused or plain", "half", el("ul", { class: "plain small", id: "arrays" }, found.arrays.map((each) => el("li", {}, each.text)))),
    noteLines(found).length > NOTES && card("Notes", "half", el("pre", {}, found.note)),
    found.edits.length > 0 && card("Edits of the task", "half", el("ul", { class: "plain small" }, found.edits.map((edit) => el("li", {},
      el("span", { class: "quiet" }, `${moment(edit.time)}: `), Object.keys(edit.files).map((path) => path.split("/").at(-1)).join(", "),
      ` edited; ${edit.open.length ? `${plural(edit.open.length, "trial")} had not ended, and those` : "trials"} from ${edit.next} on had not begun`)))),
  ].filter(Boolean);
}

// The reasons of waiting trials; those that differ in numbers alone are one group, with its reasons inside.
function waitingGroups(study) {
  const groups = new Map();
  for (const [reason, some] of Object.entries({ ...study.snapshot.waiting, ...study.snapshot.waiting_for_others })) {
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
    plot.place, el("p", { class: "small quiet" }, "The best trials are coloured, all others grey. Hold the pointer over the name of a trial for its hyper-parameters. Drag to zoom, double-click for all."));
  return { element, update: async () => { await study.needCurves(chosen.metric); plot.update(); } };
}

function learningCurves(study, chosen) {
  const found = study.curves?.metric === chosen.metric ? study.curves.curves : {};
  const began = study.overview?.began ?? Math.min(...Object.values(found).map((curve) => curve[1][0] ?? Infinity));
  const pair = (trial) => {
    const [epochs, times, values] = found[trial] ?? [[], [], []];
    return [chosen.x === "epoch" ? epochs : times.map((time) => Math.max(time - began, 0.01)), values];
  };
  const best = study.ranked(chosen.metric).slice(0, 6).filter((trial) => found[trial.trial]?.[0].length), coloured = new Set(best.map((trial) => trial.trial));
  return { curves: Object.keys(found).filter((trial) => !coloured.has(Number(trial))).map(pair), best: best.map((trial) => pair(trial.trial)),
    names: best.map((trial) => `trial ${trial.trial}`), ends: best.map((trial) => number(trial.ranked[chosen.metric])),
    endsLabel: best.some((trial) => trial.best_epoch !== null) ? "best" : "last",
    titles: best.map((trial) => study.varying.filter((name) => name in trial.flat).map((name) => `${name} ${number(trial.flat[name])}`).join("\n")),
    xLabel: chosen.x === "epoch" ? study.snapshot.unit : "seconds", better: study.modeOf(chosen.metric),
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
    const measured = overview.devices.some((use) => use.kernels !== null || use.memory_in_use !== null);
    const gpu = (use) => [use.kernels === null ? "–" : percent(use.kernels), use.memory_in_use === null ? "–" : bytes(use.memory_in_use)];
    const used = overview.devices.map((use) => [use.device, use.kind, percent(use.busy), percent(use.occupancy), ...(measured ? gpu(use) : []), use.jobs, use.failed]);
    const spent = Object.entries(overview.accounting.seconds).filter(([, seconds]) => seconds > 0.0005);
    const all = spent.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    const old = place.querySelector(".scroll")?.scrollLeft ?? 0;
    place.replaceChildren(
      card("Timeline of devices", "", el("div", { class: "row" }, el("span", { class: "quiet small" }, "zoom"), buttons),
        timeline(overview, Math.max((place.clientWidth || 900) - 40, 300), zoom), legend(timelineLegend(overview)),
        el("p", { class: "small quiet" }, "A bar of several colours: several arrays in one process. Cross: the job failed. Hold the pointer over a job for its trials.")),
      el("div", { class: "grid below-now" },
        card("Use of devices", "half", table([["device", ""], ["kind", ""], ["with a job", "number"], ["reserved", "number"], ...(measured ? [["GPU kernels", "number"], ["GPU memory", "number"]] : []), ["jobs", "number"], ["failed", "number"]], used),
          el("p", { class: "small quiet" }, `with a job: share of the time in which it had one, whatever the job did; reserved: mean share of its compute that jobs reserved${measured ? "; GPU kernels: measured share of the time with a kernel on the GPU; GPU memory: most in use at a time, by any program" : ""}`)),
        card("What the time was spent on", "half", table([["activity", "text"], ["seconds", "number"], ["share", "number"]],
          spent.sort((one, other) => other[1] - one[1]).map(([name, seconds]) => [[name, el("div", { class: "small quiet" }, overview.accounting.meanings[name])], seconds.toFixed(1), percent(seconds / all)]), `${duration(overview.accounting.wall_seconds)} of ${plural(overview.accounting.slots, "device")}`))));
    place.querySelector(".scroll").scrollLeft = old;
  };
  return { element: place, update: async (trials, first) => { await study.needOverview(!first); draw(); }, slow: true };
}

// The largest losses of device time, each with its cause and a remedy.
export function diagnosisView(study) {
  const place = el("div", {});
  const draw = () => {
    const { diagnosis } = study.overview;
    refill(place, card("Diagnosis", "", el("p", { id: "diagnosis" }, diagnosis.summary),
      diagnosis.losses.length > 0 && el("p", { class: "small quiet" }, `The ${diagnosis.losses.length > 1 ? `${diagnosis.losses.length} largest losses` : "largest loss"} of device time, and what would avoid ${diagnosis.losses.length > 1 ? "each" : "it"}:`)),
    el("div", { class: "grid below-now" }, diagnosis.losses.map((loss) => card(loss.name[0].toUpperCase() + loss.name.slice(1), "third loss",
      el("div", { class: "figure" }, `${loss.at_most ? "at most " : ""}${number(Number(loss.seconds.toPrecision(3)))} s`),
      shares([["f-failed", Math.min(loss.share, 1)]], 1), el("p", { class: "small quiet" }, `${percent(loss.share)} of the device time`),
      el("p", {}, loss.cause), el("p", {}, el("b", {}, "Remedy: "), loss.remedy)))),
    el("p", { class: "small quiet" }, "All activities are listed below ", el("a", { href: address(study.name, "devices") }, "Devices"), "."));
  };
  return { element: place, slow: true, update: async (trials, first) => { await study.needOverview(!first); draw(); } };
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
