// Trials by their hyper-parameters: parallel coordinates, slices at one budget, and the grid of states.
import { el, number, percent, plural, refill, svg } from "./text.js";
import { bounds } from "./chart.js";
import { card, legend, shares, statusKind, table, trialLink } from "./parts.js";

const SHADES = 5, HIGH = 300, TOP = 26, BELOW = 14, LEAST = 104;
const SLICE = { width: 290, height: 200, left: 56, right: 14, top: 8, below: 40, gap: 46 };

// An axis as {name, place(value) -> 0 (bottom) to 1, or null, marks: [place, text]}.
function parameterAxis(space, axis) {
  const listed = axis.values.map((value) => JSON.stringify(value)), ranged = axis.edges.length > 1;
  const lowest = ranged ? Math.min(0.5, 0.1 * listed.length) : 0; // listed values stand below the range
  const room = ranged ? 0.1 : 1 / Math.max(listed.length - 1, 1);
  const scale = space.log.includes(axis.name) ? Math.log : (value) => value;
  const low = scale(axis.edges[0]), high = scale(axis.edges.at(-1));
  const place = (value) => {
    const index = listed.indexOf(JSON.stringify(value));
    if (index >= 0) return listed.length === 1 && !ranged ? 0.5 : index * room;
    if (!ranged || typeof value !== "number") return null;
    return lowest + (1 - lowest) * Math.min(Math.max((scale(value) - low) / (high - low), 0), 1);
  };
  const marks = axis.values.map((value, index) => [place(value), axis.labels[index]]);
  if (ranged) {
    const step = Math.ceil((axis.edges.length - 1) / 3);
    axis.edges.forEach((edge, index) => { if (index % step === 0 || index === axis.edges.length - 1) marks.push([place(edge), number(edge)]); });
  }
  return { name: axis.name, note: space.log.includes(axis.name) ? "log" : "", read: (trial) => trial.flat[axis.name], place, marks };
}

// Values beyond the ends, see `bounds`, stand at them; the mark there says so.
function metricAxis(metric, trials, logarithmic, better) {
  const log = logarithmic && trials.every((trial) => !(trial.ranked[metric] <= 0));
  const values = trials.map((trial) => trial.ranked[metric]);
  const [low, high] = bounds(values.map((value) => [[], [value]]), [], log, better, 0).map((value) => (log ? Math.log(value) : value));
  const place = (value) => (typeof value === "number" ? Math.min(Math.max(((log ? Math.log(value) : value) - low) / (high - low), 0), 1) : null);
  const scaled = values.filter((value) => typeof value === "number").map((value) => (log ? Math.log(value) : value)), room = 1e-9 * Math.abs(high - low);
  const sign = (at) => (at === 1 && scaled.some((value) => value > high + room) ? "≥ " : at === 0 && scaled.some((value) => value < low - room) ? "≤ " : "");
  const rounded = (value) => number(Math.abs(value) < 1e-3 * (high - low) ? 0 : Number(value.toPrecision(3)));
  const marks = [0, 1 / 3, 2 / 3, 1].map((at) => [at, sign(at) + (log ? number(Number(Math.exp(low + at * (high - low)).toPrecision(3))) : rounded(low + at * (high - low)))]);
  return { name: metric, note: log ? "log" : "", read: (trial) => trial.ranked[metric], place, marks };
}

export function spaceView(study) {
  const chosen = { metric: study.goal.metric, logY: false, brushes: new Map(), down: null, across: null };
  const plot = el("div", { class: "scroll coordinates" }), picked = el("div", {}), slices = el("div", {}), grid = el("div", {});
  const pick = (name, value) => { chosen[name] = value; if (name === "metric") chosen.brushes.clear(); draw(); };
  const parallel = card("Parallel coordinates", "",
    el("div", { class: "row" },
      el("label", {}, "coloured by", el("select", { name: "metric", onchange: (event) => pick("metric", event.target.value) },
        study.metrics.map((name) => el("option", { value: name, selected: name === chosen.metric }, name)))),
      el("label", {}, el("input", { type: "checkbox", name: "logY", onchange: (event) => pick("logY", event.target.checked) }), "log values"),
      el("button", { type: "button", id: "unbrush", onclick: () => { chosen.brushes.clear(); draw(); } }, "Show all")),
    plot, legend([["p0", "worst"], ["p2", "middle"], ["p4", "best by rank"], ["p-none", "no value"]]), picked,
    el("p", { class: "small quiet" }, "Drag along an axis to keep the trials between; press it to let go. By keyboard: arrows move the lower end, with Shift the upper one, Escape lets go."));
  const draw = () => {
    if (!study.space) return;
    drawParallel(study, chosen, plot, picked, draw);
    refill(slices, slicesCard(study));
    refill(grid, ...gridCard(study, chosen, draw));
  };
  new ResizeObserver(() => { if (plot.dataset.wide !== String(plot.clientWidth)) draw(); }).observe(plot);
  return { element: el("div", {}, parallel, el("div", { class: "below-now" }, slices), el("div", { class: "below-now" }, grid)), slow: true,
    update: async (trials, first) => { await study.needSpace(!first); if (!plot.matches(":active")) draw(); } };
}

