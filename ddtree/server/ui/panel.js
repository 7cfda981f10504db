// The live panel: the tree of the round at hand or of an earlier one, acceptance over time, stage times, speeds.

import { RoundReader, whole } from "./characters.js";
import { draw, make } from "./dom.js";
import { drawTree, frameOf, inWords, neighbour, nodeAt, visible } from "./tree.js";

const KEPT = 64; // rounds whose trees can be looked at again, so that a long answer does not fill the memory
const CHARTED = 160; // rounds in the chart
const LARGE = 200; // nodes; such trees are drawn less often
const PAUSE_MS = 60;
const LARGE_PAUSE_MS = 200;
const STAGES = ["draft", "build", "verify", "accept", "commit"];

export class Panel {
  constructor(root, most = KEPT) {
    this.most = most;
    this.parts = Object.fromEntries([...root.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]));
    this.parts.round.addEventListener("input", () => this.schedule(true));
    for (const kind of ["pointermove", "pointerdown"]) this.parts.tree.addEventListener(kind, (event) => this.pointAt(event));
    this.parts.tree.addEventListener("keydown", (event) => this.step(event));
    // On a small screen the conversation comes first.
    this.parts.more.open = matchMedia("(min-width: 56.01rem)").matches;
    this.drawnAt = 0;
    this.clear();
  }

  /** A new answer begins. */
  clear() {
    this.kept = [];
    this.reading = new RoundReader();
    this.lengths = [];
    this.total = { rounds: 0, nodes: 0, emitted: 0, ms: 0 };
    this.report = this.plain = null;
    this.parts.round.max = this.parts.round.value = 0;
    this.schedule(true);
  }

  /** A round has come. */
  add(trace) {
    const live = this.parts.round.value === this.parts.round.max;
    this.kept.push(this.reading.legible(trace));
    if (this.kept.length > this.most) this.kept.shift();
    this.lengths.push(trace.emitted.length); // without what lay after a stop
    if (this.lengths.length > CHARTED) this.lengths.shift();
    this.total.rounds++;
    this.total.nodes += trace.tokens.length - 1;
    this.total.emitted += trace.emitted.length;
    this.total.ms += trace.round_ms ?? 0;
    this.parts.round.max = Math.max(this.kept.length - 1, 0);
    if (live) this.parts.round.value = this.parts.round.max;
    this.schedule();
  }

  /** The answer is whole: `report` is its ddtree object. */
  finish(report) {
    this.report = report;
    this.schedule(true);
  }

  /** Plain decoding of the same prompt: its ddtree object. */
  compare(plain) {
    this.plain = plain;
    this.schedule(true);
  }

  schedule(now = false) {
    this.due ||= now;
    if (this.pending) return;
    this.pending = true;
    const pause = (this.shown?.tokens.length ?? 0) > LARGE ? LARGE_PAUSE_MS : PAUSE_MS;
    const wait = this.due ? 0 : Math.max(0, this.drawnAt + pause - performance.now());
    setTimeout(() => requestAnimationFrame(() => this.draw()), wait);
  }

  draw() {
    this.pending = this.due = false;
    this.drawnAt = performance.now();
    const before = this.shown;
    const trace = (this.shown = this.kept[Number(this.parts.round.value)]);
    this.parts.round.disabled = this.kept.length < 2;
    this.parts.round.setAttribute("aria-valuetext", trace ? `round ${trace.round}` : "no round yet");
    this.parts.caption.textContent = trace ? caption(trace) : "Ask something, and the draft tree of each round appears here.";
    this.parts.tree.replaceChildren(...(trace && trace.tokens.length > 1 ? [drawTree(trace)] : []));
    if (this.parts.tree.firstChild && trace !== before) this.reveal(this.parts.tree.querySelector("rect.bonus"));
    if (trace !== before) this.point(-1);
    else if (this.pointed >= 0) this.point(this.pointed);
    this.parts.stages.replaceChildren(...(trace ? stages(trace) : []));
    this.parts.chart.replaceChildren(...(this.lengths.length ? [chart(this.lengths)] : []));
    this.figures();
  }

  /** Scroll the drawing, and nothing else, until this part of it is seen. */
  reveal(part) {
    const box = this.parts.tree;
    const [inner, frame] = [part.getBoundingClientRect(), box.getBoundingClientRect()];
    const beyond = (end, start, far, near) => Math.max(end - far + 8, 0) || Math.min(start - near - 8, 0);
    box.scrollLeft += beyond(inner.right, inner.left, frame.right, frame.left);
    box.scrollTop += beyond(inner.bottom, inner.top, frame.bottom, frame.top);
  }

  figures() {
    const { rounds, nodes, emitted, ms } = this.total;
    const report = this.report;
    const speed = report ? report.tokens_per_second : ms && (1000 * emitted) / ms;
    const plain = this.plain?.tokens_per_second;
    const figures = {
      rounds,
      nodes: report?.nodes_verified ?? nodes,
      length: rounds ? (emitted / rounds).toFixed(2) : "–",
      speed: speed ? speed.toFixed(1) : "–",
      plain: plain ? plain.toFixed(1) : "–",
      mode: report ? `${report.mode.replace("_", " ")}, budget ${report.tree_budget}` : "–",
    };
    for (const [name, value] of Object.entries(figures)) this.parts[name].textContent = value;
    this.parts.plain.parentElement.hidden = !plain;
    this.parts.reason.textContent = report?.reason ?? "";
  }

  pointAt(event) {
    const drawing = this.parts.tree.querySelector("svg");
    if (!drawing) return;
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(drawing.getScreenCTM().inverse());
    const node = nodeAt(this.shown, at);
    if (node >= 0) this.point(node);
  }

  /** Arrow keys go from node to node, Home to the root. */
  step(event) {
    const arrow = event.key.startsWith("Arrow");
    if (!this.parts.tree.firstChild || !(arrow || event.key === "Home")) return;
    event.preventDefault();
    this.point(arrow && this.pointed >= 0 ? neighbour(this.shown, this.pointed, event.key) : 0);
    this.reveal(this.parts.tree.querySelector(".pointed"));
  }

  /** Frame a node and say what it is; -1 is none. */
  point(node) {
    this.pointed = node;
    this.parts.tree.querySelector(".pointed")?.remove();
    this.parts.node.textContent = "";
    if (node < 0) return;
    const trace = this.shown;
    this.parts.tree.firstChild.append(frameOf(trace, node));
    const chance = `${(100 * trace.probabilities[node]).toFixed(1)} %`;
    const fate = trace.path.includes(node) ? "accepted" : "not accepted";
    const what = node ? `node ${node}, depth ${trace.depths[node]}, ${chance}, ${fate}` : "root";
    const piece = trace.pieces.has(node) ? `, piece of ${visible(whole(trace, node) || "a character")}` : "";
    this.parts.node.textContent = `${visible(trace.tokens[node])} (${what}${piece})`;
  }
}

