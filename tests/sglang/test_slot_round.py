"""Rounds on the device over SGLang's slots: the same trees, masks, links and tokens as on the host."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ddtree.engine.drafter import Drafter
from ddtree.engine.request import Request
from ddtree.engine.sequence import Sequence
from ddtree.models.adapter import Adapter, AdapterConfig
from ddtree.models.conditioning import Conditioning
from ddtree.sampling.params import SamplingParams
from ddtree.sglang.host_round import HostRound
from ddtree.sglang.nodes import Report, links_of
from ddtree.sglang.slot_rounds import SlotRounds, decode_graphs
from ddtree.sglang.slots import SlotContext, SlotPool
from ddtree.sglang.trees import first_children_and_siblings
from tests.sglang.test_packing import random_drafter, some_tree

VOCAB, NUM_NODES, MOST_TOKENS, NUM_SLOTS = 31, 9, 40, 90
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=0.8)
FILTERED = SamplingParams(temperature=0.9, top_p=0.8, top_k=7, min_p=0.01)
CPU = torch.device("cpu")


class OneRank:
    """A `TargetFace` of random weights."""

    group, device, dtype = SimpleNamespace(world_size=1), CPU, torch.float32

    def __init__(self, width):
        generator = torch.Generator().manual_seed(5)
        self.embed_tokens = torch.randn(VOCAB, width, generator=generator)
        self.lm_head = SimpleNamespace(weight=torch.randn(VOCAB, width, generator=generator))
        self.config = SimpleNamespace(vocab_size=VOCAB)

    def embed(self, token_ids):
        return F.embedding(token_ids, self.embed_tokens)

    def logits(self, hidden):
        return hidden @ self.lm_head.weight.T

    def agree(self, numbers):
        return numbers

    def share(self, *tensors):
        assert all(tensor.is_contiguous() for tensor in tensors), "a broadcast takes whole tensors"


class Setting:
    """A batch in the middle of its answers, its tokens' rows under slots in no order."""

    def __init__(self, samplings, budgets, adapter=False):
        model = random_drafter()
        width = model.config.hidden_size
        self.target = OneRank(width)
        conditioning = None
        if adapter:
            torch.manual_seed(3)
            weights = Adapter(AdapterConfig(width, model.config.block_size, 16, 8, "none")).requires_grad_(False)
            for parameter in weights.parameters():
                parameter.normal_(0, 0.3)
            conditioning = Conditioning(weights, self.target, tables=False)
        self.drafter = Drafter(model, self.target, conditioning)
        self.pool = SlotPool(model, NUM_SLOTS, SlotRounds.staged_rows(8, model.config.block_size))
        generator = torch.Generator().manual_seed(1)
        slots = torch.randperm(NUM_SLOTS - 1, generator=generator) + 1
        self.table = torch.zeros(7, MOST_TOKENS, dtype=torch.int32)
        self.sequences, self.rows = [], torch.tensor([4, 1, 6, 3, 2][: len(samplings)])
        for index, (row, sampling, budget) in enumerate(zip(self.rows.tolist(), samplings, budgets, strict=True)):
            length = 5 + 3 * index
            own, slots = slots[:length], slots[length:]
            self.table[row, :length] = own
            request = Request(tuple(range(1, length + 2)), 20, sampling, seed=index, tree_budget=budget)
            sequence = Sequence(index, request, tree_budget=budget, conditioned=adapter)
            sequence.open_choice(VOCAB, CPU)
            features = torch.randn(length, model.fc.in_features, generator=generator)
            self.pool.absorb(features, torch.arange(length), own)
            self.sequences.append(sequence)
        self.rounds = SlotRounds(self.drafter, self.pool, self.target, self.table, NUM_NODES, 5, graphs=True)

    def on_host(self):
        for sequence, row in zip(self.sequences, self.rows, strict=True):
            sequence.drafter_state = SlotContext(self.pool, self.table[row, : sequence.context_length])
        return HostRound(self.drafter, self.target, self.sequences, NUM_NODES)


