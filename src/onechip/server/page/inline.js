// Markdown inside a line: code, emphasis, links, breaks. Text in, DOM nodes out, in linear time.
//
// One pass with a list of finished nodes, texts and open marks. A closing mark looks back a bounded number of open ones and
// wraps what lies between; marks that never close stay as they were typed. Links carry http, https and mailto only; an
// image becomes a link to it, since the page loads nothing from elsewhere.

import { el } from "./dom.js";

const LOOK_BACK = 32; // open marks a closing one is tried against: bounds the work on adversarial text
const PLAIN = /[^\\`*_~[\]!<\nhH]+|[hH](?!ttps?:\/\/)/y;
const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const TICKS = /`+/y;
const MARKS = /\*+|_+|~+/y;
const TARGET = /\(\s*(<[^<>\n]*>|[^\s()<>]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+"([^"\n]*)")?\s*\)/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BARE = /https?:\/\/[^\s<>"'`*]*[^\s<>"'`*.,;:!?)\]]/y;
const WORD = /[\p{L}\p{N}]/u;

/** The nodes of one stretch of text. */
export function inline(text) {
  const state = { text, at: 0, out: [], open: [], ticks: new Map() };
  while (state.at < text.length) {
    if (!step(state)) push(state, text[state.at++]);
  }
  return state.out.map(plain);
}

/** A mark that never closed is the text it was. */
const plain = (part) => part.raw ?? part;

function match(state, pattern) {
  pattern.lastIndex = state.at;
  const found = pattern.exec(state.text);
  if (found) state.at = pattern.lastIndex;
  return found;
}

function push(state, value) {
  const last = state.out.at(-1);
  if (typeof value === "string" && typeof last === "string") state.out[state.out.length - 1] = last + value;
  else state.out.push(value);
}

function step(state) {
  const words = match(state, PLAIN);
  if (words) return push(state, words[0]), true;
  switch (state.text[state.at]) {
    case "\\": return escaped(state);
    case "`": return code(state);
    case "*": case "_": case "~": return emphasis(state);
    case "[": return open(state, "[", 1);
    case "!": return state.text[state.at + 1] === "[" && open(state, "![", 2);
    case "]": return link(state);
    case "<": return angle(state);
    case "\n": return lineEnd(state);
    default: return bare(state);
  }
}

function escaped(state) {
  const found = match(state, ESCAPE);
  if (found) return push(state, found[1]), true;
  if (state.text[state.at + 1] !== "\n") return false;
  state.at += 2;
  return push(state, el("br")), true;
}

function lineEnd(state) {
  const last = state.out.at(-1);
  const text = typeof last === "string" ? last : "";
  if (text) state.out[state.out.length - 1] = text.trimEnd();
  state.at += 1;
  push(state, text.endsWith("  ") ? el("br") : "\n");
  return true;
}

function code(state) {
  const start = state.at;
  const ticks = match(state, TICKS)[0];
  const end = closing(state, ticks);
  if (end < 0) {
    push(state, ticks);
    return true;
  }
  let body = state.text.slice(start + ticks.length, end).replaceAll("\n", " ");
  if (/^ .*[^ ].* $/.test(body)) body = body.slice(1, -1);
  push(state, el("code", {}, body));
  state.at = end + ticks.length;
  return true;
}

/** Where a run of exactly these ticks starts next; a length that once had none is not searched again. */
function closing(state, ticks) {
  if (state.ticks.get(ticks.length) === -1) return -1;
  const runs = /`+/g;
  runs.lastIndex = state.at;
  for (let run = runs.exec(state.text); run; run = runs.exec(state.text)) {
    if (run[0].length === ticks.length) return run.index;
  }
  state.ticks.set(ticks.length, -1);
  return -1;
}

function open(state, mark, width) {
  state.open.push(state.out.length);
  state.out.push({ mark, raw: mark, count: width });
  state.at += width;
  return true;
}

function emphasis(state) {
  const before = state.text[state.at - 1] ?? " ";
  const run = match(state, MARKS)[0];
  const after = state.text[state.at] ?? " ";
  const kind = run[0];
  if (kind === "~" && run.length !== 2) return push(state, run), true;
  const inWord = kind === "_" && WORD.test(before) && WORD.test(after); // snake_case is not emphasis
  const opens = !/\s/.test(after) && !inWord;
  const closes = !/\s/.test(before) && !inWord;
  let left = run.length;
  if (closes) left = close(state, kind, left);
  if (!left) return true;
  const rest = kind.repeat(left);
  if (!opens) return push(state, rest), true;
  state.open.push(state.out.length);
  state.out.push({ mark: kind, raw: rest, count: left });
  return true;
}

/** Wrap what lies since the nearest open mark of this kind, as often as both have marks left; what is left over. */
function close(state, kind, left) {
  for (let tries = 0, i = state.open.length - 1; i >= 0 && tries < LOOK_BACK && left; tries++, i--) {
    const from = state.open[i];
    const mark = state.out[from];
    if (mark.mark !== kind) {
      if (mark.mark === "[" || mark.mark === "![") return left; // emphasis does not reach across a bracket
      continue;
    }
    if (from === state.out.length - 1) return left; // nothing between
    while (left && mark.count) {
      const used = Math.min(2, left, mark.count);
      wrap(state, from + 1, el(kind === "~" ? "del" : used === 2 ? "strong" : "em"));
      mark.count -= used;
      left -= used;
    }
    mark.raw = kind.repeat(mark.count);
    state.open.length = mark.count ? i + 1 : i;
  }
  return left;
}

function wrap(state, from, holder) {
  const inside = state.out.splice(from);
  holder.append(...inside.map(plain));
  state.out.push(holder);
}

function link(state) {
  let i = state.open.length - 1;
  while (i >= 0 && !state.out[state.open[i]].mark.endsWith("[")) i--;
  if (i < 0) return false;
  const from = state.open[i];
  const image = state.out[from].mark === "![";
  state.at += 1;
  const found = match(state, TARGET);
  const href = found && safe(found[1].replace(/^<|>$/g, ""));
  if (!href) {
    state.at -= found ? found[0].length + 1 : 1;
    state.open.splice(i, 1);
    return false;
  }
  state.open.length = i;
  if (image && from === state.out.length - 1) push(state, "image");
  wrap(state, from + 1, anchor(href, found[2]));
  state.out.splice(from, 1);
  return true;
}

function angle(state) {
  const found = match(state, ANGLE);
  const href = found && safe(found[1]);
  if (!href) {
    if (found) state.at -= found[0].length;
    return false;
  }
  const node = anchor(href);
  node.append(found[1].replace(/^mailto:/, ""));
  return push(state, node), true;
}

function bare(state) {
  const found = match(state, BARE);
  const href = found && safe(found[0]);
  if (!href) {
    if (found) state.at -= found[0].length;
    return false;
  }
  const node = anchor(href);
  node.append(found[0]);
  return push(state, node), true;
}

function anchor(href, title) {
  return el("a", { href, title, target: "_blank", rel: "noopener noreferrer nofollow" });
}

/** The address if it is one a person may be led to, else null: never javascript:, data: or a path of this server. */
export function safe(href) {
  try {
    const url = new URL(href);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
