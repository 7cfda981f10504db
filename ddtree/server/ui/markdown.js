// Markdown to DOM nodes. What a model wrote enters as text nodes alone; of its attributes only checked link targets.
//
// Every character keeps its place in the source, so that the text can be shaded by the round that brought it.

import { codeTokens } from "./highlight.js";

const MAX_DEPTH = 6; // of lists, quotes and emphasis in each other; beyond it text is just text
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: {1,4}|$)/;
const TABLE_RULE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;
const LINK = /!?\[([^[\]\n]{0,300})\]\(([^\s()]{1,600})\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`)\]]{1,600}/y;

/** Draw `source` into `container`; blocks that are as they were stay. `shade` may be null; see rounds.js. */
export function render(container, source, shade = null) {
  const blocks = parse(lines(source));
  blocks.forEach((block, i) => {
    const last = block.lines.at(-1);
    const mark = `${block.kind} ${block.lines[0].at} ${last.at + last.text.length} ${shade !== null}`;
    const old = container.children[i];
    // The last two may still grow in ways that their extent does not show.
    if (old?.dataset.mark === mark && i < blocks.length - 2) return;
    const node = draw(block, shade, 0);
    node.dataset.mark = mark;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function lines(source) {
  let at = 0;
  return source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
}

const cut = (line, n) => ({ text: line.text.slice(n), at: line.at + n });

/** Lines to blocks: { kind, lines, ... }. A block that has not ended yet is one all the same. */
function parse(all) {
  const blocks = [];
  for (let i = 0; i < all.length; ) {
    if (!all[i].text.trim()) {
      i++;
      continue;
    }
    const block = fence(all, i) ?? single(all[i]) ?? quote(all, i) ?? list(all, i) ?? table(all, i) ?? paragraph(all, i);
    blocks.push(block);
    i += block.lines.length;
  }
  return blocks;
}

function fence(all, i) {
  const opening = FENCE.exec(all[i].text);
  if (!opening) return null;
  const mark = opening[1];
  let end = i + 1;
  const closes = (text) => {
    const bare = text.trim();
    return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
  };
  while (end < all.length && !closes(all[end].text)) end++;
  return { kind: "code", language: opening[2].toLowerCase(), lines: all.slice(i, end + 1), body: all.slice(i + 1, end) };
}

function single(line) {
  if (RULE.test(line.text)) return { kind: "rule", lines: [line] };
  const heading = HEADING.exec(line.text);
  return heading && { kind: "heading", level: heading[1].length, lines: [line], body: [cut(line, heading[0].length)] };
}

function quote(all, i) {
  let end = i;
  while (end < all.length && QUOTE.test(all[end].text)) end++;
  if (end === i) return null;
  const taken = all.slice(i, end);
  return { kind: "quote", lines: taken, body: taken.map((line) => cut(line, QUOTE.exec(line.text)[0].length)) };
}

function list(all, i) {
  const first = ITEM.exec(all[i].text);
  if (!first) return null;
  const ordered = first[2].length > 1;
  const items = [];
  let end = i;
  for (let width = 0; end < all.length; end++) {
    const { text } = all[end];
    const item = ITEM.exec(text);
    const inside = items.length > 0 && text.length - text.trimStart().length >= width;
    if (inside && text.trim()) items.at(-1).push(cut(all[end], width));
    else if (item && item[2].length > 1 === ordered && !RULE.test(text)) {
      width = item[0].length;
      items.push([cut(all[end], width)]);
    } else if (!text.trim() && items.length && belongs(all[end + 1], width)) items.at(-1).push({ text: "", at: all[end].at });
    else break;
  }
  return { kind: ordered ? "ordered" : "bulleted", start: parseInt(first[2], 10), items, lines: all.slice(i, end) };
}

/** Does the line after a blank one go on with the list? */
function belongs(line, width) {
  return line !== undefined && (ITEM.test(line.text) || (line.text.trim() && line.text.search(/\S/) >= width));
}

function table(all, i) {
  if (!all[i].text.includes("|") || !all[i + 1]?.text.includes("-") || !TABLE_RULE.test(all[i + 1].text)) return null;
  let end = i + 2;
  while (end < all.length && all[end].text.includes("|")) end++;
  return { kind: "table", head: cells(all[i]), rows: all.slice(i + 2, end).map(cells), lines: all.slice(i, end) };
}

function cells(line) {
  const found = [];
  let start = line.text.search(/[^ |]|$/);
  for (let i = start; i <= line.text.length; i++) {
    if (i < line.text.length && (line.text[i] !== "|" || line.text[i - 1] === "\\")) continue;
    if (i < line.text.length || line.text.slice(start).trim()) found.push({ text: line.text.slice(start, i), at: line.at + start });
    start = i + 1;
  }
  return found;
}

function paragraph(all, i) {
  let end = i + 1;
  const starts = ({ text }) => FENCE.test(text) || HEADING.test(text) || QUOTE.test(text) || ITEM.test(text) || RULE.test(text);
  while (end < all.length && all[end].text.trim() && !starts(all[end])) end++;
  return { kind: "paragraph", lines: all.slice(i, end), body: all.slice(i, end) };
}

function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function draw(block, shade, depth) {
  const inside = (body) => (depth < MAX_DEPTH ? parse(body) : [{ kind: "paragraph", body }]);
  const nested = (body) => inside(body).map((each) => draw(each, shade, depth + 1));
  const flow = (node, body) => {
    inline(node, joined(body), shade, 0);
    return node;
  };
  switch (block.kind) {
    case "rule":
      return make("hr");
    case "heading":
      // The page's own headings are h1 and h2.
      return flow(make(`h${Math.min(block.level + 2, 6)}`), block.body);
    case "code":
      return drawCode(block, shade);
    case "quote":
      return make("blockquote", "", ...nested(block.body));
    case "ordered":
    case "bulleted": {
      const node = make(block.kind === "ordered" ? "ol" : "ul");
      if (block.kind === "ordered") node.start = block.start;
      node.append(...block.items.map((body) => make("li", "", ...nested(body))));
      return node;
    }
    case "table": {
      const row = (tag, found) => make("tr", "", ...found.map((cell) => flow(make(tag), [cell])));
      const body = make("tbody", "", ...block.rows.map((found) => row("td", found)));
      const scroller = make("div", "scroller", make("table", "", make("thead", "", row("th", block.head)), body));
      scroller.tabIndex = 0;
      return scroller;
    }
    default:
      return flow(make("p"), block.body);
  }
}

function drawCode(block, shade) {
  const code = make("code");
  const all = joined(block.body);
  let at = 0;
  for (const [start, end, className] of codeTokens(all.text, block.language)) {
    put(code, all, at, start, shade);
    const token = make("span", className);
    put(token, all, start, end, shade);
    code.append(token);
    at = end;
  }
  put(code, all, at, all.text.length, shade);
  const pre = make("pre", "", code);
  pre.tabIndex = 0;
  const copy = make("button", "copy-code", "Copy");
  copy.type = "button";
  copy.setAttribute("aria-label", `Copy the ${block.language || "code"} block`);
  return make("div", "code-block", make("span", "language", block.language || "code"), copy, pre);
}

/** Lines as one text; `map` has each character's place in the source. */
function joined(body) {
  const text = body.map((line) => line.text).join("\n");
  const map = new Uint32Array(text.length);
  let i = 0;
  body.forEach((line, n) => {
    if (n) map[i] = body[n - 1].at + body[n - 1].text.length;
    if (n) i++;
    for (let k = 0; k < line.text.length; k++) map[i++] = line.at + k;
  });
  return { text, map };
}

/** Characters start ... end as text nodes, in spans by round where they are shaded. */
function put(parent, { text, map }, start, end, shade) {
  for (let i = start; i < end; ) {
    let j = end;
    const round = shade?.at(map[i]);
    if (shade) for (j = i + 1; j < end && shade.at(map[j]) === round; j++);
    const node = document.createTextNode(text.slice(i, j));
    parent.append(round ? shade.wrap(node, round) : node);
    i = j;
  }
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** Emphasis, code, links. A mark that never closes is text, and is looked for no second time. */
function inline(parent, all, shade, depth, linked = false) {
  const { text } = all;
  const missing = new Set();
  let done = 0;
  const flush = (to) => put(parent, all, done, to, shade);
  const inner = (node, start, end) => {
    const piece = { text: text.slice(start, end), map: all.map.subarray(start, end) };
    inline(node, piece, shade, depth + 1, linked || node.tagName === "A");
    parent.append(node);
  };
  for (let i = 0; i < text.length; ) {
    const char = text[i];
    let next = i + 1;
    if (char === "\\" && /[\\`*_{}[\]()#+.!|~>-]/.test(text[i + 1] ?? "")) {
      flush(i);
      done = i + 1;
      next = i + 2;
    } else if (char === "`") {
      const run = /^`+/.exec(text.slice(i, i + 20))[0];
      const end = missing.has(run) ? -1 : text.indexOf(run, i + run.length);
      next = i + run.length;
      if (end < 0) missing.add(run);
      else {
        flush(i);
        const node = make("code");
        put(node, all, next, end, shade);
        parent.append(node);
        done = next = end + run.length;
      }
    } else if (char === "\n" && (text.slice(i - 2, i) === "  " || text[i - 1] === "\\")) {
      flush(text[i - 1] === "\\" ? i - 1 : i);
      parent.append(make("br"));
      done = next;
    } else if (char === "[" || (char === "!" && text[i + 1] === "[") || (char === "h" && text.startsWith("http", i))) {
      const link = linked || depth >= MAX_DEPTH ? null : linkAt(text, i);
      if (link) {
        flush(i);
        inner(anchor(link.href), link.start, link.end);
        done = next = link.next;
      }
    } else if (char === "*" || char === "_" || char === "~") {
      const found = depth < MAX_DEPTH ? emphasis(text, i, missing) : null;
      if (found) {
        flush(i);
        inner(make(found.tag), found.start, found.end);
        done = next = found.next;
      }
    }
    i = next;
  }
  flush(text.length);
}

function emphasis(text, i, missing) {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, i) || missing.has(mark)) continue;
    const start = i + mark.length;
    if (!text[start] || /\s/.test(text[start]) || (mark[0] === "_" && /\w/.test(text[i - 1] ?? ""))) continue;
    for (let end = text.indexOf(mark, start); ; end = text.indexOf(mark, end + 1)) {
      if (end < 0) {
        missing.add(mark);
        break;
      }
      const doubled = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
      const closes = end > start && !/\s/.test(text[end - 1]) && !doubled && !(mark[0] === "_" && /\w/.test(text[end + mark.length] ?? ""));
      if (closes) return { tag, start, end, next: end + mark.length };
    }
  }
  return null;
}

/** A link or a bare address at i; pictures become links to them, so that nothing is loaded. */
function linkAt(text, i) {
  LINK.lastIndex = ADDRESS.lastIndex = i;
  const link = LINK.exec(text);
  if (link) {
    const start = i + (text[i] === "!" ? 2 : 1);
    const href = safe(link[2]);
    return href && link[1] ? { href, start, end: start + link[1].length, next: i + link[0].length } : null;
  }
  const address = ADDRESS.exec(text)?.[0].replace(/[.,;:!?]+$/, "");
  const href = address && safe(address);
  return href ? { href, start: i, end: i + address.length, next: i + address.length } : null;
}

/** The address if a click on it can do no harm. */
function safe(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(href) {
  const node = make("a");
  node.href = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}