@pytest.mark.parametrize("adapter", [False, True], ids=["factorised", "conditioned"])
@pytest.mark.parametrize(
    ("samplings", "budgets"),
    [([GREEDY], [8]), ([GREEDY, GREEDY, GREEDY], [8, 3, 0]), ([WARM, GREEDY, FILTERED], [8, 5, 8])],
    ids=["one", "budgets", "sampled"],
)
def test_a_round_on_the_device_is_the_hosts(samplings, budgets, adapter):
    setting = Setting(samplings, budgets, adapter)
    assert setting.rounds.takes(setting.sequences)
    there, here = setting.rounds.begin(setting.sequences, setting.rows), setting.on_host()
    found, expected = there.finish(), here.finish()
    for name in ("token_ids", "positions", "next_token", "next_sibling", "mask"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for parents, each in zip(there.parents(), here.parents(), strict=True):
        assert np.array_equal(parents, each)
    logits = torch.randn(len(samplings) * NUM_NODES, VOCAB, generator=torch.Generator().manual_seed(2))
    # So that drafted tokens are accepted.
    logits[:, found.token_ids[:, 1:].unique()] += 2
    accepted, wanted = there.accept_logits(logits), here.accept_logits(logits)
    for name in ("lengths", "index", "token_ids"):
        assert torch.equal(getattr(accepted, name), getattr(wanted, name)), name
    paths = Report(accepted).paths()
    assert [len(path) for path in paths] == accepted.lengths.tolist() and max(map(len, paths)) > 1
    assert all(path[0] == 0 for path in paths)


def test_places_that_nobody_takes_change_nothing():
    setting = Setting([WARM, GREEDY, GREEDY], [8, 8, 2])
    exact = setting.rounds.begin(setting.sequences, setting.rows)
    padded = setting.rounds.make(8, True, graphs=False)
    padded.begin(setting.sequences, setting.rows, [setting.drafter.depth_limit(sequence) for sequence in setting.sequences])
    found, expected = padded.finish(), exact.finish()
    assert torch.equal(found.token_ids, expected.token_ids) and torch.equal(found.mask, expected.mask)
    logits = torch.randn(3 * NUM_NODES, VOCAB, generator=torch.Generator().manual_seed(2))
    accepted, wanted = padded.accept_logits(logits), exact.accept_logits(logits)
    assert torch.equal(accepted.index, wanted.index) and torch.equal(accepted.token_ids, wanted.token_ids)


def test_a_rehearsal_leaves_the_rounds_as_they_were():
    setting = Setting([WARM, GREEDY], [8, 8])
    before = setting.rounds.begin(setting.sequences, setting.rows).finish()
    setting.rounds.make(2, True, graphs=False).rehearse()
    after = setting.rounds.begin(setting.sequences, setting.rows).finish()
    assert torch.equal(before.token_ids, after.token_ids) and torch.equal(before.mask, after.mask)


def test_penalties_are_the_hosts():
    setting = Setting([GREEDY, SamplingParams(presence_penalty=0.5)], [8, 8])
    assert not setting.rounds.takes(setting.sequences) and setting.rounds.takes(setting.sequences[:1])


@pytest.mark.parametrize("seed", range(3))
def test_links_of_a_batch_are_those_of_its_trees(seed):
    trees = [some_tree(seed), some_tree(seed + 10)]
    first, sibling = links_of(torch.from_numpy(np.stack([tree.parents for tree in trees])))
    for index, tree in enumerate(trees):
        for link, expected in zip((first, sibling), first_children_and_siblings(tree.parents), strict=True):
            assert link[index].tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("changes", "captured"),
    [
        ({}, True),
        ({"disable_cuda_graph": True}, False),
        ({"disable_decode_cuda_graph": True}, False),
        ({"cuda_graph_backend_decode": "disabled"}, False),
        ({"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="disabled"))}, False),
        ({"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full")), "disable_cuda_graph": False}, True),
    ],
)
def test_no_graphs_where_sglang_was_told_to_decode_without(changes, captured):
    assert decode_graphs(SimpleNamespace(**changes)) is captured
