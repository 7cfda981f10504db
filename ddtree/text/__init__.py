"""Text on both sides of the engine: tokenizer, chat template, detokenizer, stop strings, reasoning."""

from ddtree.text.chat import knows_thinking, opens_thinking, render_chat, thought_state
from ddtree.text.detokenize import Detokenizer
from ddtree.text.grammar import Grammar, GrammarCompiler
from ddtree.text.parse import ParserChain, ReasoningParser, SpanParser, Thought
from ddtree.text.stops import StopStrings
from ddtree.text.thought_limit import ThoughtLimit
from ddtree.text.tokenizer import Tokenizer
from ddtree.text.tools import CallPart, Tool, ToolFormat, ToolParser, tool_format
from ddtree.text.watcher import TextWatcher

__all__ = [
    "CallPart",
    "Detokenizer",
    "Grammar",
    "GrammarCompiler",
    "ParserChain",
    "ReasoningParser",
    "SpanParser",
    "StopStrings",
    "TextWatcher",
    "Thought",
    "ThoughtLimit",
    "Tokenizer",
    "Tool",
    "ToolFormat",
    "ToolParser",
    "knows_thinking",
    "opens_thinking",
    "render_chat",
    "thought_state",
    "tool_format",
]
