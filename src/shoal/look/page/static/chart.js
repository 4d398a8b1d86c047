// Curves on a canvas: uPlot draws axes, zoom and the best trials; all others are thin lines below them.
import { el, number, plural } from "./text.js";

const BEST = 6;
const MOST_WIDTH = 2.2;
const LETTER = 7; // pixels of a letter of an axis
const FENCED = 12; // least number of values of which the farthest are left out
const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// An axis; that of the values is as wide as its widest tick, so that its title stands beside them.
function axis(label, across, room) {
  const line = { stroke: colour("--line"), width: 1 };
  return { label: label.length * LETTER > room ? `${label.slice(0, Math.floor(room / LETTER) - 1)}…` : label, stroke: colour("--quiet"), grid: line, ticks: line, font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif", labelSize: 20, labelGap: across ? 2 : 4,
    size: across ? 30 : (u, ticks) => 16 + LETTER * Math.max(3, ...(ticks ?? []).map((text) => text.length)),
    values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) };
}

// Least and greatest value to show: those within one and a half interquartile ranges of the middle half of all values
// (Tukey's fences) if there are enough, and the last value of each of the best curves. `better` is the end, "min" or "max", of which nothing is cut.
export function bounds(curves, best, logarithmic, better = "", margin = 0.05) {
  const usable = (value) => typeof value === "number" && (!logarithmic || value > 0), scale = logarithmic ? Math.log : (value) => value;
  const all = [];
  for (const [, values] of [...curves, ...best]) for (const value of values) if (usable(value)) all.push(scale(value));
  if (!all.length) return logarithmic ? [0.1, 1] : [0, 1];
  all.sort((one, other) => one - other);
  const first = all[Math.ceil((all.length - 1) / 4)], last = all[Math.floor((3 * (all.length - 1)) / 4)], reach = 1.5 * (last - first);
  const ends = best.map(([, values]) => values.findLast(usable)).filter((value) => value !== undefined).map(scale);
  let low = all[0], high = all.at(-1);
  if (reach > 0 && all.length >= FENCED) {
    if (better !== "min") low = Math.max(low, Math.min(first - reach, ...ends));
    if (better !== "max") high = Math.min(high, Math.max(last + reach, ...ends));
  }
  const room = (high - low) * margin || Math.abs(high) * margin || margin;
  const floor = !logarithmic && low >= 0 ? 0 : -Infinity; // a loss or a share has no negative ticks
  return [Math.max(low - room, floor), high + room].map((value) => (logarithmic ? Math.exp(value) : value));
}

// Columns of uPlot: one ascending x for all of the best curves, with the ends of all others.
function columns(curves, best) {
  const places = new Set();
  for (const [times] of best) for (const time of times) places.add(time);
  let first = Infinity, last = -Infinity;
  for (const [times] of [...curves, ...best]) if (times.length) { first = Math.min(first, times[0]); last = Math.max(last, times.at(-1)); }
  if (first <= last) { places.add(first); places.add(last); }
  const x = [...places].sort((one, other) => one - other);
  const index = new Map(x.map((place, position) => [place, position]));
  return [x, ...best.map(([times, values]) => {
    const column = new Array(x.length).fill(undefined); // undefined: no value here, and no gap
    times.forEach((time, position) => { column[index.get(time)] = values[position]; });
    return column;
  })];
}

// Thin lines of all curves but the best, and a mark at the edge for each value of any curve beyond it.
function drawOthers(u, shown) {
  const { ctx, bbox } = u, ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.strokeStyle = colour("--faint");
  ctx.fillStyle = colour("--other");
  ctx.lineWidth = ratio;
  for (const [times, values] of shown.curves) {
    ctx.beginPath();
    let drawn = 0, x = 0, y = 0;
    for (let place = 0; place < times.length; place++) {
      const value = values[place];
      if (typeof value !== "number" || (shown.logY && value <= 0)) continue;
      x = u.valToPos(times[place], "x", true);
      y = u.valToPos(value, "y", true);
      if (drawn++) ctx.lineTo(x, y); else ctx.moveTo(x, y);
    }
    if (drawn === 1) ctx.fillRect(x - 2 * ratio, y - ratio, 5 * ratio, 2 * ratio);
    ctx.stroke();
  }
  ctx.restore();
  drawBeyond(u, shown, ratio);
}

