// What the phases of a room are, in the words and colours of this page. docs/rooms.md has them all.

/** Kinds of phases, their words, and whether a prefill node has them. */
export const KINDS = [
  ["wait", "waits", true],
  ["message", "read, or message on its way", true],
  ["prefill", "prefill", true],
  ["transfer", "transfer", true],
  ["check", "check, first token", false],
  ["decode", "decode", false],
];

const KIND_OF = {
  receive: "message", pair: "wait", queue: "wait", reserve: "message", prefill_queue: "wait", prefill: "prefill",
  transfer: "transfer", done: "message", verify: "check", commit: "message", first_token: "check", decode: "decode",
};
const WORDS = {
  receive: "read and tokenized", pair: "waits for its other half", queue: "waits for memory on the decode node",
  reserve: "Reserve on its way", prefill_queue: "waits for memory on the prefill node", prefill: "prefill",
  transfer: "the rest is transferred", done: "Done on its way", verify: "state is checked",
  commit: "Done waits for its answer", first_token: "first token", decode: "decode",
};

export const kindOf = (name) => KIND_OF[name] || "message";
export const wordsOf = (name) => WORDS[name] || name;

/** Whether a room ended as it should: its outcome is no failure. */
export const isFailed = (record) => record.failure !== null && record.failure !== undefined;
