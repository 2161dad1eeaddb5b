// The header: whether the server can answer, how full it is, and what it runs. Asks often while something happens.

import { fetchStatus } from "./api.js";
import { byId } from "./dom.js";

const IDLE_MS = 5000;
const BUSY_MS = 1000;
const WORDS = { ready: "ready", starting: "loading", gone: "stopped", draining: "stopping", unreachable: "offline" };
const NOTICES = {
  starting: "The model is loading. You can type meanwhile; sending works as soon as it is ready.",
  gone: "The engine has stopped and will not come back by itself. See the server's log and start it again.",
  draining: "The server is shutting down: it finishes what runs and takes nothing new.",
  unreachable: "The server cannot be reached. Is onechip still running? This page keeps trying.",
};

/** Polls the status; `changed(status)` hears every answer, with `state` "unreachable" when there is none. */
export class Status {
  latest = { state: "unknown", defaults: {}, engine: null };
  #changed;
  #timer = null;
  busy = false;
  note = null; // shown where the server itself has nothing to say

  constructor(changed) {
    this.#changed = changed;
    document.addEventListener("visibilitychange", () => !document.hidden && this.poll());
  }

  /** Ask now, and again later: soon while an answer runs or the server is not ready. */
  async poll() {
    clearTimeout(this.#timer);
    const status = (await fetchStatus()) ?? { ...this.latest, state: "unreachable" };
    this.latest = status;
    draw(status, this.note);
    this.#changed(status);
    clearTimeout(this.#timer);
    if (document.hidden && !this.busy) return;
    this.#timer = setTimeout(() => this.poll(), this.busy || status.state !== "ready" ? BUSY_MS : IDLE_MS);
  }
}

function draw(status, note) {
  const { state, engine } = status;
  byId("state").dataset.state = state;
  byId("state-text").textContent = WORDS[state];
  drawNotice(NOTICES[state] ?? note);
  const name = status.model ?? "";
  byId("model").textContent = name.split("/").at(-1);
  byId("model").title = engine ? `${name} on ${engine.device} (${engine.dtype})` : name;
  byId("load").hidden = state !== "ready";
  if (state !== "ready") return;
  byId("running").textContent = status.running;
  byId("waiting").textContent = status.waiting;
  byId("waiting").parentNode.dataset.zero = String(!status.waiting);
  const percent = Math.round(status.kv_usage * 100);
  byId("kv-text").textContent = `${percent}%`;
  byId("kv-fill").style.setProperty("--used", `${Math.max(percent, status.kv_usage > 0 ? 2 : 0)}%`);
  byId("kv").title = `Keys and values: ${percent}% of ${engine.kv_tokens.toLocaleString("en")} tokens in use`;
}

function drawNotice(text) {
  const notice = byId("notice");
  if (notice.textContent !== (text ?? "")) notice.textContent = text ?? "";
  notice.hidden = !text;
}
