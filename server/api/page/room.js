// Everything that is known of one room.

import { byId, bytes, count, el, plural, render, setText, table, time } from "./dom.js";
import { isFailed, kindOf, wordsOf } from "./phases.js";
import { bars } from "./figures.js";

export class RoomView {
  constructor() {
    this.room = null;
    byId("room-close").addEventListener("click", () => this.close());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.room !== null && !byId("key").open) this.close();
    });
  }

  /** `nowUs` is the node's wall clock. */
  open(record, nowUs) {
    this.room = record.room;
    this.opener = document.activeElement;
    byId("room").hidden = false;
    this.show(record, nowUs);
    byId("room-title").focus();
    byId("room").scrollIntoView({ block: "nearest" });
  }

  close() {
    this.room = null;
    byId("room").hidden = true;
    if (this.opener?.isConnected) this.opener.focus();
  }

  show(record, nowUs) {
    setText(byId("room-title"), `Room ${record.room}`);
    render(byId("room-body"), record, () => [summary(record), phases(record, nowUs), transfer(record), attempts(record)]);
  }
}

function summary(record) {
  const { tokens } = record;
  const facts = [
    ["Request", record.request_id],
    ["State", record.phase === null ? record.outcome : wordsOf(record.phase)],
    ["TTFT", time(record.ttft_us)],
    ["Total", time(record.total_us)],
    ["Prompt", plural(tokens.prompt, "token")],
  ];
  if (record.node === "decode") facts.push(["Generated", `${count(tokens.generated)} of at most ${plural(tokens.max_new, "token")}`]);
  if (tokens.proposed) facts.push(["Drafts", `${count(tokens.accepted)} of ${count(tokens.proposed)} accepted`]);
  const list = el("dl", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value ?? "–"))));
  if (!isFailed(record)) return list;
  const { code, component, reason } = record.failure;
  return el("div", {}, el("p", { class: "bad" }, `${code}${component ? ` (${component})` : ""}: ${reason}`), list);
}

function phases(record, nowUs) {
  const total = Math.max(1, record.total_us ?? nowUs - record.began_unix_us);
  const retried = record.phases.some((phase) => phase.attempt > 1);
  let isAfterFirst = false;
  const rows = record.phases.map((phase) => {
    const bar = el("i", { class: `bar ${kindOf(phase.name)}` });
    bar.style.left = `${(100 * phase.start_us) / total}%`;
    bar.style.width = `${(100 * ((phase.end_us ?? total) - phase.start_us)) / total}%`;
    const ends = record.ttft_us !== null && !isAfterFirst && phase.end_us === record.ttft_us;
    isAfterFirst ||= ends;
    const name = retried ? `${wordsOf(phase.name)} (attempt ${phase.attempt})` : wordsOf(phase.name);
    return [name, phase.node, phase.end_us === null ? "runs" : time(phase.end_us - phase.start_us),
      ends ? `TTFT ${time(record.ttft_us)}` : "", el("div", { class: "track" }, bar)];
  });
  const parts = [table(["Phase", "Clock of", "Took", "Sum", ""], rows, [2, 3])];
  if (record.clocks) {
    parts.push(el("p", { class: "quiet" },
      `Where the prefill node's phases lie is uncertain by ${time(record.clocks.uncertainty_us)}: two clocks, joined by the times of messages.`));
  }
  return el("div", { class: "phases" }, ...parts);
}

function transfer(record) {
  const moved = record.transfer;
  if (!moved) return null;
  const n = Object.values(moved.nbytes).reduce((sum, nbytes) => sum + nbytes, 0);
  const pieces = Object.values(moved.pieces).reduce((sum, each) => sum + each, 0);
  const speed = moved.gb_s === null ? "" : `, ${moved.gb_s.toPrecision(2)} GB/s while writing`;
  return el("div", {}, el("h3", {}, `${bytes(n)} in ${plural(pieces, "piece")}${speed}`), bars(moved.nbytes, bytes));
}

function attempts(record) {
  const rows = record.attempts.map((attempt) => [`${attempt.epoch}`, attempt.peer, attempt.slot === null ? "–" : `${attempt.slot}`,
    `${attempt.n_pages}`, attempt.failure ? `${attempt.failure.code}: ${attempt.failure.reason}` : ""]);
  return rows.length ? table(["Epoch", "Peer", "Slot", "Pages", "Failure"], rows, [0, 2, 3]) : null;
}
