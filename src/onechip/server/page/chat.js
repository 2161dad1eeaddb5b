// The conversation: what was said, what is sent, and how chunks become a message. No DOM.
//
// A message is {role, content} for a user, {role, tool_call_id, name, content} for a tool's result, and for an answer
// {role, content, reasoning, calls, finish, format, stats, failure, stopped}. `wire` turns them into OpenAI's shape.

export const newAnswer = (format) => ({
  role: "assistant",
  content: "",
  reasoning: "",
  calls: [],
  finish: null,
  format,
  stats: { sent: performance.now(), first: null, thought: null, last: null, prompt: null, tokens: 0, firstTokens: 0 },
  failure: null,
  stopped: false,
});

/** The messages as they are sent, behind the system prompt if there is one. */
export function wire(messages, system) {
  const sent = system ? [{ role: "system", content: system }] : [];
  messages.forEach((message, i) => {
    if (message.role === "assistant") {
      const answered = messages[i + 1]?.role === "tool"; // calls nobody answered are not sent: a server may refuse them
      const calls = answered ? message.calls : [];
      if (message.content || calls.length) sent.push(wireAnswer({ ...message, calls }));
    } else if (message.role === "tool") {
      sent.push({ role: "tool", tool_call_id: message.tool_call_id, name: message.name, content: message.content });
    } else {
      sent.push({ role: message.role, content: message.content });
    }
  });
  return sent;
}

function wireAnswer({ content, reasoning, calls }) {
  if (!calls.length) return { role: "assistant", content };
  const tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  // Thoughts belong to the chain of calls they led to; the template drops them everywhere else.
  return { role: "assistant", content: content || null, tool_calls, ...(reasoning && { reasoning_content: reasoning }) };
}

/** Take one chunk of the stream into the answer. */
export function absorb(answer, chunk, now = performance.now()) {
  const stats = answer.stats;
  if (chunk.usage) {
    stats.prompt = chunk.usage.prompt_tokens;
    stats.tokens = chunk.usage.completion_tokens;
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content, reasoning, tool_calls } = choice.delta ?? {};
  const thought = reasoning_content ?? reasoning;
  if (thought || content || tool_calls?.length) {
    if (stats.first === null) [stats.first, stats.firstTokens] = [now, stats.tokens || 1];
    stats.last = now;
  }
  if (thought) answer.reasoning += thought;
  if (answer.reasoning && stats.thought === null && (content || tool_calls?.length)) stats.thought = now;
  if (content) answer.content += content;
  for (const call of tool_calls ?? []) absorbCall(answer.calls, call);
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function absorbCall(calls, { index, id, function: { name, arguments: text } = {} }) {
  const call = (calls[index ?? 0] ??= { id: "", name: "", arguments: "" });
  if (id) call.id = id;
  if (name) call.name = name;
  if (text) call.arguments += text;
}

/** Tokens a second after the first ones, or null while there is nothing to measure. */
export function speed({ first, last, tokens, firstTokens }) {
  const seconds = (last - first) / 1000;
  return first !== null && tokens > firstTokens && seconds > 0.05 ? (tokens - firstTokens) / seconds : null;
}

/** One line about an answer: tokens, speed, time to the first token, and an ending that is not the usual one. */
export function summary({ stats, finish, stopped }) {
  const parts = [];
  if (stats.tokens) parts.push(`${stats.tokens.toLocaleString("en")} token${stats.tokens === 1 ? "" : "s"}`);
  const rate = speed(stats);
  if (rate) parts.push(`${rate >= 100 ? Math.round(rate) : rate.toFixed(1)} tokens/s`);
  if (stats.first !== null) parts.push(`first after ${seconds(stats.first - stats.sent)}`);
  if (stopped) parts.push("stopped");
  else if (finish === "length") parts.push("cut at the token limit");
  return parts.join("  ·  ");
}

export const seconds = (ms) => (ms < 9950 ? `${(ms / 1000).toFixed(ms < 995 ? 2 : 1)} s` : `${Math.round(ms / 1000)} s`);

/** The calls of the last answer that still wait for results. */
export function openCalls(messages) {
  const last = messages.at(-1);
  const whole = last?.role === "assistant" && !last.failure && !last.stopped && last.finish !== "length";
  return whole ? last.calls : [];
}

/** JSON, whole or cut anywhere, with line breaks. It is not parsed: numbers stay as they were written. */
export function pretty(text) {
  let out = "";
  let depth = 0;
  let quoted = false;
  const line = () => "\n" + "  ".repeat(Math.min(depth, 40));
  for (let i = 0; i < text.length; i++) {
    const char = text[i];
    if (quoted) {
      out += char;
      if (char === "\\") out += text[++i] ?? "";
      else if (char === '"') quoted = false;
    } else if (/\s/.test(char)) continue;
    else if (char === "{" || char === "[") {
      depth++;
      const empty = /^\s*[}\]]/.test(text.slice(i + 1, i + 20));
      out += char + (empty ? "" : line());
    } else if (char === "}" || char === "]") {
      depth = Math.max(0, depth - 1);
      out += /[{[]$/.test(out) ? char : line() + char;
    } else if (char === ",") out += "," + line();
    else if (char === ":") out += ": ";
    else {
      quoted = char === '"';
      out += char;
    }
  }
  return out;
}
