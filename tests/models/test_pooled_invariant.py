"""A batch-invariant target: a token's hidden states are the same bits in a prompt's chunk, a plain step and a draft tree."""

from __future__ import annotations

import pytest
import torch

from ddtree.caches.pages import PageAllocator
from ddtree.caches.pooled_rows import PREFILL, STEP, PooledRows, PromptIndices, consecutive_rows, prompt_rows
from ddtree.caches.pools import PageTable
from ddtree.doctor.hybrid import TARGET, fill
from ddtree.models.config import ModelConfig
from ddtree.models.pooled_moe import moe_invariant
from ddtree.models.pooled_target import PooledTarget
from ddtree.models.qwen3_5 import Qwen3_5
from ddtree.tree.draft_tree import DraftTree
from tests.closeness import assert_close
from tests.models import test_pooled, tiny
from tests.models.test_pooled import random_tree, run_tree, tree_rows

GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")])]
BLOCK, MAX_ROWS = 16, 176


def targets():
    """Those of `test_pooled`, but a hybrid whose rows are wide: a CPU's vector units round otherwise than what they leave over,
    so that in the twins a row's bits would depend on its place."""
    wide = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    hybrid = Qwen3_5(ModelConfig.from_hf({**TARGET, **wide}), "cpu", torch.float32)
    fill(hybrid, torch.Generator().manual_seed(1))
    hybrid.finish_loading()
    others = {name: model for name, model in test_pooled.TARGETS.items() if name != "Qwen3_5MoeForCausalLM"}
    return others | {"qwen3_5": hybrid.eval()}


TARGETS = targets()


class Pool:
    """A target over pools that hold three sequences; bf16 on a GPU."""

    def __init__(self, name: str, device: str, max_rows: int = MAX_ROWS) -> None:
        self.model = TARGETS[name] if device == "cpu" else on_gpu(TARGETS[name])
        self.table, allocator = PageTable(4, 512, device), PageAllocator(64, 64)
        allocator.allocate(1)
        options = {"batch_invariant": True, "block_size": BLOCK}
        self.target = PooledTarget(self.model, (0,), self.table, 64, max_rows, **options)
        for slot in range(3):
            self.table.give(slot, allocator.allocate(8))
        self.device = device

    def slots(self, *slots: int) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int32, device=self.device)

    def prefill(self, slot: int, ids: torch.Tensor, chunk: int) -> torch.Tensor:
        """[T, C], committed."""
        parts = []
        for start in range(0, len(ids), chunk):
            part = ids[None, start : start + chunk].to(self.device)
            parts.append(self.target(consecutive_rows(PREFILL, part, self.slots(slot), self.table.context_lengths)))
            self.table.context_lengths[slot] += part.shape[1]
        return torch.cat(parts)

    def prompts(self, chunks: dict[int, list[int]], padding: int) -> torch.Tensor:
        """[R, C], committed: the next tokens of several slots in one forward, with rows and a sequence of nobody behind them."""
        firsts = [int(self.table.context_lengths[slot]) for slot in chunks]
        indices = PromptIndices.of(list(chunks.values()), firsts, list(chunks))
        if padding:
            indices = indices.padded(len(indices.token_ids) + padding, len(chunks) + 1, dummy=3)
        hidden = self.target(prompt_rows(indices, self.device))
        for slot, ids in chunks.items():
            self.table.context_lengths[slot] += len(ids)
        return hidden

    def step(self, slots: tuple[int, ...], ids: list[int]) -> torch.Tensor:
        """[B, C], committed."""
        tokens = torch.tensor(ids, device=self.device)[:, None]
        hidden = self.target(consecutive_rows(STEP, tokens, self.slots(*slots), self.table.context_lengths))
        for slot in slots:
            self.table.context_lengths[slot] += 1
        return hidden

    def tree(self, slots: tuple[int, ...], trees: list[DraftTree], each: int) -> tuple[torch.Tensor, PooledRows]:
        """[B * each, C], staged."""
        lengths = [int(self.table.context_lengths[slot]) for slot in slots]
        rows = tree_rows(trees, torch.tensor(slots, dtype=torch.int32), lengths, each)
        fields = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in vars(rows).items()}
        rows = PooledRows(**fields)
        return self.target(rows), rows

    def commit(self, slots: tuple[int, ...], rows: PooledRows, paths: list[list[int]]) -> None:
        padded = torch.zeros(len(paths), max(map(len, paths)), dtype=torch.int32)
        for index, path in enumerate(paths):
            padded[index, : len(path)] = torch.tensor(path)
        lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32, device=self.device)
        self.target.pool.commit(self.slots(*slots), rows.starts, padded.to(self.device), lengths)
        self.table.context_lengths.index_add_(0, self.slots(*slots).long(), lengths)


