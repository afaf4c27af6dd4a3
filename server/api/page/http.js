// Requests to this node, with its key where it wants one.

const TIMEOUT_MS = 8000;

let key = "";
let askForKey = async () => "";
let asking = null;

/** `ask(wasWrong)` resolves to a key from the user. */
export function onKeyNeeded(ask) { askForKey = ask; }

/** An answer that is no success: `status`, and what the server says of it. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message || `the node answered ${status}`);
    this.status = status;
    this.code = error?.code || "";
    this.room = error?.room || "";
    this.component = error?.component || "";
  }
}

/**
 * Like `fetch`; asks for the key and tries again where the node wants one. Paths are relative to the page. With
 * `timeoutMs` each try has so long, and the user all the time that a key takes.
 */
export async function request(path, options = {}, timeoutMs = null) {
  for (;;) {
    const sent = key;
    const headers = { ...options.headers, ...(sent ? { authorization: `Bearer ${sent}` } : {}) };
    const signal = timeoutMs === null ? options.signal : AbortSignal.timeout(timeoutMs);
    const answer = await fetch(path, { ...options, headers, signal, cache: "no-store", credentials: "same-origin" });
    if (answer.status !== 401) return answer;
    if (sent !== key) continue; // another request has got a key meanwhile
    asking ??= askForKey(sent !== "").finally(() => { asking = null; });
    key = await asking;
  }
}

export async function refusedBy(answer) {
  let error = null;
  try { error = (await answer.json()).error; } catch { /* a proxy's page, or nothing */ }
  return new Refused(answer.status, error);
}

export async function getJson(path) {
  const answer = await request(path, {}, TIMEOUT_MS);
  if (!answer.ok) throw await refusedBy(answer);
  return answer.json();
}
