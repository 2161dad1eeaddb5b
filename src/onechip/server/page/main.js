// The page: joins the conversation, its views, the settings and the status. Owns who may do what when.
//
// 1. `submit` adds a person's message and calls `answer`.
// 2. `answer` streams one answer; drawing happens at most once a frame, and less often when it is slow.
// 3. An answer that calls tools asks for their results; `results` adds them and calls `answer` again.
// 4. Stop (the button or Esc) aborts the request; what was said stays, and counts as said.

import { Failure, keyFits, streamChat } from "./api.js";
import { absorb, newAnswer, openCalls, wire } from "./chat.js";
import { byId, el, remember, remembered, thisTab } from "./dom.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";
import { AnswerView, userView } from "./view.js";

const SUGGESTIONS = [
  "Explain how a paged K/V cache works",
  "Write a haiku about a chip that thinks",
  "Plan a weekend in Lisbon, as a table",
  "Find the bug: for i in range(len(x)): x.pop(i)",
];
const NEAR_PX = 80; // this close to the end counts as at the end
const ANNOUNCED = 600; // characters of an answer that a screen reader is given

const log = byId("log");
const scroll = byId("scroll");
const prompt = byId("prompt");
let messages = [];
let views = []; // parallel to messages; null for a tool's result, which its call shows
let running = null; // the AbortController of the answer that runs
let editing = null; // index of the message that is being edited
let follow = true; // whether the end of the conversation is kept in sight
let lastTop = 0;

const settings = new Settings(byId("settings"), refresh);
const status = new Status((now) => {
  settings.defaults(now.defaults ?? {});
  refresh();
});

// Messages and their views

function add(message) {
  messages.push(message);
  const index = messages.length - 1;
  views.push(message.role === "tool" ? null : message.role === "user" ? userView(message, () => edit(index)) : answerView(message));
  const view = views[index];
  if (view) log.append(view.node ?? view);
  refresh();
  return view;
}

function answerView(answer) {
  return new AnswerView(answer, { again, results, settings: (param) => settings.open(param ?? "key"), known: (param) => settings.has(param) });
}

function truncate(length) {
  for (const view of views.slice(length)) (view?.node ?? view)?.remove();
  messages.length = length;
  views.length = length;
  const calls = openCalls(messages);
  if (calls.length) views.at(-1).showResults(null);
}

function restore() {
  for (const message of remembered(thisTab, "onechip.chat", [])) {
    const view = add(message);
    if (message.role === "assistant") view.update(false);
  }
  for (let i = 0; i < messages.length; i++) if (messages[i].role === "assistant") showResults(i);
  askIfOpen();
  toEnd(true);
}

function save() {
  remember(thisTab, "onechip.chat", messages.length ? messages : null);
}

function showResults(index) {
  const given = [];
  for (let i = index + 1; messages[i]?.role === "tool"; i++) given.push(messages[i].content);
  if (given.length) views[index].showResults(given);
}

function askIfOpen() {
  if (openCalls(messages).length) views.at(-1).askResults();
  toEnd();
}

// What a person does

function submit() {
  const text = prompt.value.trim();
  if (!text || byId("send").disabled) return;
  if (blocked()) return;
  if (editing !== null) truncate(editing);
  else if (openCalls(messages).length) views.at(-1).showResults(null);
  endEdit();
  write("");
  add({ role: "user", content: text });
  answer();
}

/** Whether a box in the settings holds something that cannot be sent; opens it. */
function blocked() {
  const problem = settings.problem;
  if (problem) {
    settings.open(problem[0]);
    announce(problem[1]);
  }
  return Boolean(problem);
}

function again() {
  if (running || blocked()) return;
  if (messages.at(-1)?.role === "assistant") truncate(messages.length - 1);
  answer();
}

function results(texts) {
  if (running || blocked()) return;
  const index = messages.length - 1;
  const calls = messages[index].calls;
  texts.forEach((content, i) => add({ role: "tool", tool_call_id: calls[i].id, name: calls[i].name, content }));
  showResults(index);
  answer();
}

function edit(index) {
  if (running) return;
  editing = index;
  [...log.children].forEach((node) => node.classList.remove("fading"));
  views.slice(index).forEach((view) => (view?.node ?? view)?.classList.add("fading"));
  write(messages[index].content);
  prompt.focus();
  refresh();
}

function endEdit() {
  editing = null;
  [...log.children].forEach((node) => node.classList.remove("fading"));
  refresh();
}

function startOver() {
  running?.abort();
  truncate(0);
  endEdit();
  write("");
  save();
  refresh();
  prompt.focus();
}

// One answer

async function answer() {
  const message = newAnswer(settings.values.format === "text" ? "text" : "json");
  const body = request();
  const view = add(message);
  const controller = (running = new AbortController());
  const drawing = new Drawing(() => view.update(true));
  follow = true;
  busy(true);
  toEnd();
  try {
    for await (const chunk of streamChat(body, settings.key, controller.signal)) {
      absorb(message, chunk);
      drawing.ask();
    }
  } catch (error) {
    await failed(message, error);
  }
  drawing.end();
  if (running === controller) running = null;
  if (!messages.includes(message)) return; // a new chat has begun meanwhile
  view.update(false);
  busy(false);
  save();
  announce(message.failure ? "The answer failed." : message.content.slice(0, ANNOUNCED) || "The model calls a tool.");
  askIfOpen();
}

function request() {
  return {
    model: status.latest.model,
    messages: wire(messages, settings.values.system.trim()),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...settings.fields(),
  };
}

