"""Pages for the attention tests: everything that nobody may read is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.kernels.trees import ancestor_mask, random_parents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PADDING = 3  # rows behind the last sequence's


@dataclass(frozen=True, eq=False)
class Pools:
    """Sequences of `counts` rows behind `contexts` committed tokens, in slots of a pool that has two more.

    `inside` more rows of each sequence are padding that sees itself alone.
    """

    counts: list[int]
    contexts: list[int]
    query: torch.Tensor  # [R, H, D]
    key_pages: torch.Tensor  # [P, page_size, Hkv, D]
    value_pages: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    context_lengths: torch.Tensor
    mask: torch.Tensor  # [R, N] uint8 of one random tree a sequence; padding is garbage

    @classmethod
    def random(cls, counts, contexts, heads, kv_heads, head_dim, dtype, page_size=16, max_rows=None, reach=None, inside=0):
        num_slots = len(counts) + 2
        widths = [count + inside for count in counts]
        max_rows = max_rows or max(widths)
        pages_each = max(-(-(a + b) // page_size) for a, b in zip(counts, contexts, strict=True)) + 1
        # Page 0 is nobody's, and a slot's pages lie anywhere.
        table = (torch.randperm(num_slots * pages_each) + 1).view(num_slots, pages_each)
        slots = torch.randperm(num_slots)[: len(counts)]
        pages = [torch.full((num_slots * pages_each + 1, page_size, kv_heads, head_dim), torch.nan) for _ in range(2)]
        starts = torch.tensor([0, *torch.tensor(widths).cumsum(0).tolist()])
        num_rows = int(starts[-1])
        mask = torch.full((num_rows + PADDING, max_rows), 7, dtype=torch.uint8)
        lengths = torch.full((num_slots,), 10**6)
        for index, (count, context) in enumerate(zip(counts, contexts, strict=True)):
            lengths[slots[index]] = context
            places = torch.arange(context + count)
            for each in pages:
                each[table[slots[index]][places // page_size], places % page_size] = torch.randn(
                    context + count, kv_heads, head_dim
                )
            last = int(starts[index + 1])
            if inside:
                mask[last - inside : last] = 0
                mask[range(last - inside, last), range(count, count + inside)] = 1
            if count:
                parents = random_parents(count, reach or count, index)
                mask[starts[index] : last - inside, :count] = ancestor_mask(parents).to(torch.uint8)
        query = torch.randn(num_rows + PADDING, heads, head_dim)
        query[num_rows:] = torch.nan
        for last in starts[1:].tolist() if inside else ():
            query[last - inside : last] = torch.nan
        small = (tensor.to(DEVICE, torch.int32) for tensor in (table, slots, starts, lengths))
        floats = (tensor.to(DEVICE, dtype) for tensor in (query, *pages))
        return cls(counts, contexts, *floats, *small, mask.to(DEVICE))

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1])

    def arguments(self, tree: bool, scale: float | None = None, max_rows: int | None = None) -> tuple:
        """Of `tree_attention_pooled`, up to `max_rows`."""
        return (
            self.query, self.key_pages, self.value_pages, self.page_table, self.slots, self.starts, self.context_lengths,
            self.mask if tree else None, scale or self.query.shape[2] ** -0.5, max_rows or self.mask.shape[1],
        )  # fmt: skip

    def places(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and place in it of each token, committed or staged, of sequence `index`."""
        page_size = self.key_pages.shape[1]
        tokens = torch.arange(self.contexts[index] + self.counts[index], device=DEVICE)
        return self.page_table[self.slots[index]][tokens // page_size].long(), tokens % page_size
