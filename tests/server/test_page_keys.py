"""The tree on the page by keyboard, by pointer and on a phone."""
# ruff: noqa: F811

import re

import pytest

from tests.server.browser import ask, chromium, serving_trees, until, url, visit  # noqa: F401

SETTINGS = {"seed": 11, "temperature": 0.8, "max-tokens": 40, "auto": False}


def node_info(page):
    return page.inner_text("[data-part=node]")


def test_arrow_keys_go_from_node_to_node(chromium, url):
    with visit(chromium, url, settings=SETTINGS | {"budget": 16}) as page:
        ask(page)
        page.focus("[data-part=tree]")
        page.keyboard.press("ArrowDown")
        assert node_info(page).endswith("(root)") and page.locator(".tree .pointed").count() == 1
        # A round that accepted something, then one child after the other.
        page.evaluate(
            """() => {
              const slider = document.querySelector("[data-part=round]");
              slider.value = 0;
              slider.dispatchEvent(new Event("input"));
            }"""
        )
        until(page, "document.querySelector('[data-part=caption]').textContent.startsWith('Round 1:')")
        seen = []
        for key in ("Home", "ArrowRight", "ArrowDown", "ArrowLeft"):
            page.keyboard.press(key)
            seen.append(node_info(page))
        assert seen[0] == seen[3] and "root" in seen[0]
        assert "depth 1" in seen[1] and "depth 1" in seen[2] and seen[1] != seen[2]
        assert re.search(r"\(node \d+, depth 1, [\d.]+ %, (not )?accepted\)", seen[1])


def test_the_keyboard_keeps_its_place(chromium):
    """A button that was pressed and can be pressed no more gives its place to the one that comes next."""
    focused = "document.activeElement.id || document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    with serving_trees(pause_s=0.05) as url, visit(chromium, url, settings=SETTINGS | {"budget": 1, "max-tokens": 400}) as page:
        for button in ("send", "race"):
            page.fill("#prompt", f"hello by {button}")
            page.focus(f"#{button}")
            page.keyboard.press("Enter")
            until(page, f"({focused}) === 'stop'")
            page.keyboard.press("Enter")
            until(page, f"({focused}) === 'prompt' && document.getElementById('stop').disabled")
        assert page.inner_text(".race output >> nth=0") == "stopped"
        page.click("#new-chat")
        ask(page, "a second chat", wait=False)
        page.keyboard.press("Escape")
        page.wait_for_selector("#stop:disabled")
        page.click("#open-chats")
        page.focus("#chat-list li:nth-child(1) [aria-label]")
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == "Delete hello by send"
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == "Close"


POINTED = """async () => {
  const [box, drawing] = [document.querySelector(".tree"), document.querySelector(".tree svg")];
  const { width, height } = drawing.viewBox.baseVal;
  const told = new Set();
  for (let x = 30; x < width; x += 72) for (let y = 7; y < height; y += 3) {
    const at = new DOMPoint(x, y).matrixTransform(drawing.getScreenCTM());
    box.dispatchEvent(new PointerEvent("pointermove", { clientX: at.x, clientY: at.y, bubbles: true }));
    told.add(document.querySelector("[data-part=node]").textContent);
  }
  return [...told];
}"""


@pytest.mark.parametrize("budget", [16, 400])
def test_the_pointer_says_what_a_node_is(chromium, budget):
    """Every node, also of a tree so large that most of its nodes are one path."""
    with serving_trees() as url, visit(chromium, url, settings=SETTINGS | {"budget": budget}) as page:
        ask(page)
        told = [each for each in page.evaluate(POINTED) if "(node" in each]
        drawn = int(re.search(r"(\d+) nodes verified", page.inner_text("[data-part=caption]"))[1])
        assert len(told) == drawn > 3


def test_on_a_phone_the_tree_stays_in_sight_while_the_answer_grows(chromium):
    with serving_trees(pause_s=0.05, max_context=4096) as url, visit(
        chromium, url, 360, 740, settings=SETTINGS | {"budget": 16, "max-tokens": 1500, "seed": 4}
    ) as page:
        page.fill("#prompt", "hello there " * 20)
        page.keyboard.press("Enter")
        until(page, "document.scrollingElement.scrollTop > 250 && document.querySelector('.tree svg') !== null")
        box = page.evaluate("(({ top, bottom }) => [top, bottom])(document.querySelector('.tree').getBoundingClientRect())")
        running = page.is_enabled("#stop")
        page.keyboard.press("Escape")
        assert running and box[0] >= 0 and box[1] < 370
