// Markdown to DOM nodes, drawn again as the source grows.
//
// Every character keeps its place in the source, so that the text can be shaded by the round that brought it.

import { lines, parse } from "./blocks.js";
import { make } from "./dom.js";
import { codeTokens } from "./highlight.js";
import { MAX_DEPTH, inline, joined, put } from "./inline.js";

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
  const all = joined(block.body);
  let at = 0;
  for (const [start, end, className] of codeTokens(all.text, block.language)) {
    put(code, all, at, start, shade);
    const token = make("span", { class: className });
    put(token, all, start, end, shade);
    code.append(token);
    at = end;
  }
  put(code, all, at, all.text.length, shade);
  const name = block.language || "code";
  const button = make("button", { class: "copy-code", type: "button", "aria-label": `Copy the ${name} block` }, "Copy");
  return make("div", { class: "code-block" }, make("span", { class: "language" }, name), button, make("pre", { tabindex: 0 }, code));
}
