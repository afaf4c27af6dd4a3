// The node's numbers: what runs now, memory, bytes, accept lengths, peers, and what went wrong.

import { byId, bytes, count, el, median, plural, render, setText, short, table, time } from "./dom.js";

const RATE_OVER_MS = 5000;

/** Horizontal bars for an object of numbers; `words` writes a number. */
export function bars(numbers, words, share = false) {
  const entries = Object.entries(numbers);
  const most = Math.max(1, ...entries.map(([, n]) => n));
  const sum = entries.reduce((total, [, n]) => total + n, 0) || 1;
  return el("ul", { class: "bars" }, ...entries.map(([name, n]) => {
    const bar = el("i", { class: "amount" });
    bar.style.width = `${(100 * n) / most}%`;
    bar.hidden = n === 0;
    const value = share ? `${words(n)} (${Math.round((100 * n) / sum)} %)` : words(n);
    return el("li", {}, el("span", { class: "bar-name" }, name), el("span", { class: "bar-track" }, bar), el("span", { class: "number" }, value));
  }));
}

/** Tokens per second between answers of the last seconds. */
export class Rate {
  constructor() { this.seen = []; }

  update(total, nowUs) {
    if (this.seen.length && total < this.seen.at(-1).total) this.seen = []; // the node has started anew
    this.seen.push({ total, nowUs });
    while (this.seen.length > 2 && nowUs - this.seen[0].nowUs > RATE_OVER_MS * 1000) this.seen.shift();
    const first = this.seen[0];
    return nowUs > first.nowUs ? ((total - first.total) * 1e6) / (nowUs - first.nowUs) : 0;
  }
}

export function showFigures(state, rooms, tokensPerS) {
  const isDecode = state.node === "decode";
  const ttfts = [...rooms.running, ...rooms.ended].map((record) => record.ttft_us).filter((us) => us !== null);
  const moved = Object.values(state.nbytes).reduce((sum, n) => sum + n, 0);
  const figures = [
    ["Running", count(state.requests.running), "requests"],
    ["Waiting", count(state.requests.waiting), "for memory"],
    ["Prompt tokens", count(state.tokens.prompt), "since the start"],
  ];
  if (isDecode) {
    figures.push(["Generated", count(state.tokens.generated), "tokens since the start"]);
    figures.push(["Speed", `${count(Math.round(tokensPerS))}`, "generated tokens/s"]);
    figures.push(["TTFT", time(ttfts.length ? Math.round(median(ttfts)) : null), ttfts.length ? `median of the last ${ttfts.length}` : "no answer yet"]);
  }
  figures.push([isDecode ? "Received" : "Sent", bytes(moved), `in ${plural(state.pieces, "piece")}`]);
  const list = byId("figures");
  if (list.children.length !== figures.length) {
    list.replaceChildren(...figures.map(() => el("div", {}, el("dt", {}), el("dd", { class: "big" }), el("dd", { class: "quiet" }))));
  }
  figures.forEach((words, i) => words.forEach((each, j) => setText(list.children[i].children[j], each)));
}

export function showBytes(state) {
  const verb = state.node === "decode" ? "received" : "sent";
  const entries = Object.entries(state.nbytes).filter(([, n]) => n > 0);
  render(byId("bytes"), [verb, entries], () => (entries.length
    ? [bars(Object.fromEntries(entries), bytes, true), el("p", { class: "quiet" }, `${verb} since the start, of all rooms`)]
    : el("p", { class: "empty" }, `Nothing ${verb} yet.`)));
}

export function showAcceptLengths(state, info) {
  byId("accept").hidden = state.node !== "decode";
  const lengths = state.accept_lengths;
  render(byId("accept-body"), [lengths, info.spec_tokens], () => {
    const entries = Object.entries(lengths).map(([tokens, steps]) => [Number(tokens), steps]);
    const steps = entries.reduce((sum, [, n]) => sum + n, 0);
    if (!steps) return el("p", { class: "empty" }, info.spec_tokens ? "No step yet." : "This node does not draft: start it with --spec-tokens K.");
    const mean = entries.reduce((sum, [tokens, n]) => sum + tokens * n, 0) / steps;
    const named = Object.fromEntries(entries.map(([tokens, n]) => [plural(tokens, "token"), n]));
    return [bars(named, count, true), el("p", { class: "quiet" }, `${mean.toFixed(2)} tokens a step on average, ${plural(steps, "step")}`)];
  });
}

export function showPeers(state, info) {
  const links = new Map((info?.peers || []).map((peer) => [peer.address ?? (peer.incarnation || "").slice(0, 8), peer]));
  const names = [...new Set([...links.keys(), ...state.peers.map((peer) => peer.peer)])];
  const moved = new Map(state.peers.map((peer) => [peer.peer, peer]));
  render(byId("peers"), [names, [...links.values()], state.peers, info?.local_prefill], () => {
    if (info?.local_prefill) return el("p", { class: "empty" }, "None: this node computes prompts itself (--local-prefill).");
    if (!names.length) return el("p", { class: "empty" }, "No peer has registered yet.");
    const hasTransport = [...links.values()].some((link) => link.transport);
    const rows = names.map((name) => {
      const link = links.get(name);
      const numbers = moved.get(name);
      const link_state = link ? link.state ?? "registered" : "gone";
      const mark = el("span", { class: `state ${link_state === "registered" ? "good" : "bad"}` }, link_state);
      const reason = link && link.state && link.state !== "registered" ? link.reason : "";
      return [name, mark, ...(hasTransport ? [link?.transport ?? "–"] : []), bytes(numbers?.nbytes ?? 0), count(numbers?.pieces ?? 0),
        numbers?.gb_s ? `${numbers.gb_s.toPrecision(2)} GB/s` : "–", reason];
    });
    const heads = [state.node === "decode" ? "Prefill node" : "Decode node", "State", ...(hasTransport ? ["Transport"] : [])];
    return table([...heads, "Bytes", "Pieces", "Speed", ""], rows, [0, 1, 2].map((i) => heads.length + i));
  });
}

export function showFailures(state, rooms) {
  const codes = Object.entries(state.failures).filter(([, n]) => n > 0);
  render(byId("failures"), [codes, state.quarantine, rooms.refused], () => {
    const parts = [];
    if (state.quarantine.length) {
      parts.push(el("h3", {}, "In quarantine: a peer may still write there"),
        table(["Room", "Epoch", "Prefill node", "For", "Code", "Reason"], state.quarantine.map((entry) => [
          short(entry.room), `${entry.epoch}`, entry.prefill, `${entry.seconds.toFixed(1)} s`, entry.code, entry.reason]), [1, 3]));
    }
    if (codes.length) {
      parts.push(el("h3", {}, "By code, since the start"), bars(Object.fromEntries(codes), count));
    }
    if (rooms.refused.length) {
      parts.push(el("h3", {}, "Refused before they had a room"),
        table(["At", "Request", "Code", "Reason"], rooms.refused.slice(0, 8).map((refusal) => [
          new Date(refusal.unix_us / 1000).toLocaleTimeString(), refusal.request_id, refusal.failure.code, refusal.failure.reason])));
    }
    return parts.length ? parts : el("p", { class: "empty" }, "None.");
  });
}
