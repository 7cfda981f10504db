// Markdown within a block: emphasis, code and links as DOM nodes. What a model wrote enters as text nodes alone; of its
// attributes only checked link targets.

import { make } from "./dom.js";

export const MAX_DEPTH = 6; // of lists, quotes and emphasis in each other; beyond it text is just text
const LINK = /!?\[([^[\]\n]{0,300})\]\(([^\s()]{1,600})\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`)\]]{1,600}/y;

/** Lines as one text; `map` has each character's place in the source. */
export function joined(body) {
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
export function put(parent, { text, map }, start, end, shade) {
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
export function inline(parent, all, shade, depth = 0, linked = false) {
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
  return make("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" });
}
