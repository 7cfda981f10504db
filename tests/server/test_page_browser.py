"""The page in a real browser: it shows what the server did, keeps what it should, and lets no text become markup."""
# ruff: noqa: F811

import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.server.browser import SET, ask, chromium, last_answer, serving_trees, until, url, visit  # noqa: F401
from tests.server.fakes import FACTS, THINKING_TEMPLATE, ScriptEngine, serving, wait_for
from tests.server.live import live

SETTINGS = {"seed": 11, "temperature": 0.8, "max-tokens": 40}


@contextmanager
def pages(chromium):
    """A page of its own that may log what it likes, but raise nothing."""
    context, faults = chromium.new_context(), []
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    try:
        yield page
        assert not faults
    finally:
        context.close()


def test_history_survives_a_reload_and_a_new_chat(chromium, url):
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


def test_a_race_runs_both_and_compares(chromium, url):
    with visit(chromium, url, settings=SETTINGS | {"seed": 42, "auto": False, "budget": 16}) as page:
        page.fill("#prompt", "hello there")
        page.click("#race")
        page.wait_for_selector(".verdict:not(:empty)")
        assert "The texts are the same" in page.inner_text(".verdict") and "times the speed" in page.inner_text(".verdict")
        until(page, "new Set([...document.querySelectorAll('.lanes section > .text')].map((node) => node.innerText)).size === 1")
        speeds = page.locator(".lanes output:has-text('tokens/s')").all_inner_texts()
        figures = [page.inner_text(f"[data-part={name}]") for name in ("speed", "plain")]
        assert speeds == [f"{figure} tokens/s" for figure in figures]
        assert int(page.inner_text("[data-part=nodes]")) > 16  # the panel stays with the trees
        page.evaluate(SET, ["budget", "0"])
        page.fill("#prompt", "hello there")
        page.click("#race")
        page.wait_for_selector(".race:last-child .verdict:not(:empty)")
        verdict = page.locator(".verdict").last.inner_text()
        assert "Both were plain decoding" in verdict and "The texts are the same" in verdict and "times" not in verdict
        page.reload()
        page.wait_for_selector("article.assistant")


def test_stop_stops_the_engine_too(chromium):
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
        ask(page, "to be left", wait=False)
        until(page, "document.querySelectorAll('article.assistant')[2]?.innerText.includes('xxxx')")
        page.reload()
        page.wait_for_selector("article.assistant")
        assert set(last_answer(page)) == {"x"} and page.locator(".foot").last.inner_text() == "stopped"
        assert page.locator("article.user > .text").last.inner_text() == "to be left" and page.is_enabled("#send")


def test_faults_are_shown_as_the_server_said_them(chromium):
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


def test_a_server_that_goes_away_is_said(chromium):
    engine = ScriptEngine("x" * 50_000, step_size=1)
    step = engine.step
    engine.step = lambda: time.sleep(0.005) or step()
    facts = replace(FACTS, max_context=100_000)
    with serving(engine, facts=facts) as client, pages(chromium) as page:
        with live(client.app) as url:
            page.goto(url)
            ask(page, wait=False)
            page.wait_for_selector("article.assistant .text:not(:empty)")
        page.wait_for_selector("[role=alert]")
        assert page.locator("[role=alert]").inner_text() != "network error" and "x" in last_answer(page)
        ask(page, "still there?")
        assert "is it still running?" in page.locator("[role=alert]").last.inner_text()


# What another page of this origin, a hand or a bug may have left: conversations and settings.
STRANGE = [
    ("{}", "["),
    ("[{}]", "5"),
    ('[null, 1, "x", [], {"id": 3, "messages": []}, {"id": "a", "messages": {}}]', '"auto"'),
    ('[{"id": "a", "messages": [null, {}, {"role": "system", "content": "x"}, {"role": "user", "content": ["x"]}]}]', "null"),
    (
        '[{"id": "a", "title": 5, "messages": [{"role": "assistant", "content": "kept", "rounds": [[1], null], "reasoning": {}}]}]',
        '{"system": true, "thinking": "perhaps", "budget": {}, "auto": "no", "shade": 1, "temperature": [2]}',
    ),
]


