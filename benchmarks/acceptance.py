"""Acceptance length by replay: the target's own text once, then every budget's rounds along it without a verify.

    python -m benchmarks.acceptance --target FILE.gguf --drafter FOLDER --prompts ../shared/prompts

Tree decoding is lossless, so the text is the plain text and a round's accepted path is the tree's walk along it. That makes
one plain run serve all budgets, on a machine where verifying 1,024 nodes takes seconds. Features come from one forward over
prompt and text, drafts from one pass over all roots. `--check N` runs N prompts through the engine as well and compares.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.equality import SEED, read_prompts


def plain_texts(engine, requests) -> list[list[int]]:
    """The answers, several sequences side by side; order kept."""
    ids = [engine.add(request) for request in requests]
    answers = {request_id: [] for request_id in ids}
    while engine.has_work:
        for emission in engine.step():
            answers[emission.request_id].extend(emission.token_ids)
    return [answers[request_id] for request_id in ids]


ROOTS_AT_ONCE = 16


class Replay:
    """Drafts at every root of one text, then walks."""

    def __init__(self, engine, width: int):
        from ddtree.training.config import TrainingConfig
        from ddtree.training.features import DenseTarget
        from ddtree.training.packed import PackedDrafter

        self.engine, self.width = engine, width
        drafter = engine.drafter.model
        self.config = drafter.config
        self.target = DenseTarget(engine.target.model, engine.target.model.dtype)
        self.packed = PackedDrafter(drafter, self.target)
        self.features = None  # of the present text
        self.mask = TrainingConfig().mask_token_id
        assert self.mask == self.config.mask_token_id

    @torch.inference_mode()
    def drafts(self, prompt, answer, size: int, sampling, noise_rows):
        """Blocks of `size` at every root; what is returned gives the candidates of one: (position, depth, budget)."""
        from ddtree.sampling.choose import rank_scores
        from ddtree.training.blocks import build_blocks

        tokens = torch.tensor([[*prompt, *answer]])
        roots = torch.arange(len(prompt), len(prompt) + len(answer))[None]
        blocks = build_blocks(tokens, torch.ones_like(tokens), roots, size, roots.shape[1] * size, self.mask, 1.0)
        if self.features is None:
            self.features = self.target.features(tokens, self.config.target_layer_ids)
        states = self.packed(self.features, blocks)[0].unflatten(0, (-1, size))
        if self.engine.drafter.conditioning is not None:
            return partial(self.conditioned, states, answer, sampling, noise_rows)
        hidden, ids, values = states[:, 1:], [], []
        for start in range(0, len(hidden), ROOTS_AT_ONCE):
            rows = hidden[start : start + ROOTS_AT_ONCE]
            noise = None
            if noise_rows is not None:
                noise = torch.cat([noise_rows[start + i + 1 : start + i + size] for i in range(len(rows))])
            top = rank_scores(self.target.logits(rows.flatten(0, 1)), sampling, noise).topk(self.width, dim=-1)
            ids.append(top.indices.unflatten(0, (-1, size - 1)).numpy())
            values.append(top.values.float().unflatten(0, (-1, size - 1)).numpy())
        return partial(self.factorised, np.concatenate(ids), np.concatenate(values))

    def factorised(self, ids, values, position: int, depth: int, budget: int):
        """From ranked candidates `[roots, size - 1, width]`."""
        from ddtree.tree.build import Candidates

        return Candidates(ids[position, :depth, :budget], values[position, :depth, :budget])

    @torch.inference_mode()
    def conditioned(self, states, answer, sampling, noise_rows, position: int, depth: int, budget: int):
        """From the blocks' states `[roots, size, C]`, by the engine's adapter."""
        from ddtree.engine.scoring import condition

        slots, noise = states[position, : depth + 1], None
        if noise_rows is not None:
            noise = noise_rows[position + 1 : position + 1 + depth]
        return condition(self.engine.drafter.conditioning, slots, answer[position], self.target.logits(slots[1:]), sampling, noise)

    def walk(self, answer, candidates_at, size: int, budget: int) -> tuple[int, int]:
        """Rounds and emitted tokens of one budget along the text. The root of the first round is answer[0]."""
        from ddtree.training.evaluate import acceptance_length
        from ddtree.tree.build import build_ddtree

        position, rounds, emitted = 0, 0, 0
        while position < len(answer) - 1:
            depth = min(size - 1, budget, len(answer) - 2 - position)
            length = 1
            if depth:
                tree = build_ddtree(answer[position], candidates_at(position, depth, budget), budget)
                length = acceptance_length(tree, np.array(answer[position + 1 : position + 1 + depth]))
            rounds, emitted, position = rounds + 1, emitted + length, position + length
        return rounds, emitted


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--adapter", default="auto", help='a folder, or "none" for the drafter\'s own scores')
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--budgets", type=numbers, default=[16, 64, 256])
    parser.add_argument("--limit", type=int, default=10**6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--rank-without-noise", action="store_true", help="for comparison: the drafter ignores the noise")
    parser.add_argument("--side-by-side", type=int, default=16)
    parser.add_argument("--check", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from dataclasses import replace

    from ddtree.engine.loading import load_engine
    from ddtree.engine.request import Request
    from ddtree.engine.sequence import Sequence
    from ddtree.sampling.params import SamplingParams
    from ddtree.text import Tokenizer, render_chat

    started = time.perf_counter()
    engine = load_engine(args.target, args.drafter, device="cpu", dtype="float32", adapter=args.adapter)
    engine.config = replace(engine.config, max_running=args.side_by_side)
    tokenizer = Tokenizer.load(Path(args.target))
    sampling = SamplingParams(temperature=args.temperature, top_p=args.top_p)
    prompts = read_prompts(args.prompts)[: args.limit]
    requests = [
        Request(
            tuple(tokenizer.encode(render_chat(tokenizer, [{"role": "user", "content": p["text"]}]), add_special_tokens=False)),
            args.max_tokens,
            sampling,
            SEED,
            eos_token_ids=frozenset(tokenizer.eos_token_ids),
        )
        for p in prompts
    ]
    answers = plain_texts(engine, requests)
    print(f"{sum(map(len, answers))} tokens written, {time.perf_counter() - started:.0f} s", flush=True)
    replay = Replay(engine, max(args.budgets))
    pooled, differences = defaultdict(lambda: defaultdict(lambda: np.zeros(2, int))), []
    for number, (prompt, request, answer) in enumerate(zip(prompts, requests, answers, strict=True)):
        noise_rows, ranking = None, sampling
        if not sampling.greedy:
            sequence = Sequence(0, request)
            sequence.open_noise(engine.vocab_size, torch.device("cpu"))
            noise_rows = sequence.noise(len(request.prompt_token_ids), len(answer) + 16)
            if args.rank_without_noise:
                noise_rows, ranking = None, SamplingParams()
        drafted, replay.features = {}, None
        for budget in args.budgets:
            size = min(replay.config.block_size, budget + 1) if replay.config.shrinkable_block else replay.config.block_size
            if size not in drafted:
                drafted[size] = replay.drafts(request.prompt_token_ids, answer, size, ranking, noise_rows)
            counts = np.array(replay.walk(answer, drafted[size], size, budget))
            pooled[prompt["set"]][budget] += counts
            pooled["all"][budget] += counts
            if number < args.check:
                stats = engine.generate(replace(request, tree_budget=budget)).stats
                engine_counts = [stats.decode_rounds, sum(k * v for k, v in stats.acceptance_histogram.items())]
                differences.append([prompt["id"], budget, counts.tolist(), engine_counts])
        if number % 20 == 19:
            print(f"{number + 1} prompts, {time.perf_counter() - started:.0f} s", flush=True)
    result = {
        "acceptance_length": {
            name: {str(b): round(float(emitted / max(rounds, 1)), 3) for b, (rounds, emitted) in row.items()}
            for name, row in sorted(pooled.items())
        },
        "how": "replay along the target's own text (docs of benchmarks/acceptance.py)",
        "scoring": engine.scoring,
        "prompts": len(prompts),
        "tokens": sum(map(len, answers)),
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "ranked_with_noise": not (sampling.greedy or args.rank_without_noise),
        "checked_against_engine": differences,
        "seconds": round(time.perf_counter() - started, 1),
        "command": "python -m benchmarks.acceptance " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in result["acceptance_length"].items():
        print(f"{name:12}", *(f"{b}: {v:.2f}" for b, v in row.items()), sep="  ")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
