// The jobs of every device over time, as SVG.
import { bytes, el, duration, numbers, svg } from "./text.js";

// What a job of each purpose does, before "trials 1, 2".
export const JOB_VERBS = { train: "trains", signature: "compares", profile: "measures", assist: "helps with" };
const LANE = 16, GAP = 10, FOOT = 26, NARROW = 600, STRIP = 24;

function kindOf(bar, structure) {
  if (bar.purpose !== "train") return "f-measure";
  return structure >= 0 && structure < 8 ? `f${structure}` : "f-other";
}

// The structures of a bar from top to bottom: those of its arrays where there is room for them, else the first.
function layers(overview, bar, thickness) {
  const names = Object.keys(bar.arrays);
  if (names.length < 2 || thickness / names.length < 3) return [bar.structure];
  return names.map((name) => overview.structures.indexOf(name));
}

function describe(bar) {
  const arrays = Object.entries(bar.arrays).map(([name, trials]) => `\n${name}: trials ${numbers(trials)}`).join("");
  const doing = JOB_VERBS[bar.purpose] ?? bar.purpose;
  const outcome = bar.runs ? "still runs" : bar.outcome;
  return `${bar.job} ${doing} trials ${numbers(bar.trials)}\n${duration(bar.begin)} to ${duration(bar.end)}, ${outcome}${arrays}`;
}

// Bars of a lane that are thinner than a pixel and touch are drawn as one.
function merged(bars, scale) {
  const found = [];
  for (const bar of bars) {
    const last = found.at(-1);
    const thin = last && (bar.end - bar.begin) * scale < 1 && (last.end - last.begin) * scale < 1.5;
    if (thin && last.lane === bar.lane && (bar.begin - last.end) * scale < 1 && !bar.failed) {
      found[found.length - 1] = { ...last, end: Math.max(last.end, bar.end), more: (last.more ?? 1) + 1 };
    } else found.push(bar);
  }
  return found;
}

function timeAxis(scale, total, top, across, left) {
  const rough = (total * 70) / across;
  const step = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400].find((each) => each >= rough) ?? 172800;
  const marks = [];
  for (let at = 0; at <= total; at += step) {
    const x = left + at * scale;
    marks.push(svg("line", { x1: x, x2: x, y1: 0, y2: top, stroke: "var(--line)" }));
    if (x + 50 < left + across) marks.push(svg("text", { x: x + 2, y: top + 16 }, duration(at)));
  }
  return marks;
}

// A slot of CPU cores, of which nothing is measured.
function isCpu(device) {
  return /(^|[/:])cpu:\d+$/.test(device.device);
}

// The measured use of a GPU below its jobs: filled, the share of the time with a running kernel; the line, memory in use.
function utilisation(overview, device, left, top, inner) {
  const measured = overview.telemetry[device.device] ?? [], scale = inner / overview.total;
  if (!measured.length) return isCpu(device) ? [] : [svg("text", { class: "unmeasured", x: left, y: top + 10 }, "use of the GPU: not measured")];
  const steps = (place) => {
    const runs = [];
    measured.forEach((row, index) => {
      if (row[place] === null) return;
      const end = measured[index + 1]?.[0] ?? overview.total, y = top + STRIP * (1 - Math.min(row[place], 1));
      const last = runs.at(-1), from = left + row[0] * scale, to = left + end * scale;
      if (last && Math.abs(last.to - from) < 0.01) { last.d += `V${y.toFixed(1)}H${to.toFixed(1)}`; last.to = to; }
      else runs.push({ from, to, d: `M${from.toFixed(1)} ${y.toFixed(1)}H${to.toFixed(1)}` });
    });
    return runs;
  };
  const bottom = top + STRIP, kernels = steps(1);
  const filled = kernels.map((run) => `${run.d}V${bottom}H${run.from.toFixed(1)}Z`).join("");
  const said = `${device.device}: ${kernels.length ? `a kernel ran for ${Math.round(100 * (device.kernels ?? 0))} % of the time` : "kernels were not measured"}; ` +
    (device.memory_in_use ? `at most ${bytes(device.memory_in_use)} in use` : "memory was not measured");
  return [svg("rect", { class: "lane", x: left, y: top, width: inner, height: STRIP }), svg("text", { x: 0, y: top + 15 }, "measured"),
    svg("path", { class: "kernels", d: filled }, svg("title", {}, said)),
    svg("path", { class: "memory", d: steps(2).map((run) => run.d).join("") }, svg("title", {}, said))];
}