def on_gpu(model):
    """A copy in bf16."""
    copied = type(model)(model.config, "cuda", torch.bfloat16)
    for (_, there), (_, here) in zip(copied.checkpoint_tensors(), model.checkpoint_tensors(), strict=True):
        there.copy_(here)
    copied.finish_loading()
    return copied.eval()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17])
def test_rows_of_any_number_are_aligned_alike(count, device):
    """A kernel is compiled once for pointers at multiples of 16 bytes and once more for others: nobody's prompt should wait for that."""
    rows = prompt_rows(PromptIndices.of([range(count), range(3)], [0, 7], [2, 0]), torch.device(device))
    indices = (rows.positions, rows.row_slots, rows.row_indices, rows.starts, rows.slots)
    assert all(each.data_ptr() % 16 == 0 for each in indices)


def chain(ids: list[int], others: int) -> tuple[DraftTree, list[int]]:
    """A tree along `ids`, with `others` siblings before each node of the path; and the path."""
    import numpy as np

    token_ids, parents, depths, path = [ids[0]], [-1], [0], [0]
    for depth, token_id in enumerate(ids[1:], 1):
        for other in range(others):
            token_ids.append((token_id + 1 + other) % 96)
        token_ids.append(token_id)
        parents += [path[-1]] * (others + 1)
        depths += [depth] * (others + 1)
        path.append(len(token_ids) - 1)
    arrays = (np.array(token_ids, np.int64), np.array(parents, np.int32), np.array(depths, np.int32))
    return DraftTree(*arrays, np.zeros(len(token_ids), np.float32)), path


@torch.inference_mode()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name == "Qwen3ForCausalLM")) for name in TARGETS])
def test_a_token_has_the_same_bits_however_it_is_computed(name, device):
    """A text at once, in chunks of other sizes, beside other prompts, in plain steps beside others, and along paths of trees beside others."""
    pool, text = Pool(name, device), torch.randint(0, 96, (110,), generator=torch.Generator().manual_seed(3))
    whole = pool.prefill(0, text, 110)
    logits = pool.target.logits(whole)
    assert torch.equal(pool.target.logits(whole[70:71]), logits[70:71])
    for chunk in (1, 37, 64):
        pool = Pool(name, device)
        assert torch.equal(pool.prefill(1, text, chunk), whole), f"chunks of {chunk}"
    pool, other = Pool(name, device), text.flip(0).tolist()
    for start, count, padding in ((0, 37, 0), (37, 1, 5), (38, 60, 17)):
        hidden = pool.prompts({2: other[:count // 2 + 1], 1: text[start : start + count].tolist(), 0: other[:9]}, padding)
        mine = hidden[count // 2 + 1 :][:count]
        assert torch.equal(mine, whole[start : start + count]), f"{count} tokens from {start} on beside others'"
    pool = Pool(name, device)
    pool.prefill(1, text[:40], 40)
    pool.prefill(2, text[:9], 9)
    pool.prefill(0, text.flip(0)[:30], 30)
    place = 40
    while place < 95:
        count = 1 + place % 13
        ids = text[place : place + count].tolist()
        tree, path = chain(ids, others=place % 4)
        hidden, rows = pool.tree((2, 1, 0), [random_tree(9, place), tree, random_tree(31, place)], 56)
        node = 56 + torch.tensor(path, device=device)
        assert torch.equal(hidden[node], whole[place : place + count]), f"a path of {count} from {place} on"
        pool.commit((2, 1, 0), rows, [[0], path, []])
        place += count
        hidden = pool.step((0, 1), [5, int(text[place])])
        assert torch.equal(hidden[1], whole[place]), f"a step at {place}"
        place += 1


@torch.inference_mode()
@pytest.mark.parametrize("name", TARGETS)
def test_it_computes_what_the_modules_do(name):
    pool, text = Pool(name, "cpu"), torch.randint(0, 96, (37,), generator=torch.Generator().manual_seed(4))
    cache = pool.model.new_cache()
    expected, _ = tiny.feed(pool.model, cache, text)
    found = pool.target.logits(pool.prefill(0, text, 20))
    assert_close("logits", found, expected, 1e-4)
    tree = random_tree(17, 1)
    hidden, _ = pool.tree((0,), [tree], 20)
    assert_close("hidden", hidden[:17], run_tree(pool.model, cache, tree, ()).hidden, 1e-4)


@torch.inference_mode()
def test_a_shared_expert_gives_each_row_what_it_gets_alone():
    """Qwen3.5's experts by themselves: its narrow recurrent layers keep no bits on a CPU."""
    model = test_pooled.TARGETS["Qwen3_5MoeForCausalLM"]
    moe = model.layers[0].mlp
    assert moe.shared_expert is not None
    rows = torch.randn(9, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    together = moe_invariant(moe, rows)
    assert_close("rows", together, moe(rows), 1e-5)
    for row in range(9):
        assert torch.equal(moe_invariant(moe, rows[row : row + 1]), together[row : row + 1])