def test_a_browser_that_keeps_nothing_can_chat(chromium):
    """Storage that throws, as where all site data is blocked, or holds what is no history."""
    with serving() as client, live(client.app) as url, pages(chromium) as page:
        page.add_init_script("for (const each of ['localStorage', 'sessionStorage']) Object.defineProperty(window, each, { get() { throw new DOMException('denied', 'SecurityError'); } });")
        page.goto(url)
        until(page, "document.getElementById('model').textContent === 'toy'")
        ask(page)
        assert last_answer(page) == "hello"
    with serving() as client, live(client.app) as url, pages(chromium) as page:
        page.goto(url)
        for chats, settings in STRANGE:
            page.evaluate("([chats, settings]) => { localStorage['ddtree.chats'] = chats; localStorage['ddtree.settings'] = settings; }", [chats, settings])
            page.reload()
            until(page, "document.getElementById('model').textContent === 'toy'")
            page.click("#open-chats")
            page.keyboard.press("Escape")
        assert last_answer(page) == "kept" and page.input_value("#thinking") == "" and page.input_value("#system") == ""
        ask(page)
        assert last_answer(page) == "hello"


def test_a_question_without_an_answer_is_not_asked_again(chromium):
    engine = ScriptEngine("hello")
    with serving(engine) as client, live(client.app) as url, visit(chromium, url) as page:
        engine.fail_next = "out of memory"
        ask(page, "one")
        assert page.input_value("#prompt") == "one"  # to be asked again, or not
        ask(page, "two")
        ask(page, "three")
        prompts = [bytes(request.prompt_token_ids).decode() for request in engine.added]
        assert prompts[1] == "user: two\nassistant: "
        assert prompts[2] == "user: two\nassistant: hello\nuser: three\nassistant: "
        assert page.locator("article.user").count() == 3


def test_settings_reach_the_request(chromium):
    engine = ScriptEngine("hello")
    settings = {"system": "be kind", "temperature": 0.3, "seed": 7, "max-tokens": 9, "auto": False, "budget": 5}
    with serving(engine) as client, live(client.app) as url, visit(chromium, url, settings=settings) as page:
        ask(page, "hi")
        page.fill("#budget-number", "3")
        page.keyboard.press("Tab")
        assert page.input_value("#budget") == "3"
        ask(page, "hi")
        page.fill("#budget-number", "")
        page.keyboard.press("Tab")
        assert page.input_value("#budget-number") == "3"
        page.check("#auto")
        ask(page, "hi")
        first, second, third = engine.added
    assert bytes(first.prompt_token_ids).decode() == "system: be kind\nuser: hi\nassistant: "
    assert (first.sampling.temperature, first.seed, first.max_tokens) == (0.3, 7, 9)
    assert [first.tree_budget, second.tree_budget, third.tree_budget] == [5, 3, "auto"]


