"""The page in a real browser: it shows what the server did, keeps what it should, and lets no text become markup."""

from dataclasses import replace

import pytest

from tests.scripted import EOS, scripted_engine
from tests.server.browser import ask, chromium, last_answer, until, visit  # noqa: F401
from tests.server.fakes import FACTS, THINKING_TEMPLATE, ScriptEngine, serving, wait_for
from tests.server.live import live
from tests.server.scripted import DRAFTERS, LetterTokenizer
from tests.server.scripted import FACTS as SCRIPTED_FACTS

SETTINGS = {"seed": 11, "temperature": 0.8, "max-tokens": 40}


class Letters(LetterTokenizer):
    """One letter a token, so that paths can be read off the drawing."""

    def token_bytes(self, token_id):
        return b"</s>" if token_id == EOS else bytes([ord("a") + token_id])


@pytest.fixture(scope="module")
def url():
    engine = scripted_engine(**DRAFTERS["some"], max_running=8)
    engine.gate = None
    with serving(engine, facts=SCRIPTED_FACTS, tokenizer=Letters()) as client, live(client.app) as url:
        yield url


def rounds_drawn(page):
    """Of every round that the panel kept: the drawing's labels and counts."""
    return page.evaluate(
        """async () => {
          const slider = document.querySelector("[data-part=round]");
          const texts = (kind) => [...document.querySelectorAll(`.tree text.${kind}`)].map((node) => node.textContent);
          const found = [];
          for (let i = 0; i <= Number(slider.max); i++) {
            slider.value = i;
            slider.dispatchEvent(new Event("input"));
            await new Promise((done) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 20));
            const columns = [...document.querySelectorAll(".tree rect.node")].map((node) => node.getAttribute("x"));
            found.push({ root: texts("root"), accepted: texts("accepted"), bonus: texts("bonus"), columns });
          }
          return found;
        }"""
    )


def test_trees_are_drawn_whose_paths_spell_the_answer(chromium, url):  # noqa: F811
    with visit(chromium, url, settings=SETTINGS | {"auto": False, "budget": 16}) as page:
        ask(page)
        rounds = rounds_drawn(page)
        answer = last_answer(page)
        assert len(rounds) > 3
        drawn = sum(len(each["columns"]) for each in rounds)
        assert drawn == int(page.inner_text("[data-part=nodes]")) > 16
        assert any(len(set(each["columns"])) < len(each["columns"]) for each in rounds), "no tree branches"
        spelt = "".join([*rounds[0]["root"], *(t for each in rounds for t in [*each["accepted"], each["bonus"][0].removeprefix("+")])])
        # The last round may go past the stop; nothing after it is shown.
        assert spelt.partition("</s>")[0][: len(answer)] == answer and len(answer) > 5
        shaded = page.locator("article.assistant .round")
        assert "".join(shaded.all_inner_texts()) == answer and 1 < shaded.count() <= len(rounds) + 1
        page.uncheck("#shade")
        assert page.locator(".round").count() == 0 and last_answer(page) == answer


def test_budget_0_shows_no_tree(chromium, url):  # noqa: F811
    with visit(chromium, url, settings=SETTINGS | {"auto": False, "budget": 0}) as page:
        ask(page)
        assert page.locator(".tree svg").count() == 0
        assert "plain decoding" in page.inner_text("[data-part=caption]")
        assert page.inner_text("[data-part=nodes]") == "0" and last_answer(page)


def test_history_survives_a_reload_and_a_new_chat(chromium, url):  # noqa: F811
    with visit(chromium, url, settings=SETTINGS) as page:
        ask(page, "first question")
        answer = last_answer(page)
        page.reload()
        page.wait_for_selector("article.assistant")
        assert last_answer(page) == answer and page.inner_text("article.user > .text") == "first question"
        assert page.input_value("#seed") == "11"
        page.click("#new-chat")
        assert page.locator("article").count() == 0
        page.click("#open-chats")
        page.click("#chat-list .chat")
        assert last_answer(page) == answer
        page.click("#open-chats")
        page.click("#chat-list [aria-label^=Delete]")
        assert page.inner_text("#chat-list") == "None yet." and page.locator("article").count() == 0


def test_a_race_runs_both_and_compares(chromium, url):  # noqa: F811
    with visit(chromium, url, settings=SETTINGS | {"auto": False, "budget": 16}) as page:
        page.fill("#prompt", "hello there")
        page.click("#race")
        page.wait_for_selector(".verdict:not(:empty)")
        assert "The texts are the same" in page.inner_text(".verdict") and "times the speed" in page.inner_text(".verdict")
        until(page, "new Set([...document.querySelectorAll('.lanes .text')].map((node) => node.innerText)).size === 1")
        assert page.locator(".lanes output:has-text('tokens/s')").count() == 2
        assert int(page.inner_text("[data-part=nodes]")) > 16  # the panel stays with the trees
        page.reload()
        page.wait_for_selector("article.assistant")


