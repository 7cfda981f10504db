"""Time what stands between the drafter's logits and the next root: candidates, trees, drawing, accepting.

    python -m benchmarks.kernels.drafting [--sweep] [--repeats 30] [--vocab-size 248320]

Every kernel is first checked against its twin on the host, at the shapes that are then timed; a fault ends the run.
One CUDA graph holds the kernel once per input set, so that the caches do not hold one set's logits when it comes round
again; its replays are timed with events. Needs a CUDA device. A table for people; the last line is JSON: microseconds
as {"median", "least", "most"}, `floor_us` where bytes set one, by the copy bandwidth that the run measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache

import torch

from benchmarks.kernels.replay import copy_bandwidth, replayed
from ddtree.kernels.conditioning import AdapterWeights, transitions_pooled, transitions_pooled_reference
from ddtree.kernels.sample import (
    choose_filtered_pooled,
    choose_filtered_pooled_reference,
    choose_pooled,
    choose_pooled_reference,
    streams_pooled,
    streams_pooled_reference,
)
from ddtree.kernels.sample import triton as sample_kernels
from ddtree.kernels.top_tokens import triton as candidate_kernels
from ddtree.kernels.tree_accept import accept_pooled, accept_pooled_reference
from ddtree.kernels.tree_build import (
    TreeBuffers,
    build_ddtree_pooled,
    top_candidates_pooled,
    top_candidates_reference,
)
from ddtree.kernels.tree_build import triton as build_kernels
from ddtree.kernels.tree_build import triton_conditioned as conditioned_kernels

SETS = 8
DEPTHS = 15
CANDIDATES = 64  # whose scores know their parent
ADAPTERS = ((512, 256), (1024, 512))  # width, rank
BUDGETS = (15, 31, 63, 127, 255, 511, 1024)
BUILT = ("counts", "token_ids", "parents", "depths", "scores", "row_slots", "row_indices", "positions", "ancestor_mask")
DEVICE = "cuda"


@cache
def logit_sets(rows: int, vocab_size: int, count: int = SETS) -> list[torch.Tensor]:
    return [drafter_logits(rows, vocab_size, seed) for seed in range(count)]


def drafter_logits(rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """bf16 logits with the steep heads that language models have; every third row is all but certain."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator, device=DEVICE) * 2.5
    logits[:, : vocab_size // 50] += 4  # frequent tokens have low ids
    logits[::3, seed % vocab_size] = 45.0
    return logits.to(torch.bfloat16)


@cache
def best_of_first_set(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return top_candidates_reference(logit_sets(DEPTHS, vocab_size)[0].cpu(), 1024)


@cache
def tree_sets(budget: int, sequences: int) -> list[tuple[tuple, TreeBuffers]]:
    """Arguments of builds and what the twin makes of them."""
    sets = []
    for seed in range(SETS):
        arguments = tree_inputs(budget, sequences, seed)
        expected = TreeBuffers(sequences, budget, "cpu")
        on_host = (a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments)
        sets.append((arguments, build_ddtree_pooled(*on_host, expected)))
    return sets


def tree_inputs(budget: int, sequences: int, seed: int, vocab_size: int = 4096) -> tuple:
    """Arguments of a build: token id 0 is the root and among the candidates, depths of certainty tie across levels."""
    width = min(budget, vocab_size)
    logits = drafter_logits(sequences * DEPTHS, vocab_size, seed)
    ids, log_probs = top_candidates_reference(logits.cpu(), width)
    few = {"dtype": torch.int32, "device": DEVICE}
    return (
        torch.zeros(sequences, dtype=torch.int64, device=DEVICE),
        ids.view(sequences, DEPTHS, width).to(DEVICE),
        log_probs.view(sequences, DEPTHS, width).to(DEVICE),
        torch.full((sequences,), budget, **few),
        torch.full((sequences,), DEPTHS, **few),
        budget,
        torch.arange(sequences, **few),
        torch.full((sequences,), 500, **few),
    )


@cache
def conditioned_sets(budget: int, sequences: int) -> list[tuple[tuple, TreeBuffers]]:
    """As `tree_sets`, the candidates' scores turned a little by each parent."""
    sets = []
    for seed in range(SETS):
        roots, ids, log_probs, budgets, num_depths, _, *places = tree_inputs(CANDIDATES, sequences, seed)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        turned = torch.randn(sequences, DEPTHS, CANDIDATES, CANDIDATES, generator=generator, device=DEVICE) * 2
        table = (log_probs[:, :, None] + turned).log_softmax(dim=-1)
        arguments = (roots, ids, table, budgets.fill_(budget), num_depths, budget, *places)
        expected = TreeBuffers(sequences, budget, "cpu")
        on_host = (a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments)
        sets.append((arguments, build_ddtree_pooled(*on_host, expected)))
    return sets


def target_tokens(trees: TreeBuffers, seed: int) -> torch.Tensor:
    """A choice after each node that some child carries more often than not."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, 4096, (trees.num_rows,), generator=generator)
    token_ids, parents, starts = trees.token_ids.tolist(), trees.parents.tolist(), trees.starts.tolist()
    for start, count in zip(starts, trees.counts.tolist(), strict=False):
        for node in range(1, count):
            if torch.rand((), generator=generator) < 0.5:
                chosen[start + parents[start + node]] = token_ids[start + node]
    return chosen.to(DEVICE)


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"{what}: the kernel differs from its twin; nothing was timed after this")


def check_candidates(vocab_size: int, num: int, method: str) -> None:
    """The same ids in the same order: bf16 logits are far apart or equal, so rounding changes neither."""
    ids, log_probs = top_candidates_pooled(logit_sets(DEPTHS, vocab_size)[0], num, method=method)
    expected_ids, expected = (t[:, :num] for t in best_of_first_set(vocab_size))
    close = torch.allclose(log_probs.cpu(), expected, rtol=1e-5, atol=2e-5)
    check(close and torch.equal(ids.cpu(), expected_ids), f"candidates, num {num}, {method}")


def time_candidates(num: int, vocab_size: int, repeats: int, method: str = "triton", noisy: bool = False) -> dict:
    options = {"method": method}
    if noisy:
        options["temperatures"] = torch.full((DEPTHS,), 0.8, device=DEVICE)
        options["streams"] = torch.arange(DEPTHS, dtype=torch.int64, device=DEVICE)
    else:
        check_candidates(vocab_size, num, method)
    sets = logit_sets(DEPTHS, vocab_size)
    return replayed([lambda x=x: top_candidates_pooled(x, num, **options) for x in sets], repeats)


def time_build(budget: int, sequences: int, repeats: int, conditioned: bool = False) -> dict:
    sets = (conditioned_sets if conditioned else tree_sets)(budget, sequences)
    trees = TreeBuffers(sequences, budget, DEVICE, num_candidates=CANDIDATES if conditioned else 0)
    for arguments, expected in sets:
        build_ddtree_pooled(*arguments, trees)
        for name in BUILT:
            same = torch.equal(getattr(trees, name).cpu(), getattr(expected, name))
            what = "build conditioned" if conditioned else "build"
            check(same, f"{what}, budget {budget}, {sequences} sequences, {name}")
    return replayed([lambda a=a: build_ddtree_pooled(*a, trees) for a, _ in sets], repeats)


def time_conditioning(sequences: int, size: int, rank: int, repeats: int, num_ancestors: int = 1, vocab_size: int = 32_768) -> dict:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(torch.bfloat16)

    weights = AdapterWeights(
        drawn(num_ancestors, vocab_size, size),
        drawn(vocab_size, rank, scale=1 / rank),
        drawn(num_ancestors, size, size, scale=size**-0.5),
        drawn(num_ancestors, size),
        drawn(num_ancestors, rank + 2, size, scale=size**-0.5),
        drawn(num_ancestors, rank + 2),
    )
    sets = []
    for seed in range(SETS):
        roots, ids, ranking, *_ = tree_inputs(CANDIDATES, sequences, seed)
        strengths = torch.ones(sequences, device=DEVICE)
        sets.append((drawn(num_ancestors, sequences, DEPTHS, size), roots, ids, ranking, ranking, strengths))
    wide = AdapterWeights(*(tensor.double() for tensor in weights))
    for rows in sets:
        expected = transitions_pooled_reference(rows[0].double(), *rows[1:], wide)
        pairs = zip(_tables(transitions_pooled(*rows, weights)), _tables(expected), strict=True)
        good = all(bool((found - table).norm() < 2e-2 * table.norm()) for found, table in pairs)
        check(good, f"conditioning, width {size}, {sequences} sequences")
    return replayed([lambda r=r: transitions_pooled(*r, weights) for r in sets], repeats)


def _tables(scores) -> list[torch.Tensor]:
    """A result of `transitions_pooled`, whichever it is, as tensors."""
    return [scores] if isinstance(scores, torch.Tensor) else list(scores)


def time_accept(budget: int, sequences: int, repeats: int) -> dict:
    trees = TreeBuffers(sequences, budget, DEVICE)
    build_ddtree_pooled(*tree_inputs(budget, sequences, 0), trees)
    sets = [target_tokens(trees, seed) for seed in range(SETS)]
    arrays = [t.cpu() for t in (trees.token_ids, trees.parents, trees.starts, trees.counts)]
    for tokens in sets:
        expected = accept_pooled_reference(*arrays, tokens.cpu(), DEPTHS + 1)
        found = accept_pooled(trees, tokens, DEPTHS + 1)
        same = all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
        check(same, f"accept, budget {budget}")
    return replayed([lambda t=t: accept_pooled(trees, t, DEPTHS + 1) for t in sets], repeats)


def time_choose(rows: int, temperature: float, vocab_size: int, repeats: int) -> dict:
    sets = logit_sets(rows, vocab_size, 4)
    temperatures = torch.full((rows,), temperature, device=DEVICE)
    keys = torch.arange(rows, dtype=torch.int64, device=DEVICE) * 0x1234567
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    streams = streams_pooled(keys, positions)
    check(torch.equal(streams.cpu(), streams_pooled_reference(keys.cpu(), positions.cpu())), "streams")
    few = min(rows, 8)
    expected = choose_pooled_reference(sets[0][:few].cpu(), temperatures[:few].cpu(), streams[:few].cpu())
    found = choose_pooled(sets[0], temperatures, streams)[:few].cpu()
    check(torch.equal(found, expected), f"choose, temperature {temperature}")
    return replayed([lambda x=x: choose_pooled(x, temperatures, streams) for x in sets], repeats)


def time_choose_filtered(rows: int, temperature: float, vocab_size: int, repeats: int) -> dict:
    """Top-p 0.95, every other row top-k 20 as well; at high temperatures rows keep more than the kernel lists."""
    sets = logit_sets(rows, vocab_size, 4)
    temperatures = torch.full((rows,), temperature, device=DEVICE)
    streams = torch.arange(rows, dtype=torch.int64, device=DEVICE) * 0x123456789
    top_ks = torch.tensor([0, 20], dtype=torch.int32, device=DEVICE).repeat(rows // 2)
    top_ps = torch.full((rows,), 0.95, dtype=torch.float64, device=DEVICE)
    columns = (temperatures, streams, top_ks, top_ps, torch.zeros_like(top_ps))
    few = [column[:8].cpu() for column in columns]
    expected = choose_filtered_pooled_reference(sets[0][:8].cpu(), *few)
    found = choose_filtered_pooled(sets[0], *columns)[:8].cpu()
    check(torch.equal(found, expected), f"choose with filters, temperature {temperature}")
    return replayed([lambda x=x: choose_filtered_pooled(x, *columns) for x in sets], repeats)


@contextmanager
def settings(module, **values):
    """Module constants changed for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def sweep(vocab_size: int, repeats: int) -> list[dict]:
    """The same timings under other block sizes and warps."""
    found = []

    def note(what: str, chosen: str, timing: Callable[[], dict]) -> None:
        try:
            result = timing()
        except Exception as error:  # a shape that does not compile is an answer too
            print(f"{what:28s} {chosen:32s} {type(error).__name__}")
            return
        found.append({"what": what, "settings": chosen} | result)
        print(f"{what:28s} {chosen:32s} {result['median']:8.1f} us", flush=True)

    for budget in (63, 127, 255, 1024):
        for warps, mine, others in itertools.product((4, 8, 16, 32), (32, 64, 128), (32, 64)):
            if mine * others <= warps * 1024 and warps in ((16, 32) if budget > 1000 else (4, 8)):
                with settings(build_kernels, SHAPES=((8192, warps, mine, others),)):
                    note(f"build {budget}", f"{warps} {mine} {others}", lambda b=budget: time_build(b, 1, repeats))
    for budget, warps, tile, others in itertools.product((16, 63, 255), (4, 8), (512, 1024, 2048), (32, 64)):
        with settings(conditioned_kernels, SHAPES=((65536, warps, tile, others, others),)):
            chosen = f"{warps} {tile} {others}"
            note(f"build conditioned {budget}", chosen, lambda b=budget: time_build(b, 1, repeats, conditioned=True))
    for num, columns, rows, warps in itertools.product((64, 1024), (64, 128, 256), (16, 32, 64), (4, 8)):
        with settings(candidate_kernels, GROUP_TILE=columns, GROUP_ROWS=rows, GROUP_WARPS=warps):
            chosen = f"groups {columns} {rows} {warps}"
            note(f"candidates {num}", chosen, lambda n=num: time_candidates(n, vocab_size, repeats))
    for num, ranked, against in itertools.product((64, 1024), (32, 64, 128), (16, 32, 64)):
        with settings(candidate_kernels, RANKED=ranked, RANKED_AGAINST=against):
            note(f"candidates {num}", f"rank {ranked} {against}", lambda n=num: time_candidates(n, vocab_size, repeats))
    for rows, tile, warps in itertools.product((16, 128), (1024, 2048, 4096, 8192), (4, 8)):
        with settings(sample_kernels, TILE=tile, WARPS=warps):
            note(f"choose {rows}", f"{tile} {warps}", lambda r=rows: time_choose(r, 0.8, vocab_size, repeats))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other block sizes and warps as well")
    parser.add_argument("--repeats", type=int, default=30, help="timed replays of each graph")
    parser.add_argument("--vocab-size", type=int, default=248_320)
    options = parser.parse_args()
    vocab_size, repeats = options.vocab_size, options.repeats
    torch.cuda.set_device(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {bandwidth / 1e12:.2f} TB/s")
    results = []

    def note(what: str, timing: dict, num_bytes: int | None = None) -> None:
        floor = None if num_bytes is None else num_bytes / bandwidth * 1e6
        results.append({"what": what, "us": timing, "floor_us": floor})
        beside = "" if floor is None else f"floor {floor:.1f}"
        spread = f"({timing['least']:.1f}-{timing['most']:.1f})"
        print(f"{what:38s} {timing['median']:8.1f} us {spread:18s} {beside}", flush=True)

    logits_bytes = 2 * vocab_size
    for num in (16, 64, 128, 256, 1024):
        note(f"candidates {num}", time_candidates(num, vocab_size, repeats), DEPTHS * logits_bytes)
    note("candidates 64, noise", time_candidates(64, vocab_size, repeats, noisy=True), DEPTHS * logits_bytes)
    for num in (64, 1024):
        note(f"candidates {num}, topk", time_candidates(num, vocab_size, repeats, "topk"), DEPTHS * logits_bytes)
    for budget, sequences in [*((budget, 1) for budget in BUDGETS), (63, 8), (15, 64)]:
        note(f"build {budget}, {sequences} sequences", time_build(budget, sequences, repeats))
    for budget, sequences in [*((budget, 1) for budget in (16, 32, 64, 128, 256, 1024)), (64, 8)]:
        timing = time_build(budget, sequences, repeats, conditioned=True)
        note(f"build conditioned {budget}, {sequences} sequences", timing)
    for (size, rank), sequences in itertools.product(ADAPTERS, (1, 8)):
        timing = time_conditioning(sequences, size, rank, repeats)
        note(f"conditioning {size} {rank}, {sequences} sequences", timing)
    for budget, sequences in ((63, 1), (127, 1), (1024, 1), (63, 8)):
        note(f"accept {budget}, {sequences} sequences", time_accept(budget, sequences, repeats))
    for rows, temperature in ((16, 0.0), (64, 0.0), (16, 0.8), (64, 0.8), (128, 0.8)):
        timing = time_choose(rows, temperature, vocab_size, repeats)
        note(f"choose {rows} rows, temperature {temperature}", timing, rows * logits_bytes)
    for rows, temperature in ((16, 0.8), (64, 0.8), (64, 3.0)):
        timing = time_choose_filtered(rows, temperature, vocab_size, repeats)
        note(f"choose {rows} rows, filters, temperature {temperature}", timing, rows * logits_bytes)
    swept = sweep(vocab_size, max(5, repeats // 3)) if options.sweep else []
    facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_s": bandwidth}
    print(json.dumps(facts | {"vocab_size": vocab_size, "results": results, "sweep": swept}))


if __name__ == "__main__":
    main()
