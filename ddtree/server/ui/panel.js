// The live panel: the tree of the round at hand or of an earlier one, acceptance over time, stage times, speeds.

import { draw, make } from "./dom.js";
import { drawTree, inWords, visible } from "./tree.js";

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
    this.parts.tree.addEventListener("pointermove", (event) => this.point(event.target));
    // On a small screen the conversation comes first.
    this.parts.more.open = matchMedia("(min-width: 56.01rem)").matches;
    this.drawnAt = 0;
    this.clear();
  }

  /** A new answer begins. */
  clear() {
    this.kept = [];
    this.lengths = [];
    this.total = { rounds: 0, nodes: 0, emitted: 0 };
    this.report = null;
    this.schedule(true);
  }

  /** A round has come. */
  add(trace) {
    const live = this.parts.round.value === this.parts.round.max;
    this.kept.push(trace);
    if (this.kept.length > this.most) this.kept.shift();
    this.lengths.push(trace.path.length);
    if (this.lengths.length > CHARTED) this.lengths.shift();
    this.total.rounds++;
    this.total.nodes += trace.tokens.length - 1;
    this.total.emitted += trace.emitted.length;
    this.parts.round.max = Math.max(this.kept.length - 1, 0);
    if (live) this.parts.round.value = this.parts.round.max;
    this.schedule();
  }

  /** The answer is whole: `report` is its ddtree object. */
  finish(report) {
    this.report = report;
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
    const trace = (this.shown = this.kept[Number(this.parts.round.value)]);
    this.parts.round.disabled = this.kept.length < 2;
    this.parts.round.setAttribute("aria-valuetext", trace ? `round ${trace.round}` : "no round yet");
    this.parts.caption.textContent = trace ? caption(trace) : "Ask something, and the draft tree of each round appears here.";
    this.parts.tree.replaceChildren(...(trace && trace.tokens.length > 1 ? [drawTree(trace)] : []));
    if (this.parts.tree.firstChild) this.showEnd(this.parts.tree.firstChild);
    this.parts.node.textContent = "";
    this.parts.stages.replaceChildren(...(trace ? stages(trace) : []));
    this.parts.chart.replaceChildren(...(this.lengths.length ? [chart(this.lengths)] : []));
    this.figures();
  }

  /** Scroll the drawing, and nothing else, to where the accepted path ends. */
  showEnd(drawing) {
    const box = this.parts.tree;
    const bonus = drawing.querySelector("rect.bonus").getBoundingClientRect();
    const frame = box.getBoundingClientRect();
    const beyond = (end, start, far, near) => Math.max(end - far + 8, 0) || Math.min(start - near - 8, 0);
    box.scrollLeft += beyond(bonus.right, bonus.left, frame.right, frame.left);
    box.scrollTop += beyond(bonus.bottom, bonus.top, frame.bottom, frame.top);
  }

  figures() {
    const { rounds, nodes, emitted } = this.total;
    const report = this.report;
    const speed = report?.tokens_per_second;
    const figures = {
      rounds,
      nodes: report?.nodes_verified ?? nodes,
      length: rounds ? (report?.mean_acceptance_length ?? emitted / rounds).toFixed(2) : "–",
      speed: speed ? `${speed.toFixed(1)}` : "–",
      mode: report ? `${report.mode.replace("_", " ")}, budget ${report.tree_budget}` : "–",
    };
    for (const [name, value] of Object.entries(figures)) this.parts[name].textContent = value;
    this.parts.reason.textContent = report?.reason ?? "";
  }

  /** Say which node the pointer is on. */
  point(target) {
    const node = Number(target.dataset?.node);
    const trace = this.shown;
    if (!trace || Number.isNaN(node)) return;
    const chance = `${(100 * trace.probabilities[node]).toFixed(1)} %`;
    const what = node ? `node ${node}, depth ${trace.depths[node]}, ${chance}` : "root";
    this.parts.node.textContent = `${visible(trace.tokens[node])} (${what})`;
  }
}

function caption(trace) {
  const words = inWords(trace);
  return words.length > 300 ? `${words.slice(0, 300)}…` : words;
}

/** A bar of the round's stages, each as wide as its time. */
function stages(trace) {
  return STAGES.map((stage) => {
    const words = `${stage} ${trace.stage_ms[stage].toFixed(1)} ms`;
    const node = make("span", { class: `stage ${stage}`, title: words }, words);
    node.style.flexGrow = trace.stage_ms[stage];
    return node;
  });
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
