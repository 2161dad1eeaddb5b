// How messages look. A view draws its message once and then only what has changed; it decides nothing.

import { advice } from "./api.js";
import { pretty, seconds, speed, summary } from "./chat.js";
import { copyButton, el, icon, iconButton } from "./dom.js";
import { codeBlock, MarkdownStream } from "./markdown.js";

/** A person's message; `edit` puts it back into the composer. */
export function userView(message, edit) {
  const bar = el("div.bar", {}, iconButton("edit", "Edit and send again", edit), copyButton("Copy message", () => message.content));
  return el("li.user", {}, el("h3.sr", {}, "You"), el("div.bubble", {}, message.content), bar);
}

/**
 * A model's answer. `actions`: again() makes it anew, results(texts) answers its calls, settings(param) opens the
 * settings where a refused field is, if known(param).
 */
export class AnswerView {
  #answer;
  #actions;
  #thought = null; // {details, label, stream, length}
  #content = null; // {node, stream, length}
  #calls = [];
  #parts = el("div.parts");
  #meta = el("div.meta");
  #waiting = el("p.waiting", { "aria-hidden": "true" }, el("i"), el("i"), el("i"));
  #settled = false;

  constructor(answer, actions) {
    this.#answer = answer;
    this.#actions = actions;
    this.node = el("li.answer", {}, el("h3.sr", {}, "The model"), this.#parts, this.#waiting, this.#meta);
    this.node.setAttribute("aria-busy", "true");
  }

  /** Draw what is new. `busy`: more is coming. */
  update(busy) {
    const answer = this.#answer;
    if (answer.reasoning) this.#drawThought(busy && !answer.content && !answer.calls.length);
    if (answer.content) this.#drawContent();
    answer.calls.forEach((call, i) => this.#drawCall(call, i));
    this.#waiting.hidden = !busy || Boolean(answer.reasoning || answer.content || answer.calls.length);
    if (busy) this.#meta.textContent = live(answer);
    else if (!this.#settled) this.#settle();
  }

  #drawThought(thinking) {
    this.#thought ??= this.#openThought();
    const { stream, label } = this.#thought;
    const { reasoning, stats } = this.#answer;
    if (reasoning.length > this.#thought.length) stream.append(reasoning.slice(this.#thought.length));
    this.#thought.length = reasoning.length;
    const end = stats.thought ?? stats.last;
    const time = stats.first === null || end - stats.first < 50 ? "" : ` for ${seconds(end - stats.first)}`;
    label.textContent = thinking ? "Thinking" : `Thought${time}`;
    this.#thought.details.classList.toggle("live", thinking);
  }

  #openThought() {
    const label = el("span");
    const body = el("div.prose");
    const details = el("details.thought", {}, el("summary", {}, icon("think"), label), body);
    this.#parts.prepend(details);
    return { details, label, stream: new MarkdownStream(body), length: 0 };
  }

  #drawContent() {
    const { content, format } = this.#answer;
    if (format === "json") {
      this.#content ??= this.#add(codeBlock({ label: "json", body: [""] }));
      this.#content.node.querySelector("code").textContent = pretty(content);
      return;
    }
    this.#content ??= this.#add(el("div.prose"));
    this.#content.stream ??= new MarkdownStream(this.#content.node);
    if (content.length > this.#content.length) this.#content.stream.append(content.slice(this.#content.length));
    this.#content.length = content.length;
  }

  #add(node) {
    this.#parts.append(node);
    return { node, stream: null, length: 0 };
  }

  #drawCall(call, i) {
    this.#calls[i] ??= this.#openCall();
    const { name, code } = this.#calls[i];
    name.textContent = call.name;
    const text = pretty(call.arguments);
    if (code.textContent !== text) code.textContent = text;
  }

  #openCall() {
    const name = el("code.name");
    const code = el("code");
    const node = el("div.call", {}, el("div.head", {}, icon("tool"), name, el("span", {}, "tool call")), el("pre", { tabindex: "0" }, code));
    this.#parts.append(node);
    return { node, name, code, result: null };
  }

  #settle() {
    this.#settled = true;
    this.node.setAttribute("aria-busy", "false");
    const answer = this.#answer;
    const bar = el("div.bar", {}, copyButton("Copy answer", () => copied(answer)), iconButton("again", "Answer again", () => this.#actions.again()));
    this.#meta.replaceChildren(...(answer.failure ? [] : [bar]), el("span", {}, summary(answer)));
    if (answer.failure) this.node.insertBefore(this.#failed(answer.failure), this.#meta);
  }

  #failed(failure) {
    const { title, remedy } = advice(failure);
    const detail = failure.kind === "unreachable" ? null : el("p.detail", {}, failure.message);
    const buttons = [el("button.button", { type: "button", on: { click: () => this.#actions.again() } }, "Try again")];
    if (failure.kind === "key" || this.#actions.known(failure.param)) {
      buttons.push(el("button.button.ghost", { type: "button", on: { click: () => this.#actions.settings(failure.param) } }, "Open settings"));
    }
    return el("div.failed", { role: "alert" }, icon("alert"), el("div", {}, el("h4", {}, title), detail, el("p", {}, remedy), el("div.buttons", {}, ...buttons)));
  }

  /** Show boxes for the results of the calls; empty ones are allowed, since a tool may have nothing to say. */
  askResults() {
    const boxes = this.#calls.map((call) => {
      const box = el("textarea", { rows: "2", spellcheck: "false", placeholder: "What the tool returned", "aria-label": `Result of ${call.name.textContent}` });
      box.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
      });
      call.result = el("div.result", {}, box);
      call.node.append(call.result);
      return box;
    });
    const send = () => this.#actions.results(boxes.map((box) => box.value));
    const label = boxes.length === 1 ? "Send result" : "Send results";
    this.#parts.append(el("div.buttons.asking", {}, el("button.button", { type: "button", on: { click: send } }, label), el("span.quiet", {}, "You play the tool: type what it returned.")));
    boxes[0].focus({ preventScroll: true });
  }

  /** The results that were given, in place of the boxes; null takes the boxes away. */
  showResults(texts) {
    this.#parts.querySelector(".asking")?.remove();
    this.#calls.forEach((call, i) => {
      call.result?.remove();
      call.result = texts && el("div.result", {}, el("span.quiet", {}, "Result"), el("pre", { tabindex: "0" }, texts[i] || "(nothing)"));
      if (call.result) call.node.append(call.result);
    });
  }
}

function copied({ content, calls }) {
  return content || calls.map((call) => `${call.name}(${call.arguments})`).join("\n");
}

function live({ stats }) {
  const rate = speed(stats);
  const parts = [];
  if (stats.tokens) parts.push(`${stats.tokens.toLocaleString("en")} tokens`);
  if (rate) parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
  if (stats.first !== null) parts.push(`first after ${seconds(stats.first - stats.sent)}`);
  return parts.join("  ·  ");
}
