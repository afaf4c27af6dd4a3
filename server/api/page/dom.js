// Elements and numbers. Text only ever becomes text: nothing here makes HTML of a string.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`class`, `title`, ...) and children: elements, or text. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets what differs only, so that a reader's selection and a screen reader are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Replaces the children, unless `key`, which says what they were made from, is as it was. */
export function render(element, key, make) {
  const text = typeof key === "string" ? key : JSON.stringify(key);
  if (element.dataset.key === text) return;
  element.dataset.key = text;
  element.replaceChildren(...[make()].flat());
}

export function table(heads, rows, numeric = []) {
  const cells = (tag, row) => row.map((cell, i) => el(tag, { class: numeric.includes(i) ? "number" : null, ...(tag === "th" ? { scope: "col" } : {}) }, cell));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...cells("th", heads))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...cells("td", row))))));
}

const NO_NUMBER = "–";

export function count(n) {
  if (n === null || n === undefined) return NO_NUMBER;
  return n < 1e6 ? n.toLocaleString("en") : `${(n / 1e6).toFixed(2)} M`;
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function bytes(n) {
  if (n === null || n === undefined) return NO_NUMBER;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
  return `${i === 0 || n >= 100 ? Math.round(n) : n.toPrecision(3)} ${units[i]}`;
}

/** Microseconds as a time with three digits. */
export function time(us) {
  if (us === null || us === undefined) return NO_NUMBER;
  if (us < 1000) return `${us} µs`;
  if (us < 999500) return `${(us / 1000).toPrecision(3)} ms`;
  const s = us / 1e6;
  if (s < 600) return s < 100 ? `${s.toPrecision(3)} s` : `${Math.round(s)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** The end of a room's id is what differs. */
export const short = (id) => (id && id.length > 8 ? `…${id.slice(-7)}` : id || NO_NUMBER);
