// Asks the node once a second while the page can be seen, and shows what it answers.

import { byId, setText } from "./dom.js";
import { getJson, onKeyNeeded } from "./http.js";
import { Chat } from "./chat.js";
import { Lanes } from "./lanes.js";
import { MemoryMaps } from "./memory.js";
import { RoomView } from "./room.js";
import { Rate, showAcceptLengths, showBytes, showFailures, showFigures, showPeers } from "./figures.js";

const POLL_MS = 1000;
const SELDOM = 3; // polls between two looks at what changes seldom
const MOVE_MS = 100;
const LIMIT = 32;

const room = new RoomView();
const lanes = new Lanes((record) => room.open(record, nowUs()));
const maps = new MemoryMaps();
const rate = new Rate();
const chat = new Chat((id) => openRoom(id));
let info = null;
let nPolls = 0;
let clock = null; // the node's wall clock at one reading of this page's
let lastAnswer = null;

const nowUs = () => clock.unixUs + 1000 * (performance.now() - clock.at);

async function poll() {
  if (!info || nPolls % SELDOM === 0 || byId("status").dataset.level !== "good") {
    info = await getJson("server_info");
    getJson("ready").then(() => showStatus("good", "ready"), (error) => showStatus("bad", `not ready: ${error.message}`));
  }
  nPolls += 1;
  const [rooms, state] = await Promise.all([getJson(`rooms?limit=${LIMIT}`), getJson("state")]);
  clock = { unixUs: state.unix_us, at: performance.now() };
  lastAnswer = Date.now();
  show(rooms, state);
  if (room.room !== null) await showRoom();
}

function show(rooms, state) {
  byId("main").hidden = false;
  document.body.dataset.node = state.node;
  document.title = `${state.node} · ${info.served_model_name}`;
  setText(byId("role"), `${state.node === "decode" ? "Decode" : "Prefill"} node`);
  const drafts = info.spec_tokens ? `${info.spec_tokens} draft tokens a step` : null;
  setText(byId("model"), [info.served_model_name, info.dtype, info.kernels, `context ${info.max_context.toLocaleString("en")} tokens`, drafts]
    .filter(Boolean).join(" · "));
  showFigures(state, rooms, rate.update(state.tokens.generated, state.unix_us));
  lanes.update(rooms, nowUs());
  maps.update(state, info);
  showBytes(state);
  showAcceptLengths(state, info);
  showPeers(state, info);
  showFailures(state, rooms);
  if (state.node === "decode") chat.show(info);
}

async function showRoom() {
  try {
    room.show(await getJson(`rooms/${room.room}`), nowUs());
  } catch (error) {
    if (error.status !== 404) throw error; // it is kept no longer: what is shown stays
  }
}

async function openRoom(id) {
  try {
    room.open(await getJson(`rooms/${encodeURIComponent(id)}`), nowUs());
  } catch (error) {
    showStatus("bad", error.message);
  }
}

function showStatus(level, words) {
  byId("status").dataset.level = level;
  setText(byId("status"), words);
  document.body.classList.toggle("stale", level === "gone");
}

async function pollForEver() {
  for (;;) {
    if (document.hidden) await new Promise((seen) => document.addEventListener("visibilitychange", seen, { once: true }));
    try {
      await poll();
      if (document.body.classList.contains("stale")) nPolls = 0;
      document.body.classList.remove("stale");
    } catch (error) {
      const since = lastAnswer ? ` since ${new Date(lastAnswer).toLocaleTimeString()}` : "";
      showStatus("gone", error.status ? error.message : `no answer${since}; trying again`);
      info = null;
    }
    await new Promise((after) => setTimeout(after, POLL_MS));
  }
}

function askForKey(wasWrong) {
  const dialog = byId("key");
  byId("key-wrong").hidden = !wasWrong;
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const { value } = byId("key-text");
      byId("key-text").value = "";
      dialog.close();
      resolve(value);
    }, { once: true });
  });
}

onKeyNeeded(askForKey);
byId("key").addEventListener("cancel", (event) => event.preventDefault()); // without the key there is nothing behind it
if (!matchMedia("(prefers-reduced-motion: reduce)").matches) {
  setInterval(() => { if (!document.hidden && clock && lanes.anyRuns && !document.body.classList.contains("stale")) lanes.draw(nowUs()); }, MOVE_MS);
}
pollForEver();
