// Slots and pages, a cell each, in the colour of their state.

import { byId, count, el, setText } from "./dom.js";

const STATES = { ".": "free", K: "cached", S: "shared", R: "reserved", C: "committed", Q: "quarantined" };
const GAP = 2;
const SIDES = [16, 14, 12, 10, 8, 6, 5, 4];
const MAX_HEIGHT = 132;

export class MemoryMaps {
  constructor() {
    this.maps = [new CellMap("Pages", "pages"), new CellMap("Slots", "slots")];
    byId("memory").append(...this.maps.map((map) => map.element));
    new ResizeObserver(() => this.maps.forEach((map) => map.draw())).observe(byId("memory"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.maps.forEach((map) => map.draw(true)));
  }

  update(state, info) {
    this.maps.forEach((map) => map.update(state[map.field], info));
  }
}

class CellMap {
  constructor(title, field) {
    this.field = field;
    this.cells = "";
    this.title = el("h3", {}, title);
    this.words = title;
    this.canvas = el("canvas", { role: "img" });
    this.under = el("p", { class: "quiet", "aria-hidden": "true" });
    this.counts = el("ul", { class: "legend" }, ...Object.values(STATES).map((state) => el("li", {}, el("i", { class: `swatch ${state}` }), el("span", {}))));
    this.element = el("div", {}, this.title, this.counts, this.canvas, this.under);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => setText(this.under, this.about ?? ""));
  }

  update({ counts, cells, per_cell }, info) {
    const total = Object.values(counts).reduce((sum, n) => sum + n, 0);
    const size = this.field === "pages" && info ? ` of ${count(info.page_size)} tokens` : "";
    setText(this.title, `${count(total)} ${this.field}${size}`);
    Object.values(STATES).forEach((state, i) => setText(this.counts.children[i].lastChild, `${count(counts[state] ?? 0)} ${state}`));
    this.canvas.setAttribute("aria-label", `${this.words}: ${Object.entries(counts).map(([state, n]) => `${n} ${state}`).join(", ")}`);
    this.perCell = per_cell;
    this.about = per_cell > 1 ? `${count(per_cell)} ${this.field} a cell` : "";
    if (cells !== this.cells) {
      this.cells = cells;
      this.draw(true);
    }
    if (!this.canvas.matches(":hover")) setText(this.under, this.about);
  }

  draw(isAnew = false) {
    const width = this.element.clientWidth;
    if (!width || !this.cells || (!isAnew && width === this.width)) return;
    this.width = width;
    const ratio = devicePixelRatio || 1;
    const rowsOf = (side) => Math.ceil(this.cells.length / Math.floor((width + GAP) / (side + GAP)));
    this.side = SIDES.find((side) => rowsOf(side) * (side + GAP) <= MAX_HEIGHT) ?? SIDES.at(-1);
    this.columns = Math.floor((width + GAP) / (this.side + GAP));
    const height = rowsOf(this.side) * (this.side + GAP) - GAP;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    this.canvas.style.height = `${height}px`;
    const style = getComputedStyle(this.element);
    const colours = Object.fromEntries(Object.entries(STATES).map(([letter, state]) => [letter, style.getPropertyValue(`--${state}`)]));
    const drawing = this.canvas.getContext("2d");
    drawing.scale(ratio, ratio);
    [...this.cells].forEach((letter, i) => {
      drawing.fillStyle = colours[letter] ?? colours["."];
      const x = (i % this.columns) * (this.side + GAP);
      const y = Math.floor(i / this.columns) * (this.side + GAP);
      drawing.fillRect(x, y, this.side, this.side);
    });
  }

  point(event) {
    const step = this.side + GAP;
    const i = Math.floor(event.offsetY / step) * this.columns + Math.floor(event.offsetX / step);
    const letter = this.cells[i];
    if (letter === undefined || event.offsetX / step >= this.columns) return setText(this.under, this.about);
    const first = 1 + i * this.perCell;
    const name = this.field.slice(0, -1);
    const words = this.perCell > 1 ? `${this.field} ${first} to ${first + this.perCell - 1}` : `${name} ${first}`;
    return setText(this.under, `${words}: ${STATES[letter]}`);
  }
}
