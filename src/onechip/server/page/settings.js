// The settings: what is sent along with every message. Drawn from one table; kept between visits, the key only in this
// tab. An empty field is not sent, so the server's own default holds (and is shown as the placeholder).

import { el, iconButton, lasting, remember, remembered, thisTab } from "./dom.js";

const NUMBERS = [
  ["temperature", "Temperature", "0 takes the likeliest token", { min: 0, max: 2, step: 0.1 }, 1],
  ["top_p", "Top p", "Share of the probability to draw from", { min: 0, max: 1, step: 0.05 }, 1],
  ["top_k", "Top k", "Likeliest tokens to draw from; 0 is all", { min: 0, step: 1 }, "all"],
  ["min_p", "Min p", "Least probability, as a share of the best", { min: 0, max: 1, step: 0.01 }, 0],
  ["max_tokens", "Max tokens", "Longest answer, thoughts included", { min: 1, step: 1 }, "to the end"],
  ["seed", "Seed", "The same seed draws the same answer", { step: 1 }, "fresh"],
];
const EMPTY = { system: "", thinking: false, stop: "", tools: "", format: "text", schema: "" };
const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Current weather in a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string", description: "City name" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
      required: ["city"],
    },
  },
}];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { title: { type: "string" }, year: { type: "integer" }, tags: { type: "array", items: { type: "string" } } },
  required: ["title", "year", "tags"],
  additionalProperties: false,
};
const PLACES = { tools: "tools", tool_choice: "tools", response_format: "schema", structured_outputs: "schema", stop: "stop" };

export class Settings {
  values = { ...EMPTY, ...remembered(lasting, "onechip.settings", {}) };
  key = remembered(thisTab, "onechip.key", "");
  #panel;
  #changed;
  #fields = {};
  #problems = {};

  constructor(panel, changed) {
    this.#panel = panel;
    this.#changed = changed;
    this.#draw();
    this.check();
  }

  /** Number of tools, or null where the box does not hold a list of them. */
  get toolCount() {
    const tools = parsed(this.values.tools);
    return Array.isArray(tools) ? tools.length : 0;
  }