function drawBeyond(u, shown, ratio) {
  const { ctx, bbox } = u, { min, max } = u.scales.y, marked = new Set();
  ctx.save();
  ctx.fillStyle = colour("--wait");
  for (const [times, values] of [...shown.best, ...shown.curves]) {
    for (let place = 0; place < times.length; place++) {
      const value = values[place];
      if (typeof value !== "number" || (value >= min && value <= max)) continue;
      const x = Math.round(u.valToPos(times[place], "x", true)), up = value > max, y = up ? bbox.top : bbox.top + bbox.height;
      if (x < bbox.left || x > bbox.left + bbox.width || marked.has(`${x} ${up}`)) continue;
      marked.add(`${x} ${up}`);
      ctx.beginPath();
      ctx.moveTo(x, up ? y - 7 * ratio : y + 7 * ratio);
      ctx.lineTo(x - 4 * ratio, y);
      ctx.lineTo(x + 4 * ratio, y);
      ctx.fill();
    }
  }
  ctx.restore();
}

// How many curves have values beyond the range that is shown, and the farthest of them; "" if none has.
function beyond(shown, [low, high]) {
  let count = 0, far = null;
  const middle = (low + high) / 2, usable = (value) => typeof value === "number" && (!shown.logY || value > 0);
  for (const [, values] of [...shown.best, ...shown.curves]) {
    const outside = values.filter((value) => usable(value) && (value < low || value > high));
    if (outside.length) count++;
    for (const value of outside) if (far === null || Math.abs(value - middle) > Math.abs(far - middle)) far = value;
  }
  return count ? `Values beyond the chart are marked at its edge (${plural(count, "curve")}, as far as ${number(far)}).` : "";
}

// A chart that is drawn anew by `update`. `read()` returns {curves, best, names, xLabel, yLabel, logY, logX, step, better,
// ends, endsLabel, titles, describe}: `best` are the curves in colour, `curves` the others, both lists of [x, values]; `ends` and
// `endsLabel` what the legend says of the best, and which value that is, while no place is pointed at; `titles` its tooltips.
export function chart(height, read) {
  const plotted = el("div", {}), note = el("p", { class: "small quiet beyond" }), place = el("div", { class: "chart", role: "img" }, plotted, note);
  let plot = null, kind = "", shown = null;
  const range = () => bounds(shown.curves, shown.best, shown.logY, shown.better);
  const state = () => JSON.stringify([shown.names, shown.xLabel, shown.yLabel, shown.logX, shown.logY,
    matchMedia("(prefers-color-scheme: dark)").matches, place.clientWidth]);
  const build = () => {
    const steps = shown.step ? { paths: uPlot.paths.stepped({ align: 1 }) } : {};
    plot?.destroy();
    plotted.replaceChildren();
    plot = new uPlot({
      width: Math.max(place.clientWidth, 200), height,
      legend: { show: shown.names.length > 1, live: true },
      // A curve has a value at the place of the pointer or none: that of another place would not be one of this place.
      cursor: { drag: { x: true, y: false }, dataIdx: (u, series, index) => index },
      scales: { x: { time: false, distr: shown.logX ? 3 : 1 }, y: { distr: shown.logY ? 3 : 1, range } },
      axes: [{ ...axis(shown.xLabel, true, place.clientWidth), ...(shown.xLabel === "seconds" || shown.logX ? {} : { incrs: WHOLE }) }, axis(shown.yLabel, false, height - 60)],
      series: [{ label: shown.xLabel, value: (u, value, series, index) => (index === null ? shown.endsLabel ?? "" : number(value)) }, ...shown.names.map((label, position) => ({
        label, stroke: colour(`--s${position}`), width: position ? 1.4 : MOST_WIDTH, spanGaps: true,
        points: { show: !shown.step && shown.best[position][0].length < 40, size: 5 },
        value: (u, value, series, index) => (index === null ? shown.ends?.[position] ?? "–" : number(value)), ...steps }))],
      hooks: { drawAxes: [(u) => drawOthers(u, shown)] },
    }, columns(shown.curves, shown.best), plotted);
    kind = state();
  };
  const update = () => {
    if (!place.isConnected) return;
    shown = read();
    shown.best = shown.best.slice(0, BEST);
    shown.names = shown.names.slice(0, BEST);
    place.setAttribute("aria-label", shown.describe);
    note.textContent = beyond(shown, range());
    note.hidden = !note.textContent;
    if (![...shown.best, ...shown.curves].some(([times]) => times.length)) {
      plot?.destroy();
      plot = null;
      plotted.replaceChildren(el("p", { class: "quiet" }, `No value of ${shown.yLabel} yet.`));
      return;
    }
    if (!plot || state() !== kind) build();
    else plot.setData(columns(shown.curves, shown.best), plot.scales.x.min === plot.data[0][0] && plot.scales.x.max === plot.data[0].at(-1));
    plotted.querySelectorAll(".u-series").forEach((row, position) => { if (position && shown.titles) row.title = shown.titles[position - 1] ?? ""; });
  };
  new ResizeObserver(() => { if (plot && shown && Math.abs(plot.width - place.clientWidth) > 1) update(); }).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  return { place, update };
}
