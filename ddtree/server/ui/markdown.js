// Markdown to DOM nodes, drawn again as the source grows.
//
// Every character keeps its place in the source, so that the text can be shaded by the round that brought it.

import { lines, parse } from "./blocks.js";
import { make } from "./dom.js";
import { codeTokens } from "./highlight.js";
import { MAX_DEPTH, inline, joined, put } from "./inline.js";

const LINES = 50; // of code that are laid out by themselves; what a browser lays out as one takes time by the square of its lines

/** Draw `source` into `container`; blocks that are as they were stay. `shade` may be null; see rounds.js. */
export function render(container, source, shade = null) {
  const blocks = parse(lines(source));
  blocks.forEach((block, i) => {
    const last = block.lines.at(-1);
    const mark = `${block.kind} ${block.lines[0].at} ${last.at + last.text.length} ${shade !== null}`;
    const old = container.children[i];
    // The last two may still grow in ways that their extent does not show.
    if (old?.drawn.mark === mark && i < blocks.length - 2) return;
    // Code keeps its lines as it grows.
    const begin = `${block.kind} ${block.language} ${block.lines[0].at} ${shade !== null}`;
    const grows = block.kind === "code" && old?.drawn.begin === begin;
    if (grows) fillCode(old.querySelector("code"), block, shade);
    const node = grows ? old : draw(block, shade, 0);
    node.drawn = { mark, begin };
    if (grows) return;
    if (old) old.replaceWith(node);
    else container.append(node);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function draw(block, shade, depth) {
  const inside = (body) => (depth < MAX_DEPTH ? parse(body) : [{ kind: "paragraph", body }]);
  const nested = (body) => inside(body).map((each) => draw(each, shade, depth + 1));
  const flow = (node, body) => {
    inline(node, joined(body), shade);
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
      return make("blockquote", {}, ...nested(block.body));
    case "ordered":
    case "bulleted": {
      const node = make(block.kind === "ordered" ? "ol" : "ul");
      if (block.kind === "ordered") node.start = block.start;
      node.append(...block.items.map((body) => make("li", {}, ...nested(body))));
      return node;
    }
    case "table": {
      const row = (tag, found) => make("tr", {}, ...found.map((cell) => flow(make(tag), [cell])));
      const body = make("tbody", {}, ...block.rows.map((found) => row("td", found)));
      const table = make("table", {}, make("thead", {}, row("th", block.head)), body);
      return make("div", { class: "scroller", tabindex: 0 }, table);
    }
    default:
      return flow(make("p"), block.body);
  }
}

function drawCode(block, shade) {
  const code = make("code");
  fillCode(code, block, shade);
  const name = block.language || "code";
  const button = make("button", { class: "copy-code", type: "button", "aria-label": `Copy the ${name} block` }, "Copy");
  return make("div", { class: "code-block" }, make("span", { class: "language" }, name), button, make("pre", { tabindex: 0 }, code));
}

/** Draw the lines of code, some at a time; those that are there and can change no more stay. */
function fillCode(code, block, shade) {
  const all = joined(block.body);
  const tokens = codeTokens(all.text, block.language);
  const ends = [];
  block.body.reduce((end, { text }, i) => {
    if (i && i % LINES === 0) ends.push(end);
    return end + text.length + 1;
  }, 0);
  ends.push(all.text.length);
  let [from, next] = [0, 0];
  ends.forEach((end, i) => {
    const old = code.children[i];
    const node = old?.drawnTo === end && i < ends.length - 2 ? null : make("span", { class: "lines" });
    if (node) node.drawnTo = end;
    let at = from;
    for (; next < tokens.length && tokens[next][0] < end; next++) {
      const [start, stop, kind] = tokens[next];
      const [first, last] = [Math.max(start, from), Math.min(stop, end)];
      if (node) {
        put(node, all, at, first, shade);
        const token = make("span", { class: kind });
        put(token, all, first, last, shade);
        node.append(token);
      }
      at = last;
      if (stop > end) break; // the rest of it is the next lines'
    }
    if (node) put(node, all, at, end, shade);
    if (node && old) old.replaceWith(node);
    else if (node) code.append(node);
    from = end;
  });
  while (code.children.length > ends.length) code.lastElementChild.remove();
}
