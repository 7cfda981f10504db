// One round's draft tree as SVG, the root at the left: lines as wide as their probability, the accepted path, the bonus token.

import { draw } from "./dom.js";

const COLUMN = 72;
const BOX = 56;
const LETTERS = 7; // of a token that fit its box
const SMALLEST = 0.75; // a wide tree shrinks so far, then it scrolls
const NUM_WIDTHS = 6; // edges of about one width are one path, so that large trees stay quick
// Rows of a small, a middling and a large tree: pixels per row, whether every node carries its token, and whether those that
// were not accepted are one path, which is several times quicker than an element each.
const SIZES = [
  { rows: 48, row: 24, text: true, merged: false },
  { rows: 160, row: 12, text: false, merged: false },
  { rows: Infinity, row: 6, text: false, merged: true },
];

/** A token as it can be seen: white space by sign. */
export function visible(token) {
  const shown = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  return shown || "∅";
}

/** Each node's row: a first child shares its parent's, every other child begins a new one. */
export function rowsOf(parents) {
  const children = parents.map(() => []);
  for (let i = 1; i < parents.length; i++) children[parents[i]].push(i);
  const rows = new Array(parents.length).fill(0);
  let used = 0;
  for (const stack = [0]; stack.length; ) {
    const node = stack.pop();
    const [first, ...others] = children[node];
    if (node && children[parents[node]][0] !== node) rows[node] = ++used;
    else if (node) rows[node] = rows[parents[node]];
    for (const child of others.reverse()) stack.push(child);
    if (first !== undefined) stack.push(first);
  }
  return { rows, count: used + 1 };
}

/** The drawing. Nodes are `.node` with `data-node`, of a large tree subpaths of `.nodes`; the root is `.root`, accepted ones `.accepted`, the bonus token `.bonus`. */
export function drawTree(trace) {
  const { tokens, parents, depths, probabilities, path } = trace;
  const { rows, count } = rowsOf(parents);
  const { row, text, merged } = SIZES.find((size) => count <= size.rows);
  const accepted = new Set(path);
  const height = Math.max(row - 4, 3);
  const x = (i) => 6 + depths[i] * COLUMN;
  const y = (i) => 6 + rows[i] * row;
  const edges = Array.from({ length: NUM_WIDTHS }, () => "");
  let pathEdges = "";
  let others = "";
  const boxes = [];
  const labels = [];
  for (let i = 0; i < parents.length; i++) {
    if (i) {
      const [x0, y0, y1] = [x(parents[i]) + BOX, y(parents[i]) + height / 2, y(i) + height / 2];
      const edge = `M${x0} ${y0}C${x0 + 10} ${y0} ${x(i) - 10} ${y1} ${x(i)} ${y1}`;
      if (accepted.has(i)) pathEdges += edge;
      else edges[Math.min(Math.floor(probabilities[i] * NUM_WIDTHS), NUM_WIDTHS - 1)] += edge;
    }
    if (merged && !accepted.has(i)) {
      others += `M${x(i)} ${y(i)}h${BOX}v${height}h${-BOX}z`;
      continue;
    }
    const kind = i === 0 ? "root" : accepted.has(i) ? "node accepted" : "node";
    boxes.push(draw("rect", { class: kind, x: x(i), y: y(i), width: BOX, height, rx: 3, "data-node": i }));
    if (text || (accepted.has(i) && row >= 12)) labels.push(label(tokens[i], x(i), y(i), height, kind));
  }
  const last = path.at(-1);
  const end = { x: x(last) + COLUMN, y: y(last) };
  // A sibling that the drafter found more likely may stand where the bonus token belongs: below everything there is room.
  const taken = parents.some((parent, i) => parent === last && rows[i] === rows[last]);
  if (taken) end.y = 6 + count * row;
  const side = Math.max(height, 14);
  const from = { x: x(last) + BOX, y: y(last) + height / 2 };
  const bonusEdge = `M${from.x} ${from.y}C${from.x + 10} ${from.y} ${end.x - 10} ${end.y + side / 2} ${end.x} ${end.y + side / 2}`;
  const width = 12 + (Math.max(...depths, depths[last] + 1) + 1) * COLUMN;
  const tall = 12 + count * row + (taken ? side + 4 : Math.max(side - height, 0));
  const drawing = draw(
    "svg",
    { viewBox: `0 0 ${width} ${tall}`, width, height: tall, role: "img", "aria-label": inWords(trace) },
    ...edges.map((d, i) => draw("path", { class: "edge", d, "stroke-width": 0.6 + i * 0.9 })),
    draw("path", { class: "edge accepted", d: pathEdges, "stroke-width": 4 }),
    draw("path", { class: "edge bonus", d: bonusEdge, "stroke-width": 2 }),
    draw("path", { class: "nodes", d: others }),
    ...boxes,
    draw("rect", { class: "bonus", x: end.x, y: end.y, width: BOX, height: side, rx: 3 }),
    ...labels,
    label(`+${trace.bonus_token.token}`, end.x, end.y, side, "bonus"),
  );
  drawing.style.minWidth = `${width * SMALLEST}px`;
  return drawing;
}

function label(token, x, y, height, kind) {
  const shown = visible(token);
  const cut = shown.length > LETTERS ? `${shown.slice(0, LETTERS - 1)}…` : shown;
  return draw("text", { class: kind, x: x + 4, y: y + height / 2 + 4 }, cut);
}

/** What the drawing shows, for those who do not see it. */
export function inWords(trace) {
  const accepted = trace.path.slice(1).map((i) => visible(trace.tokens[i]));
  const drafted = trace.tokens.length - 1;
  if (!drafted) return `Round ${trace.round}: plain decoding, no tree; the target wrote ${visible(trace.bonus_token.token)}`;
  const path = accepted.length ? `accepted ${accepted.join(" ")}` : "none accepted";
  return `Round ${trace.round}: ${drafted} nodes verified, ${path}; bonus token ${visible(trace.bonus_token.token)}`;
}
