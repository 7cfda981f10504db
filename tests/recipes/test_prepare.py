"""What a trained target is given to answer is in its own tokens."""

from __future__ import annotations

import sys

import numpy as np

from ddtree.text.tokenizer import Tokenizer
from recipes.hybrid_tiny import prepare


def test_a_given_tokenizer_goes_on(prose, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "read_shards", lambda *_: prose)
    monkeypatch.setattr(prepare, "_smollm2", lambda _: None)
    out = tmp_path / "data"
    flags = {"--smollm2": "unused", "--shards": "unused", "--out": str(out), "--tokenizer": str(tokenizer_folder)}
    counts = {"--samples": "4", "--prompts": "40", "--processes": "1"}
    monkeypatch.setattr(sys, "argv", ["prepare", *(part for pair in (flags | counts).items() for part in pair)])
    prepare.main()
    served, written = Tokenizer.load(tokenizer_folder), Tokenizer.load(out / "tokenizer")
    assert written.backend.to_str() == served.backend.to_str()
    ids, offsets = np.load(out / "prompts.npy"), np.load(out / "prompt_offsets.npy")
    texts = [served.backend.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in zip(offsets, offsets[1:], strict=False)]
    assert len(texts) == 40
    assert any(question in text for text in texts for pairs in prose.conversations for question, _ in pairs)
