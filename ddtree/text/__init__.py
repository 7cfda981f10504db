"""Text on both sides of the engine: tokenizer, chat template, detokenizer, stop strings, reasoning."""

from ddtree.text.chat import knows_thinking, opens_thinking, render_chat, thought_state
from ddtree.text.detokenize import Detokenizer
from ddtree.text.parse import ParserChain, ReasoningParser, SpanParser, Thought
from ddtree.text.stops import StopStrings
from ddtree.text.tokenizer import Tokenizer
from ddtree.text.watcher import TextWatcher

__all__ = [
    "Detokenizer",
    "ParserChain",
    "ReasoningParser",
    "SpanParser",
    "StopStrings",
    "TextWatcher",
    "Thought",
    "Tokenizer",
    "knows_thinking",
    "opens_thinking",
    "render_chat",
    "thought_state",
]
