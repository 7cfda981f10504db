"""The trees of an answer in a real browser: what is drawn is what was verified, and long traces cost little."""
# ruff: noqa: F811

import re

from tests.server.browser import ask, chromium, last_answer, serving_trees, url, visit  # noqa: F401
from tests.server.scripted import LetterTokenizer

SETTINGS = {"seed": 11, "temperature": 0.8, "max-tokens": 40}


def rounds_drawn(page):
    """Of every round that the panel kept: the drawing's labels and counts."""
    return page.evaluate(
        """async () => {
          const slider = document.querySelector("[data-part=round]");
          const texts = (kind) => [...document.querySelectorAll(`.tree text.${kind}:not(.piece)`)].map((node) => node.textContent);
          const found = [];
          for (let i = 0; i <= Number(slider.max); i++) {
            slider.value = i;
            slider.dispatchEvent(new Event("input"));
            await new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 20));
            const columns = [...document.querySelectorAll(".tree rect.node")].map((node) => node.getAttribute("x"));
            const pieces = [...document.querySelectorAll(".tree text.piece")].map((node) => node.textContent);
            found.push({ root: texts("root"), accepted: texts("accepted"), bonus: texts("bonus"), columns, pieces });
          }
          return found;
        }"""
    )


def test_trees_are_drawn_whose_paths_spell_the_answer(chromium, url):
    with visit(chromium, url, settings=SETTINGS | {"seed": 42, "auto": False, "budget": 16}) as page:
        ask(page)
        rounds = rounds_drawn(page)
        answer = last_answer(page)
        assert len(rounds) > 3
        drawn = sum(len(each["columns"]) for each in rounds)
        assert drawn == int(page.inner_text("[data-part=nodes]")) > 16
        assert any(len(set(each["columns"])) < len(each["columns"]) for each in rounds), "no tree branches"
        # The last round may go past the stop; nothing after it is shown.
        assert spelt_by(rounds).partition("</s>")[0][: len(answer)] == answer and len(answer) > 5
        # Nor is it counted: every round's tokens, and prefill's one, are those of the answer.
        tokens, mean = re.match(r"(\d+) tokens.*, ([\d.]+) a round", page.inner_text("article.assistant .foot")).groups()
        assert mean == page.inner_text("[data-part=length]") == f"{(int(tokens) - 1) / len(rounds):.2f}"
        assert f"mean {mean}" in page.get_attribute("[data-part=chart] svg", "aria-label")
        shaded = page.locator("article.assistant .round")
        assert "".join(shaded.all_inner_texts()) == answer and 1 < shaded.count() <= len(rounds) + 1
        page.uncheck("#shade")
        assert page.locator(".round").count() == 0 and last_answer(page) == answer


def spelt_by(rounds):
    """The text of the accepted paths and bonus tokens; tokens that do not end their character add none."""
    return "".join([*rounds[0]["root"], *(t for each in rounds for t in [*each["accepted"], *(b[1:] for b in each["bonus"])])])


def test_characters_of_several_tokens_are_shown_whole(chromium):
    """é lies in two of this tokenizer's tokens; the first is a mark, the second the letter."""
    with serving_trees(tokenizer=LetterTokenizer()) as url, visit(
        chromium, url, settings={"seed": 276, "temperature": 1, "max-tokens": 120, "auto": False, "budget": 16}
    ) as page:
        ask(page)
        rounds, answer = rounds_drawn(page), last_answer(page)
        assert spelt_by(rounds).replace("␣", " ").partition("</s>")[0].strip() == answer.strip() and "é" in answer
        assert {each.removeprefix("+") for drawn in rounds for each in drawn["pieces"]} == {"‹c3›"}
        assert "bytes:" not in page.inner_html("#panel")


def test_budget_0_shows_no_tree(chromium, url):
    with visit(chromium, url, settings=SETTINGS | {"auto": False, "budget": 0}) as page:
        ask(page)
        assert page.locator(".tree svg").count() == 0
        assert "plain decoding" in page.inner_text("[data-part=caption]")
        assert page.inner_text("[data-part=nodes]") == "0" and last_answer(page)


