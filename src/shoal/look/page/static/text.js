// Elements and texts. All text of a study becomes a text node, so none of it can be markup.

export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, properties, children);
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(element, attributes, children);
  return element;
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

// Replaces children unless they look the same: a replaced button loses its focus, and a click that has begun.
export function refill(place, ...children) {
  const fresh = place.cloneNode(false);
  fresh.append(...children);
  if (!fresh.isEqualNode(place)) place.replaceChildren(...fresh.childNodes);
}

export function width(element, percent) {
  element.style.width = `${percent}%`; // by CSSOM: the policy of the page allows no style attributes
  return element;
}

// The last line of a traceback, or a reason of one line as it is; the path of a log that follows is left out.
export function lastLine(reason) {
  return reason.trim().split("\n").filter((line) => !line.startsWith("Log: ")).at(-1) ?? "";
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return typeof value === "string" ? value : JSON.stringify(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(Number(value.toPrecision(4)));
}

// A value with its standard error, where that is known: "1.52 ± 0.014".
export function withError(value, error) {
  return error === undefined ? number(value) : `${number(value)} ± ${Number(error.toPrecision(2))}`;
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

export function duration(seconds) {
  const whole = Math.round(seconds);
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return `${parts[0]}:${String(parts[1]).padStart(2, "0")}:${String(parts[2]).padStart(2, "0")}`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"], power = count < 1000 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(count) / 3));
  return `${power ? (count / 1000 ** power).toPrecision(3) : count} ${units[power]}`;
}

export function moment(seconds) {
  const two = (value) => String(value).padStart(2, "0");
  const date = new Date(1000 * seconds);
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function numbers(list) {
  const shown = [...list].sort((one, other) => one - other).slice(0, 12).join(", ");
  return list.length > 12 ? `${shown}, … (${list.length})` : shown;
}

export function flatten(config, prefix = "", found = {}) {
  for (const [name, value] of Object.entries(config)) {
    const nested = value !== null && typeof value === "object" && !Array.isArray(value);
    if (nested) flatten(value, `${prefix}${name}.`, found);
    else found[prefix + name] = value;
  }
  return found;
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}
