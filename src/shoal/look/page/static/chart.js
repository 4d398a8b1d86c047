// Curves on a canvas: uPlot draws axes, zoom and the best trials; all others are thin lines below them.
import { el, number } from "./text.js";

const BEST = 6;
const MOST_WIDTH = 2.2;
const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axis(label, across) {
  const line = { stroke: colour("--line"), width: 1 };
  return { label, stroke: colour("--quiet"), grid: line, ticks: line, font: "12px system-ui, sans-serif",
    labelFont: "12px system-ui, sans-serif", labelSize: across ? 16 : 20, labelGap: 0, size: across ? 30 : 52,
    values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick))) };
}

// Least and greatest value to show: all of the best curves, and of the others all but the farthest fiftieth on each side.
export function bounds(curves, best, logarithmic) {
  const usable = (value) => typeof value === "number" && (!logarithmic || value > 0);
  const own = best.flatMap(([, values]) => values.filter(usable));
  const all = [];
  for (const [, values] of curves) for (const value of values) if (usable(value)) all.push(value);
  all.sort((one, other) => one - other);
  const cut = all.length > 200 ? Math.floor(all.length / 50) : 0;
  if (!all.length) return logarithmic ? [0.1, 1] : [0, 1];
  let low = all[cut], high = all[all.length - 1 - cut];
  for (const value of own) { low = Math.min(low, value); high = Math.max(high, value); }
  if (logarithmic) return [low / 1.15, high * 1.15];
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
}

// Columns of uPlot: one ascending x for all of the best curves, with the ends of all others.
function columns(curves, best) {
  const places = new Set();
  for (const [times] of best) for (const time of times) places.add(time);
  let first = Infinity, last = -Infinity;
  for (const [times] of curves) if (times.length) { first = Math.min(first, times[0]); last = Math.max(last, times.at(-1)); }
  if (first <= last) { places.add(first); places.add(last); }
  const x = [...places].sort((one, other) => one - other);
  const index = new Map(x.map((place, position) => [place, position]));
  return [x, ...best.map(([times, values]) => {
    const column = new Array(x.length).fill(undefined); // undefined: no value here, and no gap
    times.forEach((time, position) => { column[index.get(time)] = values[position]; });
    return column;
  })];
}

function drawOthers(u, others, logarithmic) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.strokeStyle = ctx.fillStyle = colour("--faint");
  ctx.lineWidth = devicePixelRatio;
  for (const [times, values] of others) {
    ctx.beginPath();
    let drawn = 0, x = 0, y = 0;
    for (let place = 0; place < times.length; place++) {
      const value = values[place];
      if (typeof value !== "number" || (logarithmic && value <= 0)) continue;
      x = u.valToPos(times[place], "x", true);
      y = u.valToPos(value, "y", true);
      if (drawn++) ctx.lineTo(x, y); else ctx.moveTo(x, y);
    }
    if (drawn === 1) ctx.fillRect(x - devicePixelRatio, y - devicePixelRatio, 3 * devicePixelRatio, 3 * devicePixelRatio);
    ctx.stroke();
  }
  ctx.restore();
}

// A chart that is drawn anew by `update`. `read()` returns {curves, best, names, xLabel, yLabel, logY, logX, step, describe},
// where curves and best are lists of [x, values].
export function chart(height, read) {
  const place = el("div", { class: "chart", role: "img" });
  let plot = null, kind = "", shown = null;
  const build = () => {
    const names = shown.names.slice(0, BEST), dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const steps = shown.step ? { paths: uPlot.paths.stepped({ align: 1 }) } : {};
    plot?.destroy();
    place.replaceChildren();
    plot = new uPlot({
      width: Math.max(place.clientWidth, 200), height,
      legend: { show: names.length > 1, live: true },
      cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false, distr: shown.logX ? 3 : 1 },
        y: { distr: shown.logY ? 3 : 1, range: () => bounds(shown.curves, shown.best, shown.logY) } },
      axes: [{ ...axis(shown.xLabel, true), ...(shown.xLabel === "seconds" || shown.logX ? {} : { incrs: WHOLE }) }, axis(shown.yLabel, false)],
      series: [{ label: shown.xLabel, value: (u, value) => number(value) }, ...names.map((label, position) => ({
        label, stroke: colour(`--s${position}`), width: position ? 1.4 : MOST_WIDTH, spanGaps: true,
        points: { show: !shown.step && shown.best[position][0].length < 40, size: 5 }, value: (u, value) => number(value), ...steps }))],
      hooks: { drawAxes: [(u) => drawOthers(u, shown.curves, shown.logY)] },
    }, columns(shown.curves, shown.best), place);
    kind = JSON.stringify([names, shown.xLabel, shown.yLabel, shown.logX, shown.logY, dark, place.clientWidth]);
  };
  const update = () => {
    if (!place.isConnected) return;
    shown = read();
    shown.best = shown.best.slice(0, BEST);
    place.setAttribute("aria-label", shown.describe);
    if (!shown.curves.some(([times]) => times.length)) {
      plot?.destroy();
      plot = null;
      place.replaceChildren(el("p", { class: "quiet" }, `No value of ${shown.yLabel} yet.`));
      return;
    }
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = JSON.stringify([shown.names.slice(0, BEST), shown.xLabel, shown.yLabel, shown.logX, shown.logY, dark, place.clientWidth]);
    if (!plot || now !== kind) build();
    else plot.setData(columns(shown.curves, shown.best), plot.scales.x.min === plot.data[0][0] && plot.scales.x.max === plot.data[0].at(-1));
  };
  new ResizeObserver(() => { if (plot && shown && Math.abs(plot.width - place.clientWidth) > 1) update(); }).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  return { place, update };
}
