// Markdown as a stream: text is appended, and only the last, unfinished block is drawn again.
//
// 1. `blocks(lines)` cuts lines into blocks: fence, heading, rule, quote, list, table, paragraph.
// 2. `draw(block)` makes its element; quotes and list items hold blocks of their own.
// 3. A `MarkdownStream` keeps the elements of finished blocks and forgets their text, so a long answer costs no more a
//    token than a short one. An open code fence only has text added.

import { copyButton, el } from "./dom.js";
import { inline } from "./inline.js";

// Every pattern takes time linear in the line: no two neighbours can match the same characters.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)(.*)$/;
const DIVIDER = /^:?-+:?$/;
const FIRST = /^ *(?:[-*+]|1[.)]) /; // what may interrupt a paragraph: "in\n1986. A year" is none
const DEEPEST = 12; // nested quotes and lists beyond this are drawn as paragraphs

const blank = (line) => line.trim() === "";
const indent = (line) => line.length - line.trimStart().length;

/** Blocks with the number of the first line of each. `depth` counts nesting. */
export function blocks(lines, depth = 0) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (blank(lines[at])) {
      at++;
      continue;
    }
    const block = (depth < DEEPEST && (fence(lines, at) ?? quote(lines, at, depth) ?? list(lines, at, depth)))
      || heading(lines, at) || rule(lines, at) || table(lines, at) || paragraph(lines, at);
    found.push({ ...block, first: at });
    at = block.next;
  }
  return found;
}

function fence(lines, at) {
  const start = FENCE.exec(lines[at]);
  if (!start) return null;
  const pad = indent(lines[at]);
  const body = [];
  let next = at + 1;
  for (; next < lines.length; next++) {
    const end = FENCE.exec(lines[next]);
    if (end && end[1][0] === start[1][0] && end[1].length >= start[1].length && !end[2].trim()) {
      return { kind: "code", label: start[2].trim(), body, closed: true, next: next + 1 };
    }
    body.push(lines[next].slice(Math.min(pad, indent(lines[next]))));
  }
  return { kind: "code", label: start[2].trim(), body, closed: false, next };
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  if (!found) return null;
  const text = (found[2] ?? "").trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  const closed = end < text.length && (end === 0 || text[end - 1] === " ");
  return { kind: "heading", level: found[1].length, text: closed ? text.slice(0, end).trim() : text, next: at + 1 };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { kind: "rule", next: at + 1 } : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const inside = [];
  let next = at;
  for (; next < lines.length && !blank(lines[next]); next++) {
    if (!QUOTE.test(lines[next]) && startsBlock(lines, next)) break;
    inside.push(lines[next].replace(QUOTE, ""));
  }
  return { kind: "quote", blocks: blocks(inside, depth + 1), next };
}

function list(lines, at, depth) {
  const start = !RULE.test(lines[at]) && ITEM.exec(lines[at]);
  if (!start) return null;
  const ordered = /\d/.test(start[2]);
  const mark = start[2].at(-1);
  const items = [];
  let loose = false;
  let next = at;
  while (next < lines.length) {
    const item = !RULE.test(lines[next]) && ITEM.exec(lines[next]);
    if (!item || item[2].at(-1) !== mark || /\d/.test(item[2]) !== ordered || item[1].length > start[1].length + 3) break;
    const body = itemBody(lines, next, item);
    items.push(blocks(body.lines, depth + 1));
    loose ||= body.loose;
    next = body.next;
    let after = next;
    while (after < lines.length && blank(lines[after])) after++;
    if (after > next && after < lines.length && ITEM.test(lines[after])) {
      loose = true;
      next = after;
    }
  }
  return { kind: "list", ordered, start: ordered ? parseInt(start[2], 10) : 1, items, loose, next };
}

/** The lines that belong to an item: indented ones, and lazy ones until a blank line or another block. */
function itemBody(lines, at, item) {
  const width = item[1].length + item[2].length + 1;
  const body = [item[3]];
  let loose = false;
  let next = at + 1;
  for (; next < lines.length; next++) {
    const line = lines[next];
    if (blank(line)) {
      let after = next + 1;
      while (after < lines.length && blank(lines[after])) after++;
      if (after >= lines.length || indent(lines[after]) < Math.min(width, item[1].length + 2)) break;
      loose ||= !ITEM.test(lines[after]);
      for (; next < after; next++) body.push("");
      next--;
    } else if (indent(line) > item[1].length + 1) {
      body.push(line.slice(Math.min(width, indent(line))));
    } else if (blank(lines[next - 1]) || startsBlock(lines, next)) {
      break;
    } else {
      body.push(line.trimStart());
    }
  }
  return { lines: body, loose, next };
}

