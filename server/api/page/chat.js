// The chat box of a decode node: a conversation that lives in this page only.

import { byId, count, el, plural, setText, time } from "./dom.js";
import { Refused, refusedBy, request } from "./http.js";
import { events } from "./sse.js";

export class Chat {
  /** `onRoom(id)` shows a room. */
  constructor(onRoom) {
    this.onRoom = onRoom;
    this.messages = [];
    this.running = null;
    const text = byId("chat-text");
    byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    });
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  show(info) {
    this.model = info.served_model_name;
    byId("chat-thinking").hidden = !info.can_think;
    byId("chat").hidden = byId("to-chat").hidden = false;
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    byId("chat-log").replaceChildren();
  }

  async send() {
    const content = byId("chat-text").value.trim();
    if (!content || this.running) return;
    byId("chat-text").value = "";
    const { messages } = this; // those of before, if it is cleared meanwhile
    messages.push({ role: "user", content });
    this.append(el("div", { class: "said user" }, content));
    const answer = new Answer(this.onRoom);
    this.append(answer.element);
    this.running = new AbortController();
    this.setBusy(true);
    try {
      await this.stream(messages, answer);
      answer.end("");
    } catch (error) {
      answer.end(error.name === "AbortError" ? "stopped" : "failed", error);
    }
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else messages.pop(); // a question without an answer is not asked again with the next one
    this.running = null;
    this.setBusy(false);
  }

  async stream(messages, answer) {
    const body = {
      model: this.model, messages, stream: true, stream_options: { include_usage: true },
      max_tokens: Number(byId("chat-tokens").value) || 64, temperature: Number(byId("chat-temperature").value) || 0,
    };
    if (byId("chat-think").checked && !byId("chat-thinking").hidden) body.thinking = { type: "enabled" };
    const reply = await request("v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: this.running.signal,
    });
    if (!reply.ok) throw await refusedBy(reply);
    for await (const data of events(reply.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(reply.status, chunk.error);
      const isAtEnd = this.isAtEnd();
      answer.take(chunk);
      if (isAtEnd) this.scroll();
    }
    throw new Error("the stream ended too early");
  }

  append(element) {
    byId("chat-log").append(element);
    this.scroll();
  }

  isAtEnd() {
    const log = byId("chat-log");
    return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  }

  scroll() { byId("chat-log").scrollTop = byId("chat-log").scrollHeight; }

  setBusy(isBusy) {
    byId("chat-stop").disabled = !isBusy;
    byId("chat-send").disabled = isBusy;
  }
}

class Answer {
  constructor(onRoom) {
    this.onRoom = onRoom;
    this.began = performance.now();
    this.text = "";
    this.calls = [];
    this.thought = el("div", { class: "thought-text" });
    this.thinking = el("details", { class: "thought", open: true, hidden: true }, el("summary", {}, "Thinking"), this.thought);
    this.said = el("div", { class: "said-text" });
    this.tools = el("div", {});
    this.proof = el("p", { class: "proof quiet" }, "waiting for the first token …");
    this.element = el("div", { class: "said assistant" }, this.thinking, this.said, this.tools, this.proof);
  }

  take(chunk) {
    if (chunk.pd) this.pd = chunk.pd;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const { content, tool_calls: calls } = choice.delta ?? {};
    const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
    if (!content && !thought && !calls) return;
    this.firstAt ??= performance.now();
    this.lastAt = performance.now();
    if (thought) { this.thinking.hidden = false; this.thought.append(thought); }
    if (content) { this.said.append(this.text ? content : content.trimStart()); this.text += content; }
    for (const call of calls ?? []) this.takeCall(call);
    setText(this.proof, `TTFT ${this.ttft}`);
  }

  takeCall({ index, function: part }) {
    this.calls[index] ??= { name: "", text: "", element: this.tools.appendChild(el("pre", { class: "call" })) };
    const call = this.calls[index];
    call.name += part?.name ?? "";
    call.text += part?.arguments ?? "";
    setText(call.element, `${call.name}(${call.text})`);
  }

  get ttft() { return time(Math.round(1000 * (this.firstAt - this.began))); }

  /** `how` is empty for an answer that is whole, else `stopped` or `failed`. */
  end(how, error = null) {
    const parts = [];
    if (this.pd?.prefill) parts.push(`prefill ${this.pd.prefill}`);
    if (this.firstAt) parts.push(`TTFT ${this.ttft}`, `total ${time(Math.round(1000 * (performance.now() - this.began)))}`);
    if (this.usage) parts.push(this.tokens());
    if (how) parts.push(how);
    else if (this.finish && this.finish !== "stop") parts.push(`ended by ${this.finish}`);
    this.proof.replaceChildren(parts.join(" · "));
    const room = this.pd?.room ?? error?.room;
    if (room) {
      const link = el("button", { type: "button", class: "link" }, `room ${room}`);
      link.addEventListener("click", () => this.onRoom(room));
      this.proof.append(parts.length ? " · " : "", link);
    }
    if (how === "failed") this.said.after(el("p", { class: "bad" }, `${error.component ? `${error.component}: ` : ""}${error.message}`));
  }

  tokens() {
    const details = this.usage.completion_tokens_details ?? {};
    const accepted = details.accepted_prediction_tokens ?? 0;
    const drafts = accepted + (details.rejected_prediction_tokens ?? 0);
    const words = `${count(this.usage.prompt_tokens)} → ${plural(this.usage.completion_tokens, "token")}`;
    return drafts ? `${words}, ${count(accepted)} of ${plural(drafts, "draft")} accepted` : words;
  }
}
