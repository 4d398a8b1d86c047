// The page: which study and which view the address names, and when they are drawn again.
import { el, moment, refill } from "./text.js";
import { frozen, loadStudies, signIn } from "./source.js";
import { address, card, requestButton, table } from "./parts.js";
import { Shown } from "./study.js";
import { spaceView } from "./space.js";
import { trialView } from "./trial.js";
import { curvesView, devicesView, diagnosisView, failuresView, overviewView } from "./views.js";
import { trialsView } from "./trials.js";

const VIEWS = {
  overview: ["Overview", overviewView],
  curves: ["Curves", curvesView],
  space: ["Space", spaceView],
  trials: ["Trials", trialsView],
  devices: ["Devices", devicesView],
  diagnosis: ["Diagnosis", diagnosisView],
  failures: ["Failures", failuresView],
  trial: ["", trialView],
};
const FAST = 400, SLOW = 2500; // milliseconds between two drawings

let study = null, studies = [], view = null, opened = 0;

function route() {
  const [name, kind, trial] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return { name: name || (studies.length === 1 ? studies[0].name : ""), kind: Object.hasOwn(VIEWS, kind) ? kind : "overview", trial };
}

function drawHead() {
  document.body.classList.toggle("unlinked", study?.linked === false);
  const found = study?.snapshot, head = document.getElementById("head");
  const home = studies.length > 1 ? el("a", { class: "home", href: "#/" }, "Studies") : el("span", { class: "home quiet" }, "Shoal");
  if (!study) { refill(head, home); return; }
  const state = found ? found.text.state : "";
  const kind = !study.linked ? "quiet" : state === "running" ? "runs" : ["paused", "waits for paused trials", "not running"].includes(state) ? "wait" : "quiet";
  const controls = found && !found.ended && !frozen
    ? [requestButton(study, found.paused.study ? "resume study" : "pause study"), requestButton(study, "end study", null, "danger")] : [];
  refill(head, ...[home, el("h1", {}, study.name), state && el("span", { class: `badge ${kind}`, id: "state" }, study.linked ? state : `last seen: ${state}`),
    frozen && el("span", { class: "quiet small" }, `as of ${moment(frozen.time)}`),
    !study.linked && el("span", { class: "badge bad" }, "no connection to the page's process"),
    el("div", { class: "controls" }, controls)].filter(Boolean));
}

function drawTabs(kind) {
  const links = study ? Object.entries(VIEWS).filter(([, [title]]) => title).map(([key, [title]]) => {
    const failed = key === "failures" ? study.snapshot?.states.failed : 0;
    return el("a", { href: address(study.name, key), "aria-current": key === kind ? "page" : null }, failed ? `${title} (${failed})` : title);
  }) : [];
  refill(document.getElementById("tabs"), ...links);
}

function fault(text) {
  document.querySelector(".banner.fault")?.remove();
  if (text) document.getElementById("main").prepend(el("div", { class: "banner fault", role: "alert" }, text));
}

function list() {
  const rows = studies.map(({ name, study: found }) => [
    el("a", { href: address(name) }, name), found.error ? el("span", { class: "bad" }, found.error) : found.state,
    found.states ?? "", found.epochs ?? "", found.best ?? "", found.began ? moment(found.began) : ""]);
  return card("", "", table([["study", "text"], ["state", ""], ["trials", "text"], ["epochs", ""], ["best", "text"], ["began", ""]], rows));
}

// Draws at most once in so many milliseconds, and once more after the last change.
function throttled(draw, pause) {
  let waiting = false, busy = false, changed = new Set();
  const run = async () => {
    waiting = false;
    busy = true;
    const now = changed;
    changed = new Set();
    try { await draw(now); } finally { busy = false; }
    if (changed.size) later();
  };
  const later = () => { if (!waiting && !busy) { waiting = true; setTimeout(run, pause); } };
  return (trials) => { for (const trial of trials) changed.add(trial); changed.add(-1); later(); };
}

async function open() {
  const turn = ++opened;
  const { name, kind, trial } = route(), main = document.getElementById("main");
  try {
    if (!studies.length || !name) studies = (await loadStudies()).studies;
    if (turn !== opened) return;
    const wanted = name || route().name;
    if (study && study.name !== wanted) { study.close(); study = null; }
    if (!wanted) { drawHead(); drawTabs(""); main.replaceChildren(studies.length ? list() : el("p", {}, "There is no study here yet.")); document.body.dataset.ready = "list"; return; }
    if (!study) {
      const found = new Shown(wanted);
      await found.load();
      if (turn !== opened) return;
      study = found;
      study.follow();
    }
    study.listeners.clear();
    if (!study.snapshot) { drawHead(); main.replaceChildren(); fault(study.error); study.listeners.add(() => { if (study.snapshot) open(); }); return; }
    const shown = VIEWS[kind][1](study, trial);
    view = shown;
    document.title = `${study.name} – Shoal`;
    drawHead();
    drawTabs(kind);
    const tabs = document.getElementById("tabs"), tab = tabs.querySelector("[aria-current]");
    if (tab) tabs.scrollLeft = tab.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - tab.offsetWidth) / 2; // scrollIntoView would move where Tab begins
    main.replaceChildren(shown.element);
    fault(study.error);
    const heads = throttled(async () => { if (view === shown) { drawHead(); drawTabs(kind); fault(study.error); } }, FAST);
    const draws = throttled(async (trials) => { if (view === shown) await attempt(() => shown.update(trials, false)); }, shown.slow ? SLOW : FAST);
    study.listeners.add(heads);
    study.listeners.add(draws);
    await attempt(() => shown.update(new Set(study.trials.keys()), true));
    document.body.dataset.ready = kind;
  } catch (error) {
    if (turn !== opened) return;
    main.replaceChildren();
    fault(error.message);
    document.body.dataset.ready = "error";
  }
}

async function attempt(draw) {
  try { await draw(); } catch (error) { if (!study || study.linked) fault(error.message); }
}

addEventListener("hashchange", () => { delete document.body.dataset.ready; open().then(() => document.getElementById("main").focus({ preventScroll: true })); });
signIn().then(open, (error) => fault(error.message));