def test_stop_stops_the_engine_too(chromium):  # noqa: F811
    engine = ScriptEngine("x" * 50_000, step_size=1)
    facts = replace(FACTS, max_context=100_000)
    with serving(engine, facts=facts) as client, live(client.app) as url, visit(chromium, url) as page:
        ask(page, wait=False)
        page.wait_for_selector("article.assistant .text:not(:empty)")
        page.click("#stop")
        page.wait_for_selector("#stop:disabled")
        wait_for(lambda: engine.aborted and not engine.live)
        assert page.inner_text("#status") == "Stopped."
        assert set(last_answer(page)) == {"x"} and len(last_answer(page)) < 50_000
        ask(page, wait=False)
        page.wait_for_selector("#stop:enabled")
        page.keyboard.press("Escape")
        page.wait_for_selector("#stop:disabled")


def test_faults_are_shown_as_the_server_said_them(chromium):  # noqa: F811
    engine = ScriptEngine("hello")
    with serving(engine) as client, live(client.app) as url, visit(chromium, url, expected_errors=["400"]) as page:
        page.evaluate("document.getElementById('max-tokens').value = '100000'")
        ask(page)
        assert "lower max_tokens" in page.locator("[role=alert]").inner_text()
        page.evaluate("document.getElementById('max-tokens').value = ''")
        engine.fail_next = "out of <b>memory</b>"
        ask(page)
        assert "out of <b>memory</b>" in page.locator("[role=alert]").last.inner_text()
        ask(page)
        assert last_answer(page) == "hello"


MARKUP = """<img src=x onerror="alert(1)"> <script>alert(2)</script> <svg onload=alert(3)></svg>
[click](javascript:alert(4)) ![picture](https://example.com/a.png) [data](data:text/html,<script>alert(5)</script>)

```html
<script>alert(6)</script>
```

| <iframe src=x> | **<b>bold</b>** |
|---|---|
| `<u>` | <style>*{display:none}</style> |
"""


def test_markup_is_text_in_answers_prompts_and_titles(chromium):  # noqa: F811
    facts = replace(FACTS, max_context=4096)
    with serving(ScriptEngine(MARKUP, 7), facts=facts) as client, live(client.app) as url, visit(chromium, url) as page:
        ask(page, MARKUP)
        strange = page.locator("#messages :is(img, script, svg, iframe, style, u, b)")
        assert strange.count() == 0
        hrefs = page.eval_on_selector_all("#messages a", "nodes => nodes.map((node) => node.href)")
        assert hrefs == ["https://example.com/a.png"]
        answer = last_answer(page)
        for piece in ('<img src=x onerror="alert(1)">', "<script>alert(2)</script>", "<script>alert(6)</script>", "<iframe src=x>"):
            assert piece in answer
        assert page.inner_text("article.user > .text") == MARKUP.strip()
        page.click("#open-chats")
        assert page.locator("#chat-list :is(img, script)").count() == 0 and "<img" in page.inner_text("#chat-list")


def test_a_key_is_asked_for(chromium):  # noqa: F811
    with serving(api_key="secret") as client, live(client.app) as url, visit(
        chromium, url, expected_errors=["401"]
    ) as page:
        for key in ("wrong", "secret"):
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key", key)
            page.keyboard.press("Enter")
        until(page, "document.getElementById('model').textContent === 'toy'")
        ask(page)
        assert last_answer(page) == "hello"
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_thought_is_folded(chromium):  # noqa: F811
    engine = ScriptEngine("so I think\n</think>\nthe answer")
    with serving(engine, THINKING_TEMPLATE) as client, live(client.app) as url, visit(chromium, url) as page:
        ask(page)
        assert last_answer(page) == "the answer"
        assert not page.is_visible(".assistant .thought .text")
        page.click(".assistant .thought summary")
        assert page.inner_text(".assistant .thought .text") == "so I think"


