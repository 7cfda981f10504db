"""Markdown on the page: what it becomes, the same as it grows, quick on hostile text, legible on every shade."""
# ruff: noqa: F811

import json
import re

import pytest

from tests.server.browser import chromium, url, visit  # noqa: F401

MARKDOWN = """async (source) => {
  const { render } = await import("./ui/markdown.js");
  const node = document.createElement("div");
  render(node, source);
  const whole = node.innerHTML;
  const grown = document.createElement("div");
  for (let i = 0; i <= source.length; i++) render(grown, source.slice(0, i));
  if (grown.innerHTML !== whole) throw new Error(`grown ${grown.innerHTML} whole ${whole}`);
  return whole;
}"""


CASES = [
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
        'aria-label="Copy the py block">Copy</button><pre tabindex="0"><code><span class="lines">x = <span class="hl-number">1</span> '
        '<span class="hl-comment"># one</span></span></code></pre></div>',
    ),
]


def test_markdown_is_the_same_whole_and_as_it_grows(chromium, url):
    with visit(chromium, url) as page:
        for source, html in CASES:
            assert page.evaluate(MARKDOWN, source) == html


def test_long_code_keeps_its_lines_as_it_grows(chromium, url):
    """A string that goes over several of the pieces in which code is laid out."""
    code = "\n".join(["x"] * 45 + ['"""'] + ["in it"] * 70 + ['"""', "y = 1"])
    with visit(chromium, url) as page:
        html = page.evaluate(MARKDOWN, f"```py\n{code}\n```")
        pieces = re.findall(r'<span class="lines">(.*?)</span>(?=<span class="lines">|</code>)', html, re.DOTALL)
        assert len(pieces) == 3 and all('class="hl-string"' in piece for piece in pieces)
        assert re.sub(r"<[^>]*>", "", "".join(pieces)).replace("&quot;", '"') == code


def test_hostile_markdown_takes_no_time(chromium, url):
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


SHADED = """Text with a [link](https://example.com/), `code`, **strong** and https://example.com/y.

# Head

```py
x = "string" + 12 # comment
def f(): return None
```

> quoted

| a | b |
|---|---|
| 1 | `c` |
"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_shade_is_legible(chromium, url, dark):
    """One stored answer for each number of tokens a round can bring."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    answers = [
        {"role": "assistant", "content": SHADED, "reasoning": "why", "thoughtRounds": [[3, 1, tokens]],
         "rounds": [[place, place % 2 + 1, tokens] for place in range(1, len(SHADED) + 1, 4)]}
        for tokens in range(1, 10)
    ]  # fmt: skip
    chats = json.dumps([{"id": "a", "title": "t", "messages": answers}])
    with visit(chromium, url, dark=dark) as page:
        page.evaluate("(chats) => localStorage.setItem('ddtree.chats', chats)", chats)
        page.reload()
        page.wait_for_selector("article.assistant > .text > p .by8 >> nth=0")
        page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        found = axe.run(page, "#messages").response["violations"]
        assert not found, [(each["id"], [node["html"][:160] for node in each["nodes"]]) for each in found]