function drawParallel(study, chosen, plot, picked, redraw) {
  const trials = [...study.trials.values()], ranked = study.ranked(chosen.metric), total = ranked.length;
  const axes = [...study.space.axes.map((axis) => parameterAxis(study.space, axis)), metricAxis(chosen.metric, ranked, chosen.logY, study.modeOf(chosen.metric))];
  const across = Math.max(plot.clientWidth || 800, LEAST * axes.length), left = 64, right = 56;
  const x = axes.map((axis, index) => left + (axes.length > 1 ? (index * (across - left - right)) / (axes.length - 1) : 0));
  const y = (place) => TOP + (1 - place) * HIGH;
  const rank = new Map(ranked.map((trial, index) => [trial.trial, total > 1 ? 1 - index / (total - 1) : 1]));
  const bins = Array.from({ length: SHADES + 2 }, () => []), inside = [];
  for (const trial of trials) {
    const places = axes.map((axis) => axis.place(axis.read(trial)));
    const kept = axes.every((axis, index) => {
      const brush = chosen.brushes.get(axis.name);
      return !brush || (places[index] !== null && places[index] >= brush[0] && places[index] <= brush[1]);
    });
    if (kept) inside.push(trial);
    const shade = !kept ? SHADES + 1 : rank.has(trial.trial) ? Math.min(SHADES - 1, Math.floor(rank.get(trial.trial) * SHADES)) : SHADES;
    const points = places.map((place, index) => (place === null ? null : `${x[index].toFixed(1)} ${y(place).toFixed(1)}`)).filter(Boolean);
    if (points.length > 1) bins[shade].push(`M${points.join("L")}`);
  }
  const order = [SHADES + 1, SHADES, ...Array.from({ length: SHADES }, (_, shade) => shade)]; // the best are drawn last
  const lines = order.map((shade) => svg("path", { class: shade > SHADES ? "p-out" : shade === SHADES ? "p-none" : `p${shade}`, d: bins[shade].join("") }));
  const focused = document.activeElement?.dataset?.axis;
  const picture = svg("svg", { class: "parallel", width: across, height: TOP + HIGH + BELOW, role: "group",
    "aria-label": `${plural(inside.length, "trial")} of ${trials.length} by ${axes.map((axis) => axis.name).join(", ")}` },
    lines, axes.map((axis, index) => drawnAxis(axis, x[index], y, chosen, redraw, index === axes.length - 1)));
  const scrolled = plot.scrollLeft;
  plot.replaceChildren(picture);
  plot.dataset.wide = String(plot.clientWidth);
  plot.scrollLeft = scrolled;
  if (focused) plot.querySelector(`[data-axis="${CSS.escape(focused)}"]`)?.focus();
  const best = ranked.filter((trial) => inside.includes(trial)).slice(0, 5), names = study.space.axes.map((axis) => axis.name);
  refill(picked, el("p", { class: "small", id: "picked" }, `${inside.length} of ${plural(trials.length, "trial")}${chosen.brushes.size ? " between the marks" : ""}`),
    best.length ? table([["trial", "number"], [chosen.metric, "number"], ...names.map((name) => [name, "number"])],
      best.map((trial) => [trialLink(study, trial.trial), number(trial.ranked[chosen.metric]), ...names.map((name) => (name in trial.flat ? number(trial.flat[name]) : "–"))])) : "");
}