function table(lines, at) {
  if (!lines[at].includes("|") || !(lines[at + 1] ?? "").includes("-")) return null;
  const head = cells(lines[at]);
  const divider = cells(lines[at + 1]);
  if (head.length !== divider.length || !divider.every((cell) => DIVIDER.test(cell))) return null;
  const align = divider.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let next = at + 2;
  for (; next < lines.length && !blank(lines[next]) && lines[next].includes("|"); next++) rows.push(cells(lines[next]));
  return { kind: "table", head, align, rows, next };
}

const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function paragraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && !blank(lines[next]) && !interrupts(lines, next)) next++;
  return { kind: "paragraph", text: lines.slice(at, next).map((line) => line.trimStart()).join("\n").trimEnd(), next };
}

function startsBlock(lines, at) {
  return ITEM.test(lines[at]) || interrupts(lines, at);
}

function interrupts(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || FIRST.test(line)
    || Boolean(table(lines, at));
}

/** The element of a block. */
export function draw(block) {
  switch (block.kind) {
    case "code": return codeBlock(block);
    case "heading": return el(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.text));
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, ...block.blocks.map(draw));
    case "list": return drawList(block);
    case "table": return drawTable(block);
    default: return el("p", {}, ...inline(block.text));
  }
}

function drawList({ ordered, start, items, loose }) {
  const draws = (item) => item.flatMap((block) => (block.kind === "paragraph" && !loose ? inline(block.text) : [draw(block)]));
  const list = el(ordered ? "ol" : "ul", start === 1 ? {} : { start }, ...items.map((item) => el("li", {}, ...draws(item))));
  return list;
}

function drawTable({ head, align, rows }) {
  const line = (tag, values) => el("tr", {}, ...head.map((_, i) => el(`${tag}.${align[i]}`, {}, ...inline(values[i] ?? ""))));
  const body = el("tbody", {}, ...rows.map((row) => line("td", row)));
  return el("div.table", { tabindex: "0" }, el("table", {}, el("thead", {}, line("th", head)), body));
}

/** A code block with its language and a copy button. */
export function codeBlock({ label, body }) {
  const code = el("code", {}, body.join("\n"));
  const name = label.split(/\s/)[0];
  const head = el("div.head", {}, el("span", {}, name || "text"), copyButton("Copy code", () => code.textContent));
  return el("div.code", {}, head, el("pre", { tabindex: "0" }, code));
}

/** Draws a growing text into `root`. Whatever the pieces, the result is that of the whole text. */
export class MarkdownStream {
  #root;
  #lines = [""]; // of the blocks that may still change
  #tail = []; // their elements
  #fence = null; // the text node of an open code fence

  constructor(root) {
    this.#root = root;
  }

  append(text) {
    const [first, ...more] = text.split("\n");
    this.#lines[this.#lines.length - 1] += first;
    this.#lines.push(...more);
    if (this.#addToFence(text)) return;
    for (const node of this.#tail) node.remove();
    if (more.length) this.#finish();
    const found = blocks(this.#lines);
    this.#tail = found.map(draw);
    this.#root.append(...this.#tail);
    const last = found.at(-1);
    const open = last?.kind === "code" && !last.closed && found.length === 1;
    this.#fence = open ? this.#tail[0].querySelector("code").firstChild : null;
  }

  /** Draw for good what whole lines have shown to be finished: every block that has another one after it. */
  #finish() {
    const found = blocks(this.#lines.slice(0, -1));
    if (found.length < 2) return;
    this.#root.append(...found.slice(0, -1).map(draw));
    this.#lines.splice(0, found.at(-1).first);
  }

  /** Text that cannot close an open fence is added as it is. */
  #addToFence(text) {
    if (!this.#fence?.data || /[`~]/.test(text) || /^ *[`~]/.test(this.#lines.at(-1))) return false;
    if (/^ +\S/.test(this.#lines[0])) return false; // an indented fence strips its lines
    this.#fence.appendData(text);
    return true;
  }
}
