"""Actors that follow a script: a target whose next-token law is a hash of the prefix, drafters of any skill.

Vocabulary 13, token 0 included. Both assert the engine's invariants as they go.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from ddtree.engine.config import EngineConfig
from ddtree.engine.engine import Engine
from ddtree.sampling.choose import choose, rank_scores
from ddtree.sampling.logprobs import token_logprobs
from ddtree.tree.build import Candidates
from ddtree.tree.draft_tree import DraftTree

VOCAB = 13
EOS = 7


def logits_after(prefix: list[int], sharpness: float = 2.0, vocab_size: int = VOCAB) -> np.ndarray:
    """`[V]` float32: the scripted law. Deterministic in the prefix."""
    return _law(np.asarray(prefix, np.int64).tobytes(), sharpness, vocab_size).copy()


@lru_cache(maxsize=100_000)
def _law(prefix: bytes, sharpness: float, vocab_size: int) -> np.ndarray:
    """Kept, since every budget and drafter asks for the same prefixes again."""
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(prefix, digest_size=8).digest(), "little"))
    return (rng.normal(size=vocab_size) * sharpness).astype(np.float32)


@dataclass
class ScriptedTarget:
    """Knows a sequence only through what was committed, so a wrong commit changes the output."""

    fail_at: int | None = None  # verify call at which to raise
    vocab_size: int = VOCAB
    num_verifies: int = 0
    staged: dict = field(default_factory=dict)

    def open(self, sequence):
        sequence.target_state = []
        sequence.open_choice(self.vocab_size, torch.device("cpu"))

    def close(self, sequence):
        sequence.target_state = None

    def prefill(self, sequence, token_ids, last):
        sequence.target_state.extend(token_ids)
        features = torch.tensor(token_ids, dtype=torch.float32)[:, None]
        if not last:
            return features, None
        chosen, logits = self._choose(sequence, DraftTree.root_only(token_ids[-1]), sequence.target_state[:-1])
        self._report(sequence, logits, chosen)
        return features, int(chosen[0])

    def verify(self, sequences, trees):
        self.num_verifies += 1
        if self.fail_at == self.num_verifies:
            raise RuntimeError("scripted fault")
        chosen = []
        for sequence, tree in zip(sequences, trees, strict=True):
            assert sequence.target_state == sequence.token_ids[:-1], "committed must be tokens[:-1]"
            assert tree.token_ids[0] == sequence.root_token
            tokens, logits = self._choose(sequence, tree, sequence.target_state)
            self.staged[sequence.request_id] = (tree.token_ids, tokens, logits)
            chosen.append(tokens)
        return chosen

    def commit(self, sequences, paths):
        features = []
        for sequence, path in zip(sequences, paths, strict=True):
            token_ids, chosen, logits = self.staged.pop(sequence.request_id)
            token_ids = token_ids[path].tolist()
            self._report(sequence, logits[path], chosen[path])
            sequence.target_state.extend(token_ids)
            features.append(torch.tensor(token_ids, dtype=torch.float32)[:, None])
        return features

    def _choose(self, sequence, tree, committed):
        """The token after each node and the logits `[N, V]` that it was chosen from."""
        prefixes = []
        for token_id, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
            prefixes.append((prefixes[parent] if parent >= 0 else committed) + [token_id])
        logits = np.stack([logits_after(prefix, vocab_size=self.vocab_size) for prefix in prefixes])
        logits = torch.from_numpy(logits)
        adjusted, chosen = sequence.adjust(logits, tree.token_ids, tree.parents), []
        # Row by row, so that no two rows can share anything.
        for row, prefix in zip(adjusted, prefixes, strict=True):
            noise = sequence.noise(len(prefix), 1) if sequence.noise else None
            row = sequence.forbid(row[None], prefix[len(committed) + 1 :])
            chosen.append(int(choose(row, sequence.request.sampling, noise)[0]))
        return np.array(chosen), logits

    def _report(self, sequence, logits, token_ids):
        if sequence.request.num_logprobs is not None:
            sequence.logprobs += token_logprobs(logits, token_ids, sequence.request.num_logprobs)


class ScriptedDrafter:
    """Right at each depth with probability `skill`; `eos_everywhere` proposes EOS first at every depth."""

    max_context = None

    def __init__(
        self, skill: float, block_size: int = 8, eos_everywhere: bool = False, vocab_size: int = VOCAB, eos: int = EOS
    ):
        self.skill, self.block_size, self.eos_everywhere = skill, block_size, eos_everywhere
        self.vocab_size, self.eos = vocab_size, eos
        self.rng = np.random.default_rng(0)

    def open(self, sequence):
        sequence.drafter_state = []

    def close(self, sequence):
        sequence.drafter_state = None

    def absorb(self, sequence, features):
        sequence.drafter_state.extend(features[:, 0].int().tolist())

    def draft(self, sequences):
        return [self._candidates(s) if s.drafts and self._depth(s) else None for s in sequences]

    def commit(self, sequences, features):
        for sequence, rows in zip(sequences, features, strict=True):
            if sequence.drafts:
                self.absorb(sequence, rows)
                assert sequence.drafter_state == sequence.token_ids[:-1], "features must be those of the path's rows"

    def _depth(self, sequence):
        return min(self.block_size - 1, sequence.tree_budget, sequence.num_remaining - 1)

    def _candidates(self, sequence):
        assert sequence.drafter_state == sequence.token_ids[:-1]
        prefix, rows, num_known = list(sequence.token_ids), [], len(sequence.token_ids)
        for depth in range(self._depth(sequence)):
            # A path of ever more right guesses: what the target would choose after it, adjusted as the target does.
            logits = torch.from_numpy(np.stack([logits_after(prefix, vocab_size=self.vocab_size)] * (depth + 1)))
            adjusted = sequence.adjust(logits, np.array(prefix[num_known - 1 :]), np.arange(-1, depth))[-1:]
            adjusted = sequence.forbid(adjusted, prefix[num_known:])
            noise = sequence.noise(len(prefix), 1) if sequence.noise else None
            true = int(choose(adjusted, sequence.request.sampling, noise)[0])
            guess = np.zeros(self.vocab_size, np.float32)
            hit = self.rng.random() < self.skill
            wrong = (true + 1 + self.rng.integers(self.vocab_size - 1)) % self.vocab_size
            guess[true if hit else wrong] = 3.0
            if self.eos_everywhere:
                guess[self.eos] = 9.0
            rows.append(guess)
            prefix.append(true)
        scores = rank_scores(torch.from_numpy(np.stack(rows)), type(sequence.request.sampling)(), None)
        log_probs, token_ids = scores.topk(min(sequence.tree_budget, self.vocab_size), dim=-1)
        return Candidates(token_ids.numpy(), log_probs.float().numpy())


def scripted_engine(skill: float | None = 0.5, target: ScriptedTarget | None = None, **options) -> Engine:
    """An engine of scripted actors; `skill=None` means no drafter; `vocab_size` and `eos` for another vocabulary."""
    limits = {name: options.pop(name) for name in ("max_running", "prefill_chunk", "max_context") if name in options}
    drafter = None if skill is None else ScriptedDrafter(skill, **options)
    vocab_size = options.get("vocab_size", VOCAB)
    target = target or ScriptedTarget(vocab_size=vocab_size)
    return Engine(target, drafter, EngineConfig(**{"max_context": 512, **limits}), vocab_size)