function drawnAxis(axis, x, y, chosen, redraw, last) {
  const brush = chosen.brushes.get(axis.name), name = axis.name.length > 14 ? `${axis.name.slice(0, 13)}…` : axis.name;
  const set = (low, high) => { chosen.brushes.set(axis.name, [Math.max(0, Math.min(low, high)), Math.min(1, Math.max(low, high))]); redraw(); };
  const release = () => { chosen.brushes.delete(axis.name); redraw(); };
  const box = svg("rect", { class: "handle", x: x - 14, y: TOP - 4, width: 28, height: HIGH + 8, tabindex: 0, role: "slider", "data-axis": axis.name,
    "aria-label": `range of ${axis.name}`, "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": brush ? brush[0].toFixed(2) : 0,
    "aria-valuetext": brush ? `${percent(brush[0])} to ${percent(brush[1])} of the axis` : "all",
    onkeydown: (event) => {
      const step = { ArrowUp: 0.05, ArrowDown: -0.05 }[event.key], [low, high] = brush ?? [0, 1];
      if (event.key === "Escape") release();
      else if (step && event.shiftKey) set(low, Math.max(low, high + step));
      else if (step) set(Math.min(high, low + step), high);
      else return;
      event.preventDefault();
    },
    onpointerdown: (event) => {
      const at = (moved) => Math.min(1, Math.max(0, 1 - (moved.clientY - box.ownerSVGElement.getBoundingClientRect().top - TOP) / HIGH));
      const begin = at(event), mark = box.parentNode.querySelector(".brush");
      box.setPointerCapture(event.pointerId);
      box.onpointermove = (moved) => { const end = at(moved); mark.setAttribute("y", y(Math.max(begin, end))); mark.setAttribute("height", Math.abs(end - begin) * HIGH); };
      box.onpointerup = (moved) => { box.onpointermove = box.onpointerup = null; if (Math.abs(at(moved) - begin) < 0.01) release(); else set(begin, at(moved)); };
      box.onpointercancel = () => { box.onpointermove = box.onpointerup = null; redraw(); };
    } });
  return svg("g", {},
    svg("line", { class: "axis", x1: x, x2: x, y1: TOP, y2: TOP + HIGH }),
    svg("text", { class: "name", x, y: 14, "text-anchor": "middle" }, svg("title", {}, axis.name), axis.note ? `${name} (${axis.note})` : name),
    axis.marks.map(([place, text]) => [svg("line", { class: "axis", x1: last ? x + 4 : x - 4, x2: x, y1: y(place), y2: y(place) }),
      svg("text", { class: "mark", x: last ? x + 7 : x - 7, y: y(place) + 4, "text-anchor": last ? "start" : "end" }, text.length > 9 ? `${text.slice(0, 8)}…` : text)]),
    svg("rect", { class: "brush", x: x - 7, width: 14, y: brush ? y(brush[1]) : TOP, height: brush ? (brush[1] - brush[0]) * HIGH : 0 }), box);
}

// The values of trials at one budget by each parameter, a small picture each.
function slicesCard(study) {
  const { space } = study, sign = space.mode === "min" ? 1 : -1;
  const trials = space.values.filter(([trial, value]) => value !== null && study.trials.has(trial))
    .sort(([, one], [, other]) => sign * (other - one)) // the best are drawn last
    .map(([trial, value]) => ({ flat: study.trials.get(trial).flat, ranked: { [space.metric]: value } }));
  if (!space.axes.length || !trials.length) return card("Slices", "", el("p", { class: "quiet" }, space.axes.length ? `No value of ${space.metric} yet.` : "Nothing is searched."));
  const least = Math.min(...trials.map((trial) => trial.ranked[space.metric]));
  const vertical = metricAxis(space.metric, trials, least > 0 && trials.some((trial) => trial.ranked[space.metric] > 100 * least), space.mode);
  return card("Slices", "", el("div", { class: "row" }, space.axes.map((axis) => sliceOf(trials, parameterAxis(space, axis), vertical))),
    el("p", { class: "small quiet" }, `${space.metric} of ${space.compared} by each parameter, the best by rank in the strongest colour.${space.selection ? ` ${space.selection[0].toUpperCase()}${space.selection.slice(1)}.` : ""}`));
}

