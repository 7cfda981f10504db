"""ddtree chat shades the answer by how many tokens each round brought; piped, it is plain text."""

import io

from rich.console import Console

from ddtree.cli.bar import acceptance_bar, shade
from ddtree.cli.chat import Reply
from ddtree.cli.screen import screen_of
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
    assert turn.lengths[0] == brought[1] and sum(turn.lengths) == turn.stats.output_tokens - 1 and turn.tokens_per_s() > 0
    assert sum(brought) <= turn.stats.output_tokens <= sum(brought) + 8  # a last round may show nothing


def test_longer_rounds_are_shaded_more_and_plain_ones_not():
    assert shade(1) == "" and len({shade(n) for n in (1, 2, 3, 5, 8)}) == 5 and shade(16) == shade(8)


def printed(**options):
    out = io.StringIO()
    with screen_of(Console(file=out, highlight=False, **options)) as screen:
        reply = Reply(screen)
        reply.add([(REASONING, "hm")], shade(5))
        reply.add([(CONTENT, "one ")], shade(1))
        reply.add([(CONTENT, "[b]five[/b]")], shade(5))
        screen.show(acceptance_bar([5], 8, 3.0, 80))
    assert reply.message() == {"role": "assistant", "content": "one [b]five[/b]", "reasoning_content": "hm"}
    return out.getvalue()


def test_colours_are_for_terminals():
    assert printed() == "hm\n\none [b]five[/b]\n"
    coloured = printed(force_terminal=True, color_system="standard")
    assert "\x1b[1;32m[b]five[/b]\x1b[0m" in coloured and "\x1b[1;32mone" not in coloured


def test_the_bar_shows_the_last_round_the_mean_and_those_before():
    bar = acceptance_bar([1, 8, 3], 8, 12.34, 80)
    assert bar.plain == "━━━───── 3, mean 4.00 in 3 rounds · 12.3 tokens/s ▁█▃"
    assert acceptance_bar([1] * 5, 1, 9.0, 80).plain == "plain decoding, 5 rounds · 9.0 tokens/s"
    assert acceptance_bar([], 8, None, 80).plain == ""
    for width in range(1, 90):
        assert len(acceptance_bar([1, 16] * 40, 16, 1234.5, width)) <= width
