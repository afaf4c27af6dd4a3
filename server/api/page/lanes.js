// Rooms as bars on one time axis: where each of them is, and where its time went.

import { byId, count, el, render, short, time } from "./dom.js";
import { KINDS, isFailed, kindOf, wordsOf } from "./phases.js";

const WINDOWS_S = [0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600];
const MAX_LANES = 16;
const LEAST_RUNNING_S = 10; // the least of the time axis where rooms run
const BESIDE_RUNNING_S = 9; // rooms that ended so long ago are shown beside those that run
const LAST_S = 60; // where none runs: rooms that ended so long before the last one
const SHRINK = 4;
const N_TICKS = 4;

export class Lanes {
  /** `onOpen(record)` is called for the lane that was chosen. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.rows = new Map();
    this.records = [];
    this.windowS = WINDOWS_S[0];
  }

  get anyRuns() { return this.records.some((record) => record.phase !== null); }

  /** Takes the newest records; `nowUs` is the node's wall clock. */
  update(list, nowUs) {
    const runs = list.running.length > 0;
    const right = runs ? nowUs : Math.max(...list.ended.map(endOf));
    const oldest = right - 1e6 * (runs ? BESIDE_RUNNING_S : LAST_S);
    const ended = list.ended.filter((record) => endOf(record) >= oldest);
    this.records = [...list.running, ...ended].slice(0, MAX_LANES).sort((a, b) => b.began_unix_us - a.began_unix_us);
    const kinds = KINDS.filter(([, , onBoth]) => onBoth || list.node === "decode");
    render(byId("legend"), list.node, () => kinds.map(([kind, words]) => el("li", {}, el("i", { class: `swatch ${kind}` }), words)));
    const lanes = byId("lanes");
    const rows = this.records.map((record) => this.row(record));
    const kept = new Set(rows);
    for (const [id, row] of this.rows) if (!kept.has(row)) this.rows.delete(id);
    if (rows.length !== lanes.children.length || rows.some((row, i) => lanes.children[i] !== row.element)) {
      lanes.replaceChildren(...rows.map((row) => row.element));
    }
    byId("lanes-empty").hidden = rows.length > 0;
    byId("axis").hidden = byId("legend").hidden = rows.length === 0;
    this.draw(nowUs);
  }

  row(record) {
    const id = `${record.room}/${record.began_unix_us}`;
    let row = this.rows.get(id);
    if (!row) {
      row = new Row(() => this.onOpen(row.record));
      this.rows.set(id, row);
    }
    row.update(record);
    return row;
  }

  /** Moves the bars to where they are at `nowUs`. Where nothing runs, time stands at the last end. */
  draw(nowUs) {
    if (!this.records.length) return;
    const runs = this.records.filter((record) => record.phase !== null);
    const right = runs.length ? nowUs : Math.max(...this.records.map(endOf));
    const first = Math.min(...(runs.length ? runs : this.records).map((record) => record.began_unix_us));
    const neededS = Math.max((1.02 * (right - first)) / 1e6, runs.length ? LEAST_RUNNING_S : 0);
    const fitting = WINDOWS_S.find((s) => s >= neededS) || WINDOWS_S.at(-1);
    if (neededS > this.windowS || fitting * SHRINK <= this.windowS || !runs.length) this.windowS = fitting;
    const left = right - this.windowS * 1e6;
    for (const record of this.records) this.rows.get(`${record.room}/${record.began_unix_us}`).draw(left, right, nowUs);
    this.drawAxis(runs.length > 0);
  }

  drawAxis(runs) {
    const axis = byId("axis");
    const key = `${this.windowS}/${runs}`;
    if (axis.dataset.key === key) return;
    axis.dataset.key = key;
    axis.replaceChildren(...Array.from({ length: N_TICKS + 1 }, (_, i) => {
      const words = i === N_TICKS ? (runs ? "now" : "last end") : `−${plainTime(this.windowS * (1 - i / N_TICKS))}`;
      const tick = el("span", {}, words);
      tick.style.left = `${(100 * i) / N_TICKS}%`;
      return tick;
    }));
  }
}

const plainTime = (s) => (s < 1 ? `${Math.round(1000 * s)} ms` : s < 120 ? `${+s.toFixed(2)} s` : `${+(s / 60).toFixed(1)} min`);
const endOf = (record) => record.began_unix_us + (record.total_us ?? 0);

class Row {
  constructor(open) {
    this.label = el("button", { type: "button", class: "lane-id" });
    this.label.addEventListener("click", open);
    this.state = el("span", { class: "lane-state" });
    this.track = el("div", { class: "track", "aria-hidden": "true" });
    this.facts = el("span", { class: "lane-facts" });
    this.element = el("div", { class: "lane", role: "listitem" }, this.label, this.state, this.track, this.facts);
    this.bars = [];
  }

  update(record) {
    this.record = record;
    this.label.textContent = short(record.room);
    this.label.title = `Room ${record.room}, request ${record.request_id}`;
    this.element.classList.toggle("runs", record.phase !== null);
    this.element.classList.toggle("failed", isFailed(record));
    this.state.textContent = record.phase ?? record.outcome ?? "";
    this.state.title = record.failure?.reason ?? "";
    const { prompt, generated } = record.tokens;
    const facts = record.node === "decode" ? `${count(prompt)} → ${count(generated)} tokens` : `${count(prompt)} tokens`;
    this.facts.textContent = record.ttft_us === null ? facts : `TTFT ${time(record.ttft_us)} · ${facts}`;
    if (this.bars.length !== record.phases.length) {
      this.bars = record.phases.map((phase) => el("i", { class: `bar ${kindOf(phase.name)}` }));
      this.track.replaceChildren(...this.bars);
    }
    record.phases.forEach((phase, i) => {
      const length = phase.end_us === null ? "" : `, ${time(phase.end_us - phase.start_us)}`;
      this.bars[i].title = `${wordsOf(phase.name)} (${phase.node} node${length})`;
    });
  }

  draw(left, right, nowUs) {
    const { began_unix_us: began, phases } = this.record;
    const scale = 100 / (right - left);
    phases.forEach((phase, i) => {
      const end = phase.end_us === null ? nowUs : began + phase.end_us;
      const from = Math.max(0, (began + phase.start_us - left) * scale);
      const to = Math.min(100, (end - left) * scale);
      this.bars[i].hidden = to <= 0 || to < from;
      this.bars[i].style.left = `${from.toFixed(3)}%`;
      this.bars[i].style.width = `${Math.max(0, to - from).toFixed(3)}%`;
    });
  }
}