def test_answers_can_be_copied(chromium):
    engine = ScriptEngine("text\n\n```py\nx = 1\n```")
    with serving(engine) as client, live(client.app) as url, visit(chromium, url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(page)
        page.click(".assistant .copy-code")
        until(page, "document.querySelector('.assistant .copy-code').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
        page.click(".assistant .below button")
        until(page, "document.querySelector('.assistant .below button').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == "text\n\n```py\nx = 1\n```"


MARKUP = """<img src=x onerror="alert(1)"> <script>alert(2)</script> <svg onload=alert(3)></svg>
<tool_response>{"html": "<object data=x>"}</tool_response>
[click](javascript:alert(4)) ![picture](https://example.com/a.png) [data](data:text/html,<script>alert(5)</script>)

```html
<script>alert(6)</script>
```

| <iframe src=x> | **<b>bold</b>** |
|---|---|
| `<u>` | <style>*{display:none}</style> |
"""


def test_markup_is_text_in_answers_prompts_and_titles(chromium):
    facts = replace(FACTS, max_context=4096)
    with serving(ScriptEngine(MARKUP, 7), facts=facts) as client, live(client.app) as url, visit(chromium, url) as page:
        ask(page, MARKUP)
        strange = page.locator("#messages :is(img, script, svg, iframe, style, u, b, object)")
        assert strange.count() == 0
        hrefs = page.eval_on_selector_all("#messages a", "nodes => nodes.map((node) => node.href)")
        assert hrefs == ["https://example.com/a.png"]
        answer = last_answer(page)
        for piece in ("<object data=x>", '<img src=x onerror="alert(1)">', "<script>alert(2)</script>", "<script>alert(6)</script>", "<iframe src=x>"):
            assert piece in answer
        assert page.inner_text("article.user > .text") == MARKUP.strip()
        page.click("#open-chats")
        assert page.locator("#chat-list :is(img, script)").count() == 0 and "<img" in page.inner_text("#chat-list")


def test_a_key_is_asked_for(chromium):
    with serving(api_key="secret") as client, live(client.app) as url, visit(
        chromium, url, expected_errors=["401"]
    ) as page:
        for key in ("wrong", "ключ", "se‑krit", "secret"):  # no header carries the second and the third
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key", key)
            page.keyboard.press("Enter")
        until(page, "document.getElementById('model').textContent === 'toy'")
        ask(page)
        assert last_answer(page) == "hello" and page.evaluate("document.activeElement.id") == "prompt"
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


THOUGHTFUL = "so I think\n</think>\nthe answer"


def test_a_race_shows_the_thought_and_stopping_keeps_the_first_lane(chromium):
    engine = ScriptEngine(THOUGHTFUL, step_size=2)
    with serving(engine, THINKING_TEMPLATE) as client, live(client.app) as url, visit(chromium, url) as page:
        page.fill("#prompt", "hello")
        page.click("#race")
        page.wait_for_selector(".verdict:not(:empty)")
        assert "The texts are the same" in page.inner_text(".verdict")
        until(page, "document.querySelectorAll('.lanes .thought[open]').length === 2")
        until(page, "[...document.querySelectorAll('.lanes .thought .text')].every((each) => each.innerText === 'so I think')")
        step = engine.step

        def endless_plainly():
            if engine.live and next(iter(engine.live.values()))[0].tree_budget == 0:
                engine.script = list(b"x" * 50_000)
            time.sleep(0.002)
            return step()

        engine.step = endless_plainly
        page.fill("#prompt", "again")
        page.click("#race")
        until(page, "[...document.querySelectorAll('.race')].at(-1).querySelectorAll('.thought')[1].innerText.includes('x')")
        page.click("#stop")
        page.wait_for_selector("#stop:disabled")
        page.reload()
        page.wait_for_selector("article.assistant")
        assert last_answer(page) == "the answer" and page.locator("article.assistant").count() == 2


def test_a_thought_is_folded(chromium):
    engine = ScriptEngine(THOUGHTFUL)
    with serving(engine, THINKING_TEMPLATE) as client, live(client.app) as url, visit(chromium, url) as page:
        ask(page)
        assert last_answer(page) == "the answer"
        assert not page.is_visible(".assistant .thought .text")
        page.click(".assistant .thought summary")
        assert page.inner_text(".assistant .thought .text") == "so I think"


@pytest.mark.parametrize("width, height, dark", [(360, 740, False), (1280, 800, False), (1280, 800, True)])
def test_no_serious_barrier_and_nothing_sticks_out(chromium, url, width, height, dark):
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


def test_all_can_be_reached_by_keyboard(chromium, url):
    with visit(chromium, url) as page:
        page.evaluate("document.activeElement.blur()")
        reached = []
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.className || document.activeElement.tagName"))
        assert reached[0] == "skip"
        assert {"new-chat", "open-chats", "open-settings", "prompt", "budget", "auto", "shade", "race", "send"} - {"budget"} <= set(reached)
