"""Record what the embedded models write, token by token, for tests/text/test_recorded.py.

`python -m tests.reference.make_recorded_outputs` overwrites recorded_outputs.json (some minutes on two cores). Nothing is
chosen by hand: calls are demanded by a grammar or left to the model, thoughts are on, off and cut short.
"""

from __future__ import annotations

import json
from pathlib import Path

from ddtree import load_engine
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from ddtree.server.chat import ChatRequest
from ddtree.server.text import Text
from ddtree.sources import resolve
from ddtree.text import TextWatcher, Tokenizer

FILE = Path(__file__).with_name("recorded_outputs.json")
STRING, NUMBER = {"type": "string"}, {"type": "number"}
TOOLS = {
    "get_weather": {"type": "object", "properties": {"city": STRING, "unit": {"enum": ["celsius", "fahrenheit"]}}, "required": ["city", "unit"]},
    "add": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
    "note": {
        "type": "object",
        "properties": {"title": STRING, "tags": {"type": "array", "items": STRING, "maxItems": 3}, "done": {"type": "boolean"}},
        "required": ["title", "tags", "done"],
    },
}
SUMS = (
    "What is 478 + 356?", "How much is 47 times 38?", "What is 905 - 268?", "What is 12 + 34 + 56?",
    "Tom has 23 pens and buys 58 more. How many pens does he have now?", "What is 99 times 99?",
    "A box holds 24 eggs. How many eggs are in 13 boxes?", "What is 1000 - 1?",
)  # fmt: skip
ASKED = (
    "What is the weather in Zürich?", "Use a tool to add 17 and 25.", "Note down: buy milk and bread, not done yet.",
    "Is it warm in São Paulo and in 東京 today?", "Write a note about \"quotes\" and {braces}.",
)  # fmt: skip
TAGS = (
    "Write the HTML of a small page with <b> and <i>.", "Explain the tags <think> and </think>.",
    "What does <tool_call>{\"name\": 1}</tool_call> mean?", "Count from one to five, one a line.",
)  # fmt: skip


def requests(thinks: bool) -> list[dict]:
    """The bodies to ask of a model, sampled ones among them."""
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
    bodies = [{"ask": ask, "tools": tools, "tool_choice": "required", "temperature": t} for ask in ASKED for t in (0, 1.0)]
    bodies += [{"ask": ask, "tools": tools, "tool_choice": "auto", "temperature": 0} for ask in ASKED[:3]]
    bodies += [{"ask": ask, "temperature": 0} for ask in TAGS]
    if thinks:
        bodies += [{"ask": ask, "enable_thinking": True, "temperature": t} for ask in SUMS for t in (0, 1.0)]
        bodies += [{"ask": ask, "enable_thinking": False, "temperature": 0} for ask in SUMS[:2]]
        bodies += [{"ask": ask, "enable_thinking": True, "thinking_budget": 20, "temperature": 0} for ask in SUMS[:3]]
        bodies += [{"ask": SUMS[1], "enable_thinking": True, "max_tokens": 12, "temperature": 0}]
    return [{"max_tokens": 160} | body for body in bodies]


def record(engine, tokenizer: Tokenizer, text: Text, body: dict) -> dict:
    """The pieces that a model's tokens became, and what the parsers must know of the prompt."""
    fields = {name: value for name, value in body.items() if name != "ask"}
    chat = ChatRequest(messages=[{"role": "user", "content": body["ask"]}], **fields)
    prompt = text.chat(chat)
    grammar = text.grammar(chat, prompt, engine.vocab_size)
    sampling = SamplingParams(temperature=chat.temperature)
    eos = text.eos_token_ids
    answer = engine.generate(
        Request(prompt.token_ids, chat.max_tokens, sampling, seed=7, tree_budget=16, eos_token_ids=eos, grammar=grammar)
    )
    shown = (tokenizer.thought_tag_ids if prompt.thought else frozenset()) | (tokenizer.call_tag_ids if prompt.tools else frozenset())
    watcher, pieces = TextWatcher(tokenizer, (), eos, shown_ids=shown), []
    for token_id in answer.token_ids:
        watcher.feed(token_id)
        pieces.append(watcher.take())
    pieces.append(watcher.finish())
    return {
        "asked": body["ask"],
        "thought": prompt.thought,
        "tools": [tool.name for tool in prompt.tools],
        "demanded": chat.call_demanded,
        "finish_reason": answer.finish_reason,
        "pieces": [piece for piece in pieces if piece],
    }


def main() -> None:
    """Both pairs, one after the other."""
    found = {}
    for name, thinks in (("hybrid-tiny", True), ("smollm2", False)):
        source = resolve(name)
        engine = load_engine(source.target, source.drafter, device="cpu", dtype="float32", max_context=2048)
        tokenizer = Tokenizer.load(source.target)
        text = Text(tokenizer)
        found[name] = [record(engine, tokenizer, text, body) for body in requests(thinks)]
    FILE.write_text(json.dumps(found, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
