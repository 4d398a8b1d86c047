// The study that is shown: its trials, its state, the curves of one metric, and who is told of changes.
import { flatten } from "./text.js";
import { follow, loadCurves, loadOverview, loadSpace, loadState } from "./source.js";

export class Shown {
  constructor(name) {
    this.name = name;
    this.trials = new Map();
    this.snapshot = null;
    this.error = "";
    this.linked = true;
    this.overview = null;
    this.space = null;
    this.curves = null;
    this.recent = []; // reports that came while curves were on their way
    this.metrics = [];
    this.parameters = [];
    this.listeners = new Set();
    this.closed = false;
    this.stop = () => {};
  }

  async load() {
    const state = await loadState(this.name);
    this.trials.clear();
    this.position = state.position;
    this.apply(state);
  }

  follow() {
    this.stop = follow(this.name, this.position, (delta) => this.changed(delta), (linked) => this.link(linked));
  }

  close() {
    this.closed = true;
    this.stop();
    this.listeners.clear();
  }

  async changed(delta) {
    if (delta.reload) {
      this.stop();
      this.curves = this.overview = this.space = null; // perhaps another study at the same path
      this.recent = [];
      this.metrics = [];
      this.parameters = [];
      await this.load();
      if (this.closed) return;
      this.follow();
      this.tell(new Set(this.trials.keys()));
      return;
    }
    this.apply(delta);
    this.tell(new Set(delta.trials.map((trial) => trial.trial)));
  }

  link(linked) {
    if (linked === this.linked) return;
    this.linked = linked;
    this.tell(new Set());
  }

  tell(trials) {
    for (const listener of this.listeners) listener(trials);
  }

  apply(state) {
    this.error = state.error;
    if (state.snapshot) this.snapshot = state.snapshot;
    const metrics = new Set(this.metrics), parameters = new Set(this.parameters);
    for (const goal of this.snapshot?.objectives ?? []) metrics.add(goal.metric);
    for (const trial of state.trials) {
      trial.flat = flatten(trial.config);
      for (const name of Object.keys(trial.metrics)) metrics.add(name);
      for (const name of Object.keys(trial.flat)) parameters.add(name);
      this.trials.set(trial.trial, trial);
    }
    this.metrics = [...metrics];
    this.parameters = [...parameters];
    for (const report of state.reports) this.extend(report);
    this.recent.push(...state.reports);
    if (this.recent.length > 20000) this.recent.splice(0, this.recent.length - 10000);
  }

  extend([trial, epoch, time, metrics]) {
    if (!this.curves || !(this.curves.metric in metrics)) return;
    const curve = (this.curves.curves[trial] ??= [[], [], []]);
    if (curve[0].length && epoch <= curve[0].at(-1)) return;
    curve[0].push(epoch);
    curve[1].push(time);
    curve[2].push(metrics[this.curves.metric]);
  }

  async needCurves(metric) {
    if (this.curves?.metric === metric) return this.curves;
    this.curves = await loadCurves(this.name, metric);
    for (const report of this.recent) this.extend(report);
    return this.curves;
  }

  async needOverview(fresh = false) {
    if (fresh || !this.overview) this.overview = await loadOverview(this.name);
    return this.overview;
  }

  async needSpace(fresh = false) {
    if (fresh || !this.space) this.space = await loadSpace(this.name);
    return this.space;
  }

  get goal() {
    return this.snapshot?.objectives[0] ?? { metric: "", mode: "min" };
  }

  get runs() {
    return this.snapshot?.pid !== null && this.snapshot?.pid !== undefined;
  }

  // Parameters of more than one value, and those that a trial from outside the space has beside them.
  get varying() {
    const constants = new Set(this.snapshot?.constants ?? []);
    return this.parameters.filter((name) => !constants.has(name));
  }

  // "min" or "max"; "" for a metric that is no goal of the study.
  modeOf(metric) {
    return this.snapshot.objectives.find((goal) => goal.metric === metric)?.mode ?? "";
  }

  // Trials with a value of a metric, the best first. Failed trials are not ranked, as in `shoal best`.
  ranked(metric) {
    const mode = this.modeOf(metric);
    const falls = mode ? mode === "min" : /(loss|error)$/.test(metric);
    const value = (trial) => (falls ? trial.ranked[metric] : -trial.ranked[metric]);
    const usable = [...this.trials.values()].filter(
      (trial) => trial.state !== "failed" && typeof trial.ranked[metric] === "number");
    const beyond = (trial) => (trial.feasible ? 0 : trial.violation ?? Number.MAX_VALUE);
    return usable.sort((one, other) => beyond(one) - beyond(other) || value(one) - value(other) || one.trial - other.trial);
  }
}
