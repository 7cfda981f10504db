"""A headless Chromium for tests of the page. Where none is installed they are skipped."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.scripted import EOS, scripted_engine
from tests.server.fakes import serving
from tests.server.live import live
from tests.server.scripted import DRAFTERS, FACTS, LetterTokenizer

BINARIES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PAUSE_MS = 20_000  # what the page may take on a busy machine


@pytest.fixture(scope="module")
def chromium():
    """The browser; one for all tests of a module."""
    sync_api = pytest.importorskip("playwright.sync_api")
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    if binary is None:
        pytest.skip("no Chromium here: `make browser` as root installs Debian's")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


class Letters(LetterTokenizer):
    """One letter a token, so that paths can be read off the drawing."""

    def token_bytes(self, token_id):
        return b"</s>" if token_id == EOS else bytes([ord("a") + token_id])


@contextmanager
def serving_trees(pause_s=0.0, tokenizer=None, **options):
    """The URL of a server whose drafter is right now and then; `pause_s` is how long each step takes."""
    engine = scripted_engine(**DRAFTERS["some"], max_running=8, **options)
    engine.gate, step = None, engine.step

    def slow_step():
        time.sleep(pause_s)
        return step()

    engine.step = slow_step
    facts = replace(FACTS, max_context=engine.config.max_context)
    with serving(engine, facts=facts, tokenizer=tokenizer or Letters()) as client, live(client.app) as url:
        yield url


@pytest.fixture(scope="module")
def url():
    with serving_trees() as url:
        yield url


@contextmanager
def visit(chromium, url, width=1280, height=800, dark=False, settings=None, **expected):
    """A page at the server; at the end it must have logged no error and asked no other origin.

    `expected_errors`: words that console errors may hold, such as the status of a refused request.
    """
    allowed = expected.pop("expected_errors", ())
    context = chromium.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    page = context.new_page()
    page.set_default_timeout(PAUSE_MS)
    faults, asked = [], []
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(url)
        until(page, "document.getElementById('model').textContent !== '…' || document.querySelector('dialog[open]') !== null")
        for name, value in (settings or {}).items():
            page.evaluate(SET, [name, str(value)])
        yield page
        assert not [fault for fault in faults if not any(word in fault for word in allowed)]
        assert all(each.startswith(url) for each in asked)
    finally:
        context.close()


def until(page, condition):
    """Wait for a JavaScript condition. Polled from here, as the page's policy forbids what playwright does for it."""
    for _ in range(PAUSE_MS // 20):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"not in time: {condition}")


SET = """([id, value]) => {
  const node = document.getElementById(id);
  if (node.type === "checkbox") node.checked = value === "True"; else node.value = value;
  node.dispatchEvent(new Event("input", { bubbles: true }));
}"""


def ask(page, prompt="hello there", wait=True):
    """Type and send, as a user does; wait for the end of the answer."""
    page.fill("#prompt", prompt)
    page.keyboard.press("Enter")
    if wait:
        page.wait_for_selector("#stop:disabled")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def last_answer(page):
    """The text of the last answer."""
    return page.locator("article.assistant > .text").last.inner_text()