  /** The first thing wrong with what was typed, as [field, text], or null. */
  get problem() {
    return Object.entries(this.#problems).find(([, text]) => text) ?? null;
  }

  /** What the settings add to a request. */
  fields() {
    const { values } = this;
    const body = {};
    for (const [name] of NUMBERS) if (values[name] != null) body[name] = values[name];
    const stop = values.stop.split("\n").filter(Boolean);
    if (stop.length) body.stop = stop;
    if (values.thinking) body.chat_template_kwargs = { enable_thinking: true };
    if (this.toolCount) body.tools = parsed(values.tools);
    if (values.format === "json") body.response_format = { type: "json_object" };
    if (values.format === "schema") {
      body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parsed(values.schema) } };
    }
    return body;
  }

  set(name, value) {
    this.values[name] = value;
    if (this.#fields[name]) this.#fields[name].value = value ?? "";
    this.check();
    remember(lasting, "onechip.settings", this.values);
    this.#changed();
  }

  setKey(key) {
    this.key = key;
    remember(thisTab, "onechip.key", key || null);
    this.#changed();
  }

  /** Show the server's defaults where nothing is set. */
  defaults(defaults) {
    for (const [name, , , , fallback] of NUMBERS) this.#fields[name].placeholder = defaults[name] || fallback;
  }

  check() {
    const { tools, format, schema } = this.values;
    this.#problems = {
      tools: tools.trim() && problemOf(tools, "tools", (value) => (Array.isArray(value) ? "" : "Tools are a JSON list.")),
      schema: format === "schema" ? problemOf(schema, "schema", (value) => (isObject(value) ? "" : "A schema is a JSON object.")) : "",
    };
    for (const [name, text] of Object.entries(this.#problems)) {
      const field = this.#fields[name];
      field.setAttribute("aria-invalid", String(Boolean(text)));
      field.parentNode.querySelector(".problem").textContent = text;
    }
    this.#fields.schema.closest(".field").hidden = format !== "schema";
  }

  /** Open the panel, at the field that `param` of a refusal speaks of. */
  open(param = null) {
    if (!this.#panel.open) {
      if (matchMedia("(max-width: 56rem)").matches) this.#panel.showModal();
      else this.#panel.show();
      document.documentElement.classList.add("settings-open");
    }
    const field = this.#field(param);
    if (field) {
      field.focus();
      if (field instanceof HTMLTextAreaElement) {
        field.setSelectionRange(0, 0);
        field.scrollTop = 0;
      }
      field.scrollIntoView({ block: "center" });
    } else {
      this.#panel.querySelector("[autofocus]").focus();
    }
  }

  /** Whether there is a field for what a refusal speaks of. */
  has(param) {
    return Boolean(this.#field(param));
  }

  #field(param) {
    const root = param?.split(/[.[]/)[0];
    return this.#fields[PLACES[root] ?? root];
  }

  close() {
    this.#panel.close();
  }

  #draw() {
    const head = el("header", {}, el("h2", { id: "settings-title" }, "Settings"), iconButton("close", "Close settings", () => this.close()));
    head.lastChild.setAttribute("autofocus", "");
    this.#panel.append(head, el("div.sections", {}, this.#prompting(), this.#sampling(), this.#tools(), this.#format(), this.#access()));
    this.#panel.addEventListener("close", () => document.documentElement.classList.remove("settings-open"));
  }

  #prompting() {
    const area = this.#area("system", { rows: 3, placeholder: "You are a helpful assistant." });
    return section("System prompt", "Sent before the conversation.", labelled("System prompt", area, { quiet: true }));
  }

  #sampling() {
    const numbers = NUMBERS.map(([name, label, help, range]) => labelled(label, this.#number(name, range), { title: help }));
    const stop = labelled("Stop at", this.#area("stop", { rows: 2, placeholder: "One text a line" }), {});
    const reset = el("button.link", { type: "button", on: { click: () => this.#reset() } }, "Back to defaults");
    return section("Sampling", "Empty fields leave it to the server.", el("div.numbers", {}, ...numbers), stop, reset);
  }

  #tools() {
    const area = this.#area("tools", { rows: 6, placeholder: "[ … ]", spellcheck: "false", class: "mono" });
    return section("Tools", "Functions the model may call, as OpenAI's JSON. You type their results.",
      labelled("Tools, as JSON", area, { quiet: true, checked: true }), this.#example("tools", EXAMPLE_TOOLS));
  }

  #format() {
    const options = [["text", "Text"], ["json", "JSON"], ["schema", "JSON schema"]];
    const choice = el("select", {}, ...options.map(([value, label]) => el("option", { value, selected: value === this.values.format }, label)));
    choice.addEventListener("change", () => this.set("format", choice.value));
    this.#fields.format = choice;
    const area = this.#area("schema", { rows: 8, placeholder: "{ … }", spellcheck: "false", class: "mono" });
    const box = labelled("Schema", area, { checked: true });
    box.append(this.#example("schema", EXAMPLE_SCHEMA));
    return section("Answer format", "A schema is enforced token by token.", labelled("Format", choice, { quiet: true }), box);
  }

  #access() {
    const key = el("input", { type: "password", autocomplete: "off", placeholder: "None", value: this.key });
    key.addEventListener("change", () => this.setKey(key.value.trim()));
    this.#fields.key = key;
    const theme = el("select", {}, ...[["", "Like the system"], ["light", "Light"], ["dark", "Dark"]].map(([value, label]) =>
      el("option", { value, selected: value === (document.documentElement.dataset.theme ?? "") }, label)));
    theme.addEventListener("change", () => setTheme(theme.value));
    // A form of its own is what password managers expect of a key; it is never submitted.
    const holder = el("form", { on: { submit: (event) => event.preventDefault() } }, labelled("API key", key, { title: "Kept in this tab only" }));
    return section("This browser", null, holder, labelled("Colours", theme, {}));
  }

  #number(name, range) {
    const input = el("input", { type: "number", inputmode: range.step === 1 ? "numeric" : "decimal", ...range, value: this.values[name] });
    input.addEventListener("input", () => {
      const value = input.valueAsNumber;
      input.setAttribute("aria-invalid", String(!input.checkValidity() && !input.validity.stepMismatch));
      this.values[name] = Number.isNaN(value) ? null : value;
      remember(lasting, "onechip.settings", this.values);
    });
    this.#fields[name] = input;
    return input;
  }

  #area(name, { class: kind, ...attributes }) {
    const area = el(`textarea${kind ? `.${kind}` : ""}`, attributes);
    area.value = this.values[name];
    area.addEventListener("input", () => this.set(name, area.value));
    this.#fields[name] = area;
    return area;
  }

  #example(name, value) {
    return el("button.link", { type: "button", on: { click: () => this.set(name, JSON.stringify(value, null, 2)) } }, "Insert an example");
  }

  #reset() {
    for (const [name] of NUMBERS) this.set(name, null);
    this.set("stop", "");
  }
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function section(title, about, ...children) {
  return el("section", {}, el("h3", {}, title), about && el("p.quiet", {}, about), ...children);
}

function labelled(label, input, { quiet = false, checked = false, title = null }) {
  const id = `setting-${label.toLowerCase().replace(/\W+/g, "-")}`;
  input.id = id;
  const problem = checked ? el("small.problem", { role: "status", id: `${id}-problem` }) : null;
  if (problem) input.setAttribute("aria-describedby", problem.id);
  return el("div.field", { title }, el(quiet ? "label.sr" : "label", { for: id }, label), input, problem);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function problemOf(text, what, check) {
  try {
    return check(JSON.parse(text));
  } catch (error) {
    return text.trim() ? `Not JSON: ${error.message}` : `The ${what} is empty.`;
  }
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  remember(lasting, "onechip.theme", theme || null);
}
