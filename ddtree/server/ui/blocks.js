// Markdown's blocks: lines of source to paragraphs, lists, quotes, tables and code, each line with its place in the source.

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: {1,4}|$)/;
const TABLE_RULE = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** The lines of a source: { text, at }. */
export function lines(source) {
  let at = 0;
  return source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
}

const cut = (line, n) => ({ text: line.text.slice(n), at: line.at + n });

/** Lines to blocks: { kind, lines, ... }. A block that has not ended yet is one all the same. */
export function parse(all) {
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
