"""ddtree chat shades the answer by how many tokens each round brought; piped, it is plain text."""

import io

from rich.console import Console

from ddtree.cli.chat import Reply, shade
from ddtree.cli.turns import Turn
from ddtree.text.parse import CONTENT, REASONING
from tests.scripted import scripted_engine
from tests.server.scripted import LetterTokenizer


def test_a_turn_says_how_many_tokens_each_piece_came_with():
    turn = Turn(scripted_engine(skill=0.6), LetterTokenizer(), [1, 2, 3], max_tokens=60, seed=3, tree_budget=16)
    brought = []
    for _ in turn:
        brought.append(turn.num_brought)
    assert brought[0] == 1 and max(brought) > 1
    assert sum(brought) <= turn.stats.output_tokens <= sum(brought) + 8  # a last round may show nothing


def test_longer_rounds_are_shaded_more_and_plain_ones_not():
    assert shade(1) == "" and len({shade(n) for n in (1, 2, 3, 5, 8)}) == 5 and shade(16) == shade(8)


def printed(**options):
    out = io.StringIO()
    reply = Reply(Console(file=out, highlight=False, **options))
    reply.add([(REASONING, "hm")], shade(5))
    reply.add([(CONTENT, "one ")], shade(1))
    reply.add([(CONTENT, "[b]five[/b]")], shade(5))
    assert reply.message() == {"role": "assistant", "content": "one [b]five[/b]", "reasoning_content": "hm"}
    return out.getvalue()


def test_colours_are_for_terminals():
    assert printed() == "hm\n\none [b]five[/b]"
    coloured = printed(force_terminal=True, color_system="standard")
    assert "\x1b[1;32m[b]five[/b]\x1b[0m" in coloured and "\x1b[1;32mone" not in coloured
