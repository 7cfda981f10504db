// A saved trace, round by round: the panel of the chat page, fed from this page's own data.

import { Reader } from "./characters.js";
import { Panel } from "./panel.js";
import { Shade, extend } from "./rounds.js";

const PACE_MS = [1000, 300, 60];
const groups = JSON.parse(document.getElementById("trace").textContent);
const at = (id) => document.getElementById(id);
const panel = new Panel(at("panel"), Infinity);
const slider = panel.parts.round;
let playing = null;

for (const [i, { name }] of groups.entries()) at("group").append(new Option(name, i));
at("group").addEventListener("change", () => show(groups[at("group").value]));
slider.addEventListener("input", mark);
at("pace").addEventListener("change", () => playing && play(true));
at("play").addEventListener("click", () => play(playing === null));

/** All rounds of one choice, at its first. */
function show({ rounds }) {
  play(false);
  panel.clear();
  for (const round of rounds) panel.add(round);
  slider.value = 0;
  write(rounds);
  mark();
  panel.schedule(true);
}

/** The text that the rounds brought, shaded. */
function write(rounds) {
  const places = [];
  const reader = new Reader();
  let text = reader.take(rounds[0].tokens[0]);
  extend(places, text.length, 0, 1);
  for (const { round, path, tokens, bonus_token, emitted } of rounds) {
    const brought = [...path.slice(1).map((node) => tokens[node]), bonus_token.token].slice(0, emitted.length);
    text += brought.map((token) => reader.take(token)).join("");
    extend(places, text.length, round, emitted.length);
  }
  text += reader.end();
  places.at(-1)[0] = text.length;
  const shade = new Shade(places);
  let from = 0;
  const spans = places.map(([end, round, tokens]) => {
    const span = shade.wrap(document.createTextNode(text.slice(from, end)), [end, round, tokens]);
    from = end;
    return span;
  });
  at("text").replaceChildren(...spans);
}

function mark() {
  at("text").querySelectorAll(".here").forEach((span) => span.classList.remove("here"));
  at("text").children[Number(slider.value) + 1]?.classList.add("here");
}

function play(yes) {
  clearInterval(playing);
  playing = yes ? setInterval(next, PACE_MS[at("pace").value]) : null;
  at("play").textContent = yes ? "Pause" : "Play";
}

function next() {
  if (slider.value === slider.max) return play(false);
  slider.value = Number(slider.value) + 1;
  slider.dispatchEvent(new Event("input"));
}

show(groups[0]);
