// The server as the page sees it: one streamed request at a time, the status, and what can go wrong with either.
//
// Every failure is a `Failure` with a kind; `advice` says what a person can do about it. Addresses are relative, so the
// page works behind a proxy that serves it under a path.

/** What went wrong. `kind`: unreachable, starting, draining, gone, busy, key, invalid, cut or server. */
export class Failure extends Error {
  constructor(kind, message, { param = null, wait = null } = {}) {
    super(message);
    this.kind = kind;
    this.param = param;
    this.wait = wait; // seconds the server asks to wait
  }
}

const ADVICE = {
  unreachable: ["The server cannot be reached", "Check that it is still running and that you are on the same network, then try again."],
  starting: ["The model is still loading", "Your message goes out as soon as you try again; the dot at the top turns green when it is ready."],
  draining: ["The server is shutting down", "It takes nothing new. Try again when it has been started again."],
  gone: ["The engine has stopped", "It does not come back by itself: see the server's log, and start it again."],
  busy: ["The server is busy", "Its queue is full. Wait a moment, then try again."],
  key: ["An API key is needed", "Type the key this server was started with under Settings, then try again."],
  invalid: ["The server refused the request", "Change what it names, then try again."],
  cut: ["The answer broke off", "The connection was lost before the end. Try again."],
  server: ["The server failed", "Try again; if it keeps failing, its log has the details."],
};

export function advice(failure) {
  const [title, remedy] = ADVICE[failure.kind] ?? ADVICE.server;
  return { title, remedy };
}

/** The status, or null if the server cannot be reached. */
export async function fetchStatus() {
  try {
    const response = await fetch("page/status", { cache: "no-store" });
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

/** Whether this key (possibly none) opens the API. */
export async function keyFits(key) {
  try {
    return (await fetch("v1/models", { headers: headers(key) })).status !== 401;
  } catch {
    return true; // unknown; the status shows that the server is away
  }
}

/** The chunks of a streamed chat completion, as objects. Throws Failure, or AbortError when `signal` aborts. */
export async function* streamChat(body, key, signal) {
  const response = await request(body, key, signal);
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw failureOf(chunk.error, chunk.error.code === "engine_unavailable" ? 503 : 500);
    yield chunk;
  }
  throw new Failure("cut", "The stream ended without its last event.");
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function request(body, key, signal) {
  try {
    return await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers(key) },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("unreachable", error.message);
  }
}

/** The data of each server-sent event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("cut", error.message);
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function refusal(response) {
  const wait = parseInt(response.headers.get("Retry-After"), 10) || null;
  try {
    const { error } = await response.json();
    return failureOf(error, response.status, wait);
  } catch {
    return new Failure(response.status === 503 ? "busy" : "server", `HTTP status ${response.status}`, { wait });
  }
}

function failureOf(error, status, wait = null) {
  return new Failure(kindOf(error, status), error.message, { param: error.param, wait });
}

function kindOf(error, status) {
  if (status === 401 || status === 403) return "key";
  if (status === 429 || error.code === "queue_full") return "busy";
  if (status === 503) return "gone"; // the caller tells a server that starts from one that ended by the status
  return status >= 400 && status < 500 ? "invalid" : "server";
}