export function timeline(overview, across, zoom) {
  const left = across < NARROW ? 80 : 130;
  const width = Math.max(across, 260) * zoom, inner = width - left - 8;
  const scale = inner / overview.total;
  const rows = [], own = new Map(overview.devices.map((device) => [device.device, []]));
  for (const bar of overview.bars) own.get(bar.device)?.push(bar);
  let top = 4;
  for (const device of overview.devices) {
    const bars = own.get(device.device);
    const lanes = Math.max(1, ...bars.map((bar) => bar.lanes)), height = Math.max(lanes * LANE, 30);
    const thickness = height / lanes;
    rows.push(svg("rect", { class: "lane", x: left, y: top, width: inner, height }));
    rows.push(svg("text", { x: 0, y: top + 13 }, device.device), svg("text", { x: 0, y: top + 28 }, `jobs ${Math.round(100 * device.busy)} %`));
    for (const bar of merged([...bars].sort((one, other) => one.lane - other.lane || one.begin - other.begin), scale)) {
      const x = left + bar.begin * scale, y = top + bar.lane * thickness;
      const arrays = layers(overview, bar, thickness - 2), part = (thickness - 2) / arrays.length;
      rows.push(svg("g", { class: "job" }, svg("title", {}, bar.more ? `${bar.more} jobs` : describe(bar)),
        arrays.map((structure, layer) => svg("rect", { class: kindOf(bar, structure), x, y: y + 1 + layer * part, rx: arrays.length > 1 ? 0 : 2,
          width: Math.max((bar.end - bar.begin) * scale, 1), height: part }))));
      if (bar.failed) {
        const end = left + bar.end * scale, middle = y + thickness / 2;
        rows.push(svg("path", { class: "failed", d: `M${end - 4} ${middle - 4}l8 8m0 -8l-8 8` }, svg("title", {}, describe(bar))));
      }
    }
    rows.push(...utilisation(overview, device, left, top + height + 3, inner));
    top += height + 3 + (overview.telemetry[device.device]?.length ? STRIP : isCpu(device) ? 0 : 12) + GAP;
  }
  for (const at of overview.resumes) {
    const x = left + at * scale;
    rows.push(svg("line", { class: "resume", x1: x, x2: x, y1: 0, y2: top }, svg("title", {}, "the study was resumed here")));
  }
  const picture = svg("svg", { class: "timeline", width, height: top + FOOT, role: "img",
    "aria-label": `${overview.bars.length} jobs on ${overview.devices.length} devices in ${duration(overview.total)}` },
    timeAxis(scale, overview.total, top, inner, left), rows);
  return el("div", { class: "scroll", tabindex: 0 }, picture);
}

export function timelineLegend(overview) {
  const entries = overview.structures.slice(0, 8).map((name, position) => [`f${position}`, name]);
  if (overview.structures.length > 8) entries.push(["f-other", `${overview.structures.length - 8} more structures`]);
  if (Object.values(overview.telemetry).some((rows) => rows.length)) entries.push(["f-kernels", "measured: a kernel runs"], ["f-memory", "measured: memory in use"]);
  if (overview.bars.some((bar) => bar.purpose !== "train")) entries.push(["f-measure", "compares models, measures, or helps a job of another device"]);
  return entries;
}
