// One message on the page: the thought folded, the text as Markdown, and buttons below it.

import { make } from "./dom.js";
import { render } from "./markdown.js";
import { extend, Shade } from "./rounds.js";

const REST = 2; // times what drawing took
const LONGEST_REST_MS = 1000;

/** Copy text, also where the page came over plain HTTP from elsewhere. */
export async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    const area = make("textarea", { readonly: "" });
    area.value = text;
    button.after(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
    area.remove();
  }
  setTimeout(() => (button.textContent = before), 1500);
}

/** A message's data: what is kept of it in the history. */
export function blank(role, content = "") {
  return { role, content, reasoning: "", rounds: [], thoughtRounds: [] };
}

/** Draws a message and draws it again as it grows. */
export class MessageView {
  constructor(message, shaded) {
    this.message = message;
    this.shaded = shaded;
    this.took = 0; // ms of the last drawing
    this.around = (draw) => draw(); // what is done before and after it
    const user = message.role === "user";
    this.text = make("div", { class: user ? "text plain" : "text" });
    this.thoughtText = make("div", { class: "text" });
    this.thought = make("details", { class: "thought" }, make("summary", {}, "Thought"), this.thoughtText);
    this.foot = make("p", { class: "foot" });
    const button = make("button", { type: "button" }, "Copy");
    button.addEventListener("click", () => copy(message.content, button));
    const who = make("h3", {}, user ? "You" : "Answer");
    this.root = make("article", { class: message.role }, who, this.thought, this.text, make("div", { class: "below" }, this.foot, button));
    this.root.addEventListener("click", ({ target }) => {
      if (target.classList?.contains("copy-code")) copy(target.parentElement.querySelector("code").textContent, target);
    });
    this.draw();
  }

  /** A piece of the answer came with this round (0 is prefill), which brought so many tokens. */
  add(delta, round, tokens) {
    const { message } = this;
    if (delta.reasoning_content) {
      message.reasoning += delta.reasoning_content;
      extend(message.thoughtRounds, message.reasoning.length, round, tokens);
    }
    if (delta.content) {
      message.content += delta.content;
      extend(message.rounds, message.content.length, round, tokens);
    }
    this.schedule();
  }

  /** Draw soon; what takes long to draw is drawn less often, so that the page can be used meanwhile. */
  schedule() {
    if (this.pending) return;
    this.pending = true;
    setTimeout(() => requestAnimationFrame(() => this.around(() => this.draw())), Math.min(REST * this.took, LONGEST_REST_MS));
  }

  draw() {
    this.pending = false;
    const began = performance.now();
    setTimeout(() => (this.took = performance.now() - began)); // layout included
    const { message } = this;
    const shade = (rounds) => (this.shaded && rounds.length ? new Shade(rounds) : null);
    this.thought.hidden = !message.reasoning;
    if (message.reasoning) render(this.thoughtText, message.reasoning, shade(message.thoughtRounds));
    if (message.role === "user") this.text.textContent = message.content;
    else render(this.text, message.content, shade(message.rounds));
    this.foot.textContent = message.foot ?? "";
  }

  /** An error in the place of the rest. */
  fail(words) {
    this.root.append(make("p", { class: "fault", role: "alert" }, words));
  }
}
