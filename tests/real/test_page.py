"""The chat page over the embedded hybrid pair: what is drawn is what was verified, and spells what was answered."""
# ruff: noqa: F811

from __future__ import annotations

import re

import pytest

from ddtree.server.facts import facts_of
from tests.real.test_hybrid_tiny import hybrid  # noqa: F401
from tests.server.browser import ask, chromium, last_answer, visit  # noqa: F401
from tests.server.fakes import serving
from tests.server.live import live

ROUNDS = """async () => {
  const slider = document.querySelector("[data-part=round]");
  const found = [];
  for (let i = 0; i <= Number(slider.max); i++) {
    slider.value = i;
    slider.dispatchEvent(new Event("input"));
    await new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 20));
    const nodes = [...document.querySelectorAll(".tree rect.node")];
    const rows = new Set(nodes.map((node) => node.getAttribute("y")));
    const root = document.querySelector(".tree text.root").textContent;
    found.push([root, document.querySelector(".tree svg").getAttribute("aria-label"), nodes.length, rows.size]);
  }
  return found;
}"""


@pytest.mark.parametrize("thinking", [True, False])
def test_the_tree_of_every_round_is_drawn_and_spells_the_answer(chromium, hybrid, thinking):
    engine = hybrid.engine
    engine.gate = None
    settings = {"temperature": 0, "max-tokens": 120, "auto": False, "budget": 24, "thinking": str(thinking).lower()}
    with (
        serving(engine, facts=facts_of(engine, 16), tokenizer=hybrid.tokenizer) as client,
        live(client.app) as url,
        visit(chromium, url, settings=settings) as page,
    ):
        ask(page, "What is 478 + 356?")
        answer = last_answer(page)
        thought = page.locator("article.assistant .thought .text").last.text_content()
        verified = int(page.inner_text("[data-part=nodes]"))
        rounds = page.evaluate(ROUNDS)
    assert sum(nodes for *_, nodes, _ in rounds) == verified > 24
    assert max(rows for *_, rows in rounds) > 1
    spelt = rounds[0][0]  # the root of the first round is prefill's token
    for _, words, *_ in rounds:
        path, bonus = re.fullmatch(r"Round \d+: \d+ nodes verified, scored on their paths, (?:accepted (.*)|none accepted); bonus token (.*)", words).groups()
        spelt += (path or "").replace(" ", "") + bonus
    spelt = spelt.replace("␣", " ").replace("⏎", "\n")
    assert answer.strip() and answer in spelt
    assert bool(thought) == thinking and thought.strip() in spelt
    assert ("834" in answer) or not thinking
