// The race: one prompt with trees and without, each alone on the engine so that neither slows the other, shown side by side.

import { make } from "./dom.js";
import { MessageView, blank } from "./message.js";

const SHORT = 16; // tokens; fewer measure no speed, as in ddtree bench

/** A lane of the race: an answer, its speed, and when which piece of it came. */
class Lane {
  constructor(name) {
    this.view = new MessageView(blank("assistant"), true);
    this.speed = make("output", {}, "waiting");
    this.bar = make("progress", { max: 1, value: 0, "aria-label": name });
    this.root = make("section", { "aria-label": name }, make("h3", {}, name), this.speed, this.bar, this.view.thought, this.view.text);
    this.view.thought.open = true; // most of a thinking model's race is run in there
    this.steps = [];
  }

  /** The race is off. */
  end() {
    this.ended = true;
    if (this.report) return;
    this.speed.textContent = "stopped";
    this.bar.value = 0;
  }

  /** Show its pieces again, at the pace at which they came. */
  replay(shaded) {
    const { message } = this.view;
    const whole = { ...message };
    Object.assign(message, blank("assistant"));
    this.view.text.replaceChildren();
    this.view.thoughtText.replaceChildren();
    const began = performance.now();
    let i = 0;
    const step = () => {
      const now = performance.now() - began;
      while (i < this.steps.length && this.steps[i].at <= now) this.view.add(...this.steps[i++].piece);
      this.bar.value = i / Math.max(this.steps.length, 1);
      if (i < this.steps.length && !this.ended) requestAnimationFrame(step);
      else {
        Object.assign(message, whole);
        this.view.draw();
      }
    };
    this.view.shaded = shaded;
    requestAnimationFrame(step);
  }
}

/** Runs `ask(body, onPiece, watched)` for both, the panel watching the first. Returns the drawing, a promise of plain decoding's
 * ddtree object, and `first()`: the first lane's message as far as it is written, and its ddtree object as soon as it is whole. */
export function race(ask, body, shaded) {
  const lanes = [new Lane(body.tree_budget ? "With draft trees" : "Tree budget 0"), new Lane("Plain decoding")];
  const verdict = make("p", { class: "verdict", role: "status" });
  const note = make("p", { class: "caption" }, "One after the other, so that neither slows the other; the first is then replayed at its own pace beside the second.");
  const root = make("article", { class: "race" }, make("h3", {}, "Race"), make("div", { class: "lanes" }, ...lanes.map((lane) => lane.root)), verdict, note);
  const run = async (lane, budget, watched) => {
    const began = performance.now();
    lane.view.shaded = shaded;
    lane.speed.textContent = "running";
    lane.bar.removeAttribute("value");
    const answer = await ask({ ...body, tree_budget: budget }, (...piece) => {
      lane.steps.push({ at: performance.now() - began, piece });
      lane.view.add(...piece);
    }, watched);
    lane.bar.value = 1;
    lane.report = answer.report;
    lane.speed.textContent = answer.report?.tokens_per_second ? `${answer.report.tokens_per_second.toFixed(1)} tokens/s` : "too short to measure";
    lane.view.draw();
  };
  let first = { message: lanes[0].view.message, report: null };
  const both = async () => {
    try {
      await run(lanes[0], body.tree_budget, true);
      first = { message: { ...lanes[0].view.message }, report: lanes[0].report };
      lanes[0].replay(shaded);
      await run(lanes[1], 0, false);
      verdict.textContent = judge(lanes, first.message);
      return lanes[1].report;
    } catch (error) {
      for (const lane of lanes) lane.end();
      throw error;
    }
  };
  return { root, done: both(), first: () => first };
}

function judge([tree, plain], first) {
  const { content, reasoning } = plain.view.message;
  const same = content === first.content && reasoning === first.reasoning;
  const text = same ? "The texts are the same." : "The texts differ: see ddtree audit.";
  const [fast, slow] = [tree.report?.tokens_per_second, plain.report?.tokens_per_second];
  if (tree.report?.nodes_verified === 0) return `Both were plain decoding, so what tells their speeds apart is chance${because(tree.report)}. ${text}`;
  if (!fast || !slow || Math.min(tree.report.output_tokens, plain.report.output_tokens) < SHORT) return `Too short to compare. ${text}`;
  return `${(fast / slow).toFixed(2)} times the speed of plain decoding. ${text}`;
}

function because({ tree_budget, reason }) {
  return tree_budget === 0 ? ": choose a tree budget above 0" : reason ? ` (${reason})` : "";
}
