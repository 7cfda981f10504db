// Which round brought which part of a text: [end, round, tokens] triples in order, round 0 being prefill.

import { make } from "./dom.js";

const DEEPEST = 8; // rounds that brought more are shaded alike

/** Note that the text now reaches `end`, by this round. */
export function extend(rounds, end, round, tokens) {
  const last = rounds.at(-1);
  if (last && last[1] === round) last[0] = end;
  else rounds.push([end, round, tokens]);
}

/** Answers, for ascending places, who brought them; and wraps text accordingly. */
export class Shade {
  constructor(rounds) {
    this.rounds = rounds;
    this.i = 0;
  }

  at(place) {
    if (this.i && this.rounds[this.i - 1][0] > place) this.i = 0;
    while (this.i < this.rounds.length && this.rounds[this.i][0] <= place) this.i++;
    return this.rounds[this.i] ?? null;
  }

  wrap(node, [, round, tokens]) {
    const title = round ? `round ${round}: ${tokens} ${tokens === 1 ? "token" : "tokens"}` : "prefill: 1 token";
    // Neighbours of one length alternate, so that rounds can be told apart.
    return make("span", { class: `round by${Math.min(tokens, DEEPEST)}${round % 2 ? " odd" : ""}`, title }, node);
  }
}
