// One round's draft tree as SVG, the root at the left: lines as wide as their probability, the accepted path, the bonus token.

import { draw } from "./dom.js";

const COLUMN = 72;
const BOX = 56;
const MARGIN = 6;
const LETTERS = 7; // of a token that fit its box, a piece of a character among them
const SMALLEST = 0.75; // a wide tree shrinks so far, then it scrolls
const NUM_WIDTHS = 6; // edges of about one width are one path, so that large trees stay quick
// Rows of a small, a middling and a large tree: pixels per row, whether every node carries its token, and whether those that
// were not accepted are one path, which is several times quicker than an element each.
const SIZES = [
  { rows: 48, row: 24, text: true, merged: false },
  { rows: 160, row: 12, text: false, merged: false },
  { rows: Infinity, row: 6, text: false, merged: true },
];

// Characters that show nothing, or that turn the text around them.
const HIDDEN = /[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;

/** A token as it can be seen: white space by sign, what steers by its number. */
export function visible(token) {
  const signs = token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  const shown = signs.replace(HIDDEN, (each) => `‹${each.charCodeAt(0).toString(16).padStart(2, "0")}›`);
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

/** Where everything is: of each node by x(i) and y(i), and the box of the bonus token. */
function layout({ parents, depths, path }) {
  const last = path.at(-1);
  // The bonus token is laid out as the last child of the path's last node.
  const { rows, count } = rowsOf([...parents, last]);
  const size = SIZES.find((each) => count <= each.rows);
  const { row } = size;
  const height = Math.max(row - 4, 3);
  const side = Math.max(height, 14);
  const x = (i) => MARGIN + depths[i] * COLUMN;
  const y = (i) => MARGIN + rows[i] * row;
  const bonus = { x: x(last) + COLUMN, y: y(parents.length), side };
  const width = 2 * MARGIN + (Math.max(...depths, depths[last] + 1) + 1) * COLUMN;
  const tall = 2 * MARGIN + count * row + side - height;
  return { ...size, rows, height, x, y, bonus, width, tall };
}

function edge(x0, y0, x1, y1) {
  return `M${x0} ${y0}C${x0 + 10} ${y0} ${x1 - 10} ${y1} ${x1} ${y1}`;
}

/** The drawing. Nodes are `.node` with `data-node`, of a large tree subpaths of `.nodes`; the root is `.root`, accepted ones `.accepted`, the
 * bonus token `.bonus`; texts of pieces of characters are `.piece`. */
export function drawTree(trace) {
  const { tokens, parents, probabilities, path, pieces } = trace;
  const textKind = (kind, node) => (pieces.has(node) ? `${kind} piece` : kind);
  const { row, text, merged, height, x, y, bonus, width, tall } = layout(trace);
  const accepted = new Set(path);
  const edges = Array.from({ length: NUM_WIDTHS }, () => "");
  let pathEdges = "";
  let others = "";
  const boxes = [];
  const labels = [];
  for (let i = 0; i < parents.length; i++) {
    if (i) {
      const d = edge(x(parents[i]) + BOX, y(parents[i]) + height / 2, x(i), y(i) + height / 2);
      if (accepted.has(i)) pathEdges += d;
      else edges[Math.min(Math.floor(probabilities[i] * NUM_WIDTHS), NUM_WIDTHS - 1)] += d;
    }
    if (merged && !accepted.has(i)) {
      others += `M${x(i)} ${y(i)}h${BOX}v${height}h${-BOX}z`;
      continue;
    }
    const kind = i === 0 ? "root" : accepted.has(i) ? "node accepted" : "node";
    boxes.push(draw("rect", { class: kind, x: x(i), y: y(i), width: BOX, height, rx: 3, "data-node": i }));
    if (text || (accepted.has(i) && row >= 12)) labels.push(label(tokens[i], x(i), y(i), height, textKind(kind, i)));
  }
  const last = path.at(-1);
  const bonusEdge = edge(x(last) + BOX, y(last) + height / 2, bonus.x, bonus.y + bonus.side / 2);
  const drawing = draw(
    "svg",
    { viewBox: `0 0 ${width} ${tall}`, width, height: tall, role: "img", "aria-label": inWords(trace) },
    ...edges.map((d, i) => draw("path", { class: "edge", d, "stroke-width": 0.6 + i * 0.9 })),
    draw("path", { class: "edge accepted", d: pathEdges, "stroke-width": 4 }),
    draw("path", { class: "edge bonus", d: bonusEdge, "stroke-width": 2 }),
    draw("path", { class: "nodes", d: others }),
    ...boxes,
    draw("rect", { class: "bonus", x: bonus.x, y: bonus.y, width: BOX, height: bonus.side, rx: 3 }),
    ...labels,
    label(`+${trace.bonus_token.token}`, bonus.x, bonus.y, bonus.side, textKind("bonus", -1)),
  );
  drawing.style.minWidth = `${width * SMALLEST}px`;
  return drawing;
}

/** The node whose box holds a place of the drawing, or -1. */
export function nodeAt(trace, at) {
  const { x, y, height } = layout(trace);
  return trace.parents.findIndex((_, i) => at.x >= x(i) && at.x <= x(i) + BOX && at.y >= y(i) && at.y <= y(i) + height);
}

/** A frame around a node. */
export function frameOf(trace, node) {
  const { x, y, height } = layout(trace);
  return draw("rect", { class: "pointed", x: x(node) - 2, y: y(node) - 2, width: BOX + 4, height: height + 4, rx: 4 });
}

/** Where an arrow key leads from a node: to its parent, its likeliest or accepted child, or the next node of its depth. */
export function neighbour(trace, node, key) {
  const { parents, depths, path } = trace;
  if (key === "ArrowLeft") return Math.max(parents[node], 0);
  if (key === "ArrowRight") {
    const child = path.find((each) => parents[each] === node) ?? parents.indexOf(node);
    return child > 0 ? child : node;
  }
  const { rows } = layout(trace);
  const level = parents.map((_, i) => i).filter((i) => depths[i] === depths[node]);
  const ordered = level.sort((a, b) => rows[a] - rows[b]);
  return ordered[ordered.indexOf(node) + (key === "ArrowDown" ? 1 : -1)] ?? node;
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
  const scored = trace.scoring === "conditioned" ? ", scored on their paths" : "";
  return `Round ${trace.round}: ${drafted} nodes verified${scored}, ${path}; bonus token ${visible(trace.bonus_token.token)}`;
}
