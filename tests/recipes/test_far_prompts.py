"""Requests of one category, filled, in the target's tokens, some with a thought to come and some without."""

from __future__ import annotations

import random

from recipes.hybrid_tiny.chats import Encoder, make_prompts
from recipes.hybrid_tiny.far_prompts import MIX, far_prose


def test_far_requests_are_filled_and_end_where_the_answer_begins(served):
    prose = far_prose(0, 60)
    requests = [pairs[0][0] for pairs in prose.conversations]
    assert len(set(requests)) > 50
    assert not any(hole in request for request in requests for hole in ("<name>", "<thing>", "<number>", "⏎"))
    assert any("def " in request for request in requests)
    assert any(request.endswith("\n    \"\"\"\n") for request in requests)  # a function out of the library
    prompts = make_prompts(40, prose, MIX, Encoder(served.backend), random.Random(1))
    texts = [served.backend.decode(prompt.tolist(), skip_special_tokens=False) for prompt in prompts]
    endings = {text.rsplit("<|im_start|>assistant\n", 1)[1] for text in texts}
    assert endings == {"<think>\n", "<think>\n\n</think>\n\n"}