function sliceOf(trials, across, vertical) {
  const { width, height, left, right, top, below, gap } = SLICE, low = height - below;
  const x = (place) => left + 8 + place * (width - left - right - 16), y = (place) => low - 6 - place * (low - top - 12);
  const dots = Array.from({ length: SHADES }, () => []);
  trials.forEach((trial, index) => {
    const place = across.place(across.read(trial));
    if (place !== null) dots[Math.floor((index * SHADES) / trials.length)].push(`M${x(place).toFixed(1)} ${y(vertical.place(vertical.read(trial))).toFixed(1)}h0`);
  });
  let taken = -Infinity;
  const marks = [...across.marks].sort(([one], [other]) => one - other).filter(([place]) => x(place) - taken >= gap && (taken = x(place)));
  const short = (text) => (text.length > 9 ? `${text.slice(0, 8)}…` : text);
  return svg("svg", { class: "parallel slice", width, height, role: "img", "aria-label": `${vertical.name} by ${across.name}` },
    svg("path", { class: "axis", d: `M${left} ${top}V${low}H${width - right}` }),
    dots.map((some, shade) => svg("path", { class: `dots p${shade}`, d: some.join("") })),
    vertical.marks.map(([place, text]) => svg("text", { x: left - 5, y: y(place) + 4, "text-anchor": "end" }, short(text))),
    marks.map(([place, text]) => svg("text", { x: x(place), y: low + 14, "text-anchor": "middle" }, short(text))),
    svg("text", { class: "name", x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, svg("title", {}, across.name),
      `${across.name.length > 30 ? `${across.name.slice(0, 29)}…` : across.name}${across.note && ` (${across.note})`}`));
}

// The cells of the grid by two axes, or one: merged from those of all axes.
function projected(space, down, across) {
  const sign = space.mode === "min" ? 1 : -1, found = new Map();
  for (const cell of space.cells) {
    const key = `${down < 0 ? 0 : cell.at[down]} ${cell.at[across]}`;
    const merged = found.get(key) ?? found.set(key, { status: {}, best: null, best_trial: null }).get(key);
    for (const [status, count] of Object.entries(cell.status)) merged.status[status] = (merged.status[status] ?? 0) + count;
    if (cell.best !== null && (merged.best === null || sign * cell.best < sign * merged.best)) Object.assign(merged, { best: cell.best, best_trial: cell.best_trial });
  }
  return found;
}

function gridCard(study, chosen, redraw) {
  const space = study.space, names = space.axes.map((axis) => axis.name);
  if (!names.length) return [card("Grid of states", "", el("p", { class: "quiet" }, "Nothing is searched, so there is no grid."))];
  const across = names.includes(chosen.across) ? chosen.across : space.main[1] ?? space.main[0] ?? names[0];
  const down = chosen.down !== null && chosen.down !== across ? chosen.down : space.main.find((name) => name !== across) ?? "";
  const columns = space.axes[names.indexOf(across)], rows = down ? space.axes[names.indexOf(down)] : { labels: [space.metric] };
  const cells = projected(space, names.indexOf(down), names.indexOf(across)), sign = space.mode === "min" ? 1 : -1;
  const values = [...new Set([...cells.values()].map((cell) => cell.best).filter((value) => value !== null))].sort((one, other) => sign * (other - one));
  const shade = (value) => `g${values.length > 1 ? Math.min(SHADES - 1, Math.floor((values.indexOf(value) * SHADES) / (values.length - 1))) : SHADES - 1}`;
  const cell = (row, column) => {
    const found = cells.get(`${row} ${column}`);
    if (!found) return el("td", { class: "cell empty" }, "·");
    const total = Object.values(found.status).reduce((sum, count) => sum + count, 0);
    const states = Object.entries(found.status).map(([status, count]) => `${count} ${status}`);
    return el("td", { class: `cell ${found.best === null ? "" : shade(found.best)}` },
      found.best === null ? el("div", {}, "–") : el("a", { href: trialLink(study, found.best_trial).getAttribute("href"), title: `trial ${found.best_trial}` }, number(found.best)),
      shares(Object.entries(found.status).map(([status, count]) => [statusKind(status), count]), total), el("div", { class: "small" }, states.join(", ")));
  };
  const select = (label, name, value, options) => el("label", {}, label, el("select", { name, onchange: (event) => { chosen[name] = event.target.value; redraw(); } },
    options.map((each) => el("option", { value: each, selected: each === value }, each || "nothing"))));
  const known = Object.entries(space.explained).filter(([, share]) => share >= 0.005).sort(([, one], [, other]) => other - one);
  const explained = !Object.keys(space.explained).length ? " Too few values at one budget to say which hyper-parameter explains the ranking."
    : !known.length ? ` No hyper-parameter alone explains the ranking of ${space.compared}, so these axes were chosen for their number of values.`
      : ` Explained of the ranking of ${space.compared}: ${known.slice(0, 5).map(([name, share]) => `${name} ${percent(share)}`).join(", ")}${known.length > 5 ? ", …" : "; the others nothing"}.`;
  return [card("Grid of states", "",
    el("div", { class: "row" }, names.length > 1 && select("down", "down", down, ["", ...names.filter((name) => name !== across)]), select("across", "across", across, names)),
    el("div", { class: "scroll" }, el("table", { class: "grid-of-states" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, down), columns.labels.map((label) => el("th", { scope: "col" }, label)))),
      el("tbody", {}, rows.labels.map((label, row) => el("tr", {}, el("th", { scope: "row" }, label), columns.labels.map((_, column) => cell(row, column))))))),
    el("p", { class: "small quiet" }, `Best ${space.metric} of the trials in each cell, ${space.mode === "min" ? "lower" : "higher"} is better; below it their states.`,
      explained))];
}