async function failed(message, error) {
  if (error.name === "AbortError") {
    message.stopped = true;
    return;
  }
  const failure = error instanceof Failure ? error : new Failure("server", error.message);
  if (failure.kind !== "invalid") await status.poll();
  const passing = failure.kind === "gone" && ["starting", "draining"].includes(status.latest.state);
  message.failure = { kind: passing ? status.latest.state : failure.kind, message: failure.message, param: failure.param };
}

function busy(now) {
  status.busy = now;
  status.poll();
  refresh();
  if (now) announce("The model answers.");
}

/** Draws at most once a frame; if drawing takes long, the page gets at least as much time for everything else. */
class Drawing {
  #draw;
  #asked = false;
  #more = false; // something came after what was drawn
  #ended = false;

  constructor(draw) {
    this.#draw = draw;
  }

  ask() {
    this.#more = this.#asked;
    if (this.#asked) return;
    this.#asked = true;
    requestAnimationFrame(() => {
      if (this.#ended) return;
      const begun = performance.now();
      this.#draw();
      toEnd();
      const spent = performance.now() - begun;
      setTimeout(() => {
        this.#asked = false;
        if (this.#more && !this.#ended) this.ask();
      }, Math.min(400, 2 * spent));
    });
  }

  end() {
    this.#ended = true;
  }
}

// The frame around it

function refresh() {
  const { state, model, engine, chat } = status.latest;
  const open = Boolean(running);
  byId("send").hidden = open;
  byId("stop").hidden = !open;
  byId("send").disabled = !prompt.value.trim() || state !== "ready";
  byId("welcome").hidden = messages.length > 0;
  byId("thinking").setAttribute("aria-pressed", String(settings.values.thinking));
  chip("tools-chip", settings.toolCount && `${settings.toolCount} tool${settings.toolCount === 1 ? "" : "s"}`);
  chip("format-chip", { json: "JSON", schema: "JSON schema" }[settings.values.format]);
  log.classList.toggle("running", open);
  byId("hint").replaceChildren(...hint());
  if (model) document.title = `${model.split("/").at(-1)} · onechip`;
  if (engine) {
    const facts = `${model} on ${engine.device}, ${engine.context.toLocaleString("en")} tokens of context.`;
    byId("welcome-facts").textContent = chat ? facts : `${facts} It has no chat template: use /v1/completions.`;
  }
}

function hint() {
  const key = (name) => el("kbd", {}, name);
  if (running) return [key("Esc"), " stops"];
  if (editing !== null) return ["Editing. ", key("Esc"), " cancels"];
  return [key("Enter"), " sends, ", key("Shift"), " ", key("Enter"), " breaks the line"];
}

function chip(id, text) {
  byId(id).hidden = !text;
  byId(id).lastElementChild.textContent = text || "";
}

function write(text) {
  prompt.value = text;
  grow();
  refresh();
}

function grow() {
  prompt.style.setProperty("height", "auto");
  prompt.style.setProperty("height", `${prompt.scrollHeight}px`);
}

function announce(text) {
  byId("announce").textContent = text;
}

function toEnd(force = false) {
  follow ||= force;
  if (follow) scroll.scrollTop = scroll.scrollHeight;
  byId("latest").hidden = follow || atEnd();
}

/** Only a person scrolls up: that lets go of the end, and coming back to it takes hold again. */
function onScroll() {
  if (atEnd()) follow = true;
  else if (scroll.scrollTop < lastTop - 1) follow = false;
  lastTop = scroll.scrollTop;
  byId("latest").hidden = follow || atEnd();
}

function atEnd() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_PX;
}

function toggleSettings() {
  if (byId("settings").open) settings.close();
  else settings.open();
}

function onKey(event) {
  if (event.key !== "Escape" || event.isComposing || byId("settings").matches(":modal")) return;
  if (running) running.abort();
  else if (editing !== null) {
    endEdit();
    write("");
  } else if (byId("settings").open) {
    settings.close();
    byId("open-settings").focus();
  }
}

function onPromptKey(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  }
  if (event.key === "ArrowUp" && !prompt.value && !running) {
    const last = messages.findLastIndex((message) => message.role === "user");
    if (last >= 0) edit(last);
  }
}

async function checkKey() {
  const fits = await keyFits(settings.key);
  status.note = fits ? null : "This server needs an API key. Type it under Settings, at the end.";
  await status.poll();
  if (!fits) settings.open("key");
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("keydown", onPromptKey);
prompt.addEventListener("input", () => {
  grow();
  refresh();
});
document.addEventListener("keydown", onKey);
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", startOver);
byId("open-settings").addEventListener("click", toggleSettings);
byId("tools-chip").addEventListener("click", () => settings.open("tools"));
byId("format-chip").addEventListener("click", () => settings.open(settings.values.format === "schema" ? "response_format" : "format"));
byId("thinking").addEventListener("click", () => settings.set("thinking", !settings.values.thinking));
byId("latest").addEventListener("click", () => toEnd(true));
byId("settings").addEventListener("change", (event) => event.target.type === "password" && checkKey());
scroll.addEventListener("scroll", onScroll, { passive: true });
new ResizeObserver(() => toEnd()).observe(log);
new MutationObserver(() => byId("open-settings").setAttribute("aria-expanded", String(byId("settings").open)))
  .observe(byId("settings"), { attributes: true, attributeFilter: ["open"] });
byId("suggestions").append(...SUGGESTIONS.map((text) => {
  const use = () => {
    write(text);
    prompt.focus();
  };
  return el("li", {}, el("button", { type: "button", on: { click: use } }, text));
}));
restore();
checkKey();