LARGE = """async ([nodes, rounds, perFrame]) => {
  const { Panel } = await import("./ui/panel.js");
  const panel = new Panel(document.getElementById("panel"));
  const parents = Array.from({ length: nodes + 1 }, (_, i) => (i ? Math.floor((i - 1) / 3) : -1));
  const depths = [];
  parents.forEach((parent, i) => depths.push(i ? depths[parent] + 1 : 0));
  const frames = [];
  const middle = (values, share = 0.5) => [...values].sort((a, b) => a - b)[Math.floor(share * (values.length - 1))];
  let before = performance.now();
  const idle = [];
  for (let i = 0; i < 30; i++) {
    await new Promise(requestAnimationFrame);
    idle.push(performance.now() - before);
    before = performance.now();
  }
  for (let round = 1; round <= rounds; round++) {
    panel.add({
      round, parents, depths, tokens: parents.map((_, i) => `t${i}`), probabilities: parents.map(() => 0.4), path: [0, 1, 4],
      bonus_token: { token_id: 1, token: "x" }, emitted: [1, 2, 3], round_ms: 30,
      stage_ms: { draft: 5, build: 1, verify: 20, accept: 1, commit: 1 },
    });
    if (round % perFrame) continue;
    await new Promise(requestAnimationFrame);
    frames.push(performance.now() - before);
    before = performance.now();
  }
  await new Promise((done) => setTimeout(done, 300));
  const others = document.querySelector(".tree path.nodes").getAttribute("d").split("M").length - 1;
  const drawn = document.querySelectorAll(".tree rect.node").length + others;
  return { drawn, kept: panel.kept.length, charted: panel.lengths.length, elements: document.querySelectorAll("*").length, idle: middle(idle), median: middle(frames), p95: middle(frames, 0.95) };
}"""


HEAP = """async ([nodes, rounds]) => {
  const { Panel } = await import("./ui/panel.js");
  window.held ??= new Panel(document.getElementById("panel"));
  const parents = Array.from({ length: nodes + 1 }, (_, i) => i - 1);
  for (let round = 1; round <= rounds; round++) {
    window.held.add({
      round, parents: [...parents], depths: parents.map((each) => each + 1), tokens: parents.map((_, i) => `${i} of ${round}`),
      probabilities: parents.map(() => Math.random()), path: [0, 1], bonus_token: { token_id: 1, token: "x" }, emitted: [1, 2],
      round_ms: 30, stage_ms: { draft: 5, build: 1, verify: 20, accept: 1, commit: 1 },
    });
    if (round % 20 === 0) await new Promise((done) => setTimeout(() => requestAnimationFrame(done), 0));
  }
}"""


def test_a_trace_of_500_rounds_fills_no_memory(chromium, url, record_property):
    """Bytes of the page's heap after 100 rounds, and after 500 more."""

    def heap(rounds):
        page.evaluate(HEAP, [256, rounds])
        devtools.send("HeapProfiler.collectGarbage")
        return devtools.send("Runtime.getHeapUsage")["usedSize"]

    with visit(chromium, url) as page:
        devtools = page.context.new_cdp_session(page)
        before, after = heap(100), heap(500)
        record_property("heap_bytes", [before, after])
    assert after - before < 2_000_000  # 500 such rounds hold 15 MB


def test_large_trees_stay_smooth_and_long_traces_small(chromium, url, record_property):
    with visit(chromium, url) as page:
        found = page.evaluate(LARGE, [1024, 60, 1])
        many = page.evaluate(LARGE, [64, 500, 10])
        record_property("frames_ms", found)
    assert found["drawn"] == 1024 and found["elements"] < 400
    assert many["drawn"] == 64 and many["kept"] == 64 and many["charted"] == 160 and many["elements"] < 400
    # 17 ms on a quiet machine; where frames without a tree take long themselves, a few times as long as those.
    slow = max(found["idle"] / 17, 1)
    assert found["median"] < 50 * slow and found["p95"] < 400 * slow, found