function caption(trace) {
  const words = inWords(trace);
  return words.length > 300 ? `${words.slice(0, 300)}…` : words;
}

/** A bar of the round's stages, each as wide as its time, and the times below it. */
function stages({ stage_ms }) {
  const bars = STAGES.map((stage) => {
    const bar = make("span", { class: `stage ${stage}` });
    bar.style.flexGrow = stage_ms[stage];
    return bar;
  });
  const times = STAGES.map((stage) => make("span", { class: `time ${stage}` }, `${stage} ${stage_ms[stage].toFixed(1)} ms`));
  return [make("div", { class: "bar" }, ...bars), make("p", { class: "caption times" }, ...times)];
}

/** Acceptance lengths of the last rounds as bars, their mean as a line. */
function chart(lengths) {
  const [width, height, most] = [320, 64, Math.max(4, ...lengths)];
  const mean = lengths.reduce((sum, length) => sum + length, 0) / lengths.length;
  const step = width / Math.max(lengths.length, 24);
  const y = (value) => height - (value / most) * (height - 4);
  const bars = lengths.map((length, i) => `M${i * step} ${height}V${y(length)}h${step * 0.8}V${height}z`).join("");
  const words = `Acceptance length of the last ${lengths.length} rounds: mean ${mean.toFixed(2)}, most ${Math.max(...lengths)}`;
  return draw(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words, preserveAspectRatio: "none" },
    draw("path", { class: "bars", d: bars }),
    draw("path", { class: "mean", d: `M0 ${y(mean)}H${width}` }),
  );
}