@pytest.mark.parametrize("width, height, dark", [(360, 740, False), (1280, 800, False), (1280, 800, True)])
def test_no_serious_barrier_and_nothing_sticks_out(chromium, url, width, height, dark):  # noqa: F811
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with visit(chromium, url, width, height, dark, SETTINGS | {"auto": False, "budget": 64}) as page:
        ask(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for opener in (None, "#open-settings", "#open-chats"):
            if opener:
                page.click(opener)
            found = axe.run(page).response["violations"]
            serious = [each["id"] for each in found if each["impact"] in ("serious", "critical")]
            assert not serious, [(each["id"], [node["html"][:160] for node in each["nodes"]]) for each in found]
            page.keyboard.press("Escape")


def test_all_can_be_reached_by_keyboard(chromium, url):  # noqa: F811
    with visit(chromium, url) as page:
        page.evaluate("document.activeElement.blur()")
        reached = []
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.className || document.activeElement.tagName"))
        assert reached[0] == "skip"
        assert {"new-chat", "open-chats", "open-settings", "prompt", "budget", "auto", "shade", "race", "send"} - {"budget"} <= set(reached)


MARKDOWN = """async (source) => {
  const { render } = await import("./ui/markdown.js");
  const node = document.createElement("div");
  render(node, source);
  const whole = [...node.children].map((each) => { each.removeAttribute("data-mark"); return each.outerHTML; }).join("");
  const grown = document.createElement("div");
  for (let i = 0; i <= source.length; i++) render(grown, source.slice(0, i));
  for (const each of grown.children) each.removeAttribute("data-mark");
  if (grown.innerHTML !== whole) throw new Error(`grown ${grown.innerHTML} whole ${whole}`);
  return whole;
}"""


@pytest.mark.parametrize(
    "source, html",
    [
        ("a *b* **c** `d*e*` ~~f~~", "<p>a <em>b</em> <strong>c</strong> <code>d*e*</code> <del>f</del></p>"),
        ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
        ("# Head\ntext\n\n---\n> q\n> r", "<h3>Head</h3><p>text</p><hr><blockquote><p>q\nr</p></blockquote>"),
        ("- a\n- b\n  - c\n\nend", "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ul><p>end</p>"),
        ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
        (r"\*not\* <b>", "<p>*not* &lt;b&gt;</p>"),
        (
            "see [x](https://example.com/) or https://example.com/y.",
            '<p>see <a href="https://example.com/" target="_blank" rel="noopener noreferrer nofollow">x</a> or '
            '<a href="https://example.com/y" target="_blank" rel="noopener noreferrer nofollow">https://example.com/y</a>.</p>',
        ),
        (
            "```py\nx = 1 # one\n```",
            '<div class="code-block"><span class="language">py</span><button class="copy-code" type="button" '
            'aria-label="Copy the py block">Copy</button><pre tabindex="0"><code>x = <span class="hl-number">1</span> '
            '<span class="hl-comment"># one</span></code></pre></div>',
        ),
    ],
    ids=lambda value: value[:12].replace("\n", " "),
)
def test_markdown_is_the_same_whole_and_as_it_grows(chromium, url, source, html):  # noqa: F811
    with visit(chromium, url) as page:
        assert page.evaluate(MARKDOWN, source) == html


def test_hostile_markdown_takes_no_time(chromium, url):  # noqa: F811
    hostile = ["*" * 20_000, "[" * 20_000, "`a" * 10_000, "**a " * 5_000, "> " * 5_000, "- " * 5_000, "_*~~" * 5_000, "|" * 20_000]
    with visit(chromium, url) as page:
        for source in hostile:
            took = page.evaluate(
                """async (source) => {
                  const { render } = await import("./ui/markdown.js");
                  const began = performance.now();
                  render(document.createElement("div"), source);
                  return performance.now() - began;
                }""",
                source,
            )
            assert took < 3000, (source[:8], took)


LARGE = """async ([nodes, rounds, perFrame]) => {
  const { Panel } = await import("./ui/panel.js");
  const panel = new Panel(document.getElementById("panel"));
  const parents = Array.from({ length: nodes + 1 }, (_, i) => (i ? Math.floor((i - 1) / 3) : -1));
  const depths = [];
  parents.forEach((parent, i) => depths.push(i ? depths[parent] + 1 : 0));
  const frames = [];
  let before = performance.now();
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
  frames.sort((a, b) => a - b);
  const others = document.querySelector(".tree path.nodes").getAttribute("d").split("M").length - 1;
  const drawn = document.querySelectorAll(".tree rect.node").length + others;
  const at = (share) => frames[Math.floor(share * (frames.length - 1))];
  return { drawn, kept: panel.kept.length, charted: panel.lengths.length, elements: document.querySelectorAll("*").length, median: at(0.5), p95: at(0.95) };
}"""


def test_large_trees_stay_smooth_and_long_traces_small(chromium, url, record_property):  # noqa: F811
    with visit(chromium, url) as page:
        found = page.evaluate(LARGE, [1024, 60, 1])
        many = page.evaluate(LARGE, [64, 500, 10])
        record_property("frames_ms", found)
    assert found["drawn"] == 1024 and found["elements"] < 400
    assert many["drawn"] == 64 and many["kept"] == 64 and many["charted"] == 160 and many["elements"] < 400
    assert found["median"] < 50 and found["p95"] < 400  # 17 ms on a quiet machine
