"""The worker that SGLang's scheduler drives: a batch in, tokens out. Prefill absorbs features; decoding is rounds of
draft, build, verify, accept, commit (docs/decode_round.md), of which verify and commit are SGLang's.

B sequences, N nodes of each one's padded tree, T tokens of a prefill, F feature width, V vocabulary.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from pathlib import Path

import numpy as np
import torch
from sglang.srt.layers import logprob_processor
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify, prepare_mamba_track_for_verify

from ddtree.engine.decode_round import grow
from ddtree.engine.drafter import Drafter
from ddtree.engine.loading import load_conditioning
from ddtree.engine.target import choose_tokens
from ddtree.models.dflash import load_drafter
from ddtree.sglang import masked_attention
from ddtree.sglang.features import capture
from ddtree.sglang.refusals import request_fault
from ddtree.sglang.sequences import Sequences
from ddtree.sglang.slots import SlotContext, SlotPool
from ddtree.sglang.target_face import TargetFace
from ddtree.sglang.trace import Trace
from ddtree.sglang.trees import NO_NODE, PackedTrees, moves, pack
from ddtree.tree.accept import Acceptance, accept
from ddtree.tree.draft_tree import DraftTree

logger = logging.getLogger(__name__)


class DDTreeWorker(BaseSpecWorker):
    """One tensor-parallel rank's worker. Every rank drafts for the whole batch; the first one's word holds."""

    def __init__(self, server_args, target_worker, **more) -> None:
        """`more` differs between releases and is not needed."""
        super().__init__()
        self._target_worker = target_worker
        runner = target_worker.model_runner
        self.num_nodes: int = server_args.speculative_num_draft_tokens
        self.speculative_num_draft_tokens = self.num_nodes
        self.device = torch.device(runner.device)
        if self.device.type == "cpu":
            masked_attention.install()
        self.target = TargetFace(runner)
        path = Path(server_args.speculative_draft_model_path)
        model = load_drafter(path, self.target.config, self.device, runner.dtype)
        capture(runner.model, self.target.config.num_layers, model.config.target_layer_ids)
        conditioning = load_conditioning("auto", path, model, self.target)
        self.target.reads_whole = conditioning is not None
        self.drafter = Drafter(model, self.target, conditioning)
        self.sequences = Sequences(self.num_nodes - 1, self.target.config.vocab_size, self.device)
        self.trace = Trace.from_environment(self.target.group.rank_in_group)
        self.pool: SlotPool | None = None

    @property
    def draft_worker(self):
        """No model runner of SGLang's drafts."""
        return None

    def alloc_memory_pool(self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None) -> None:
        """The drafter's rows, one for each slot of the target's pool and for SGLang's padding slot."""
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.pool = SlotPool(self.drafter.model, token_to_kv_pool_allocator.size + 1)
        logger.info(
            "DDTREE: block size %d, up to %d nodes a tree, drafter's rows take %.2f GiB",
            self.drafter.block_size, self.num_nodes - 1, self.pool.num_bytes / 2**30,
        )

    @torch.no_grad()
    def forward_batch_generation(self, batch, on_publish=None, pp_proxy_tensors=None) -> GenerationBatchResult:
        """SGLang's one call a step: a prefill's chunks, or a round for every running request."""
        step = self._decode if batch.forward_mode.is_decode() else self._prefill
        result = step(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    # Prefill

    def _prefill(self, batch) -> GenerationBatchResult:
        """Commit chunks of prompts and choose the token after each, which counts only after the last chunk."""
        result = self._target_worker.forward_batch_generation(
            batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
        )
        if batch.forward_mode.is_idle():
            return self._result(batch, result, torch.zeros(0, dtype=torch.int64, device=self.device), [], batch.seq_lens)
        self._absorb_prompts(batch, result.logits_output.hidden_states)
        lengths, chosen = batch.seq_lens.tolist(), []
        for req, length, logits in zip(batch.reqs, lengths, result.logits_output.next_token_logits, strict=True):
            if fault := request_fault(req):
                req.to_finish = FINISH_ABORT(fault, HTTPStatus.BAD_REQUEST, "BadRequestError")
                chosen.append(0)
                continue
            sequence = self.sequences(req)
            root = DraftTree.root_only(sequence.root_token)
            chosen.append(int(choose_tokens(sequence, root, logits[None], length)[0]))
        tokens = torch.from_numpy(self.target.agree(np.array(chosen, dtype=np.int64))).to(self.device)
        if batch.return_logprob:
            self._add_logprobs(batch, result.logits_output, tokens, torch.arange(len(chosen), device=self.device)[:, None])
            result.logits_output.next_token_logprobs = result.logits_output.next_token_logprobs.flatten()
        return self._result(batch, result, tokens, [1] * len(chosen), batch.seq_lens)

    def _absorb_prompts(self, batch, features: torch.Tensor) -> None:
        """Features [T, F] of all chunks' rows, in the batch's order, into the drafter's pool."""
        positions = torch.cat(
            [torch.arange(start, start + count) for start, count in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        )
        self.pool.absorb(features, positions.to(self.device), batch.out_cache_loc)

    # Decoding

    def _decode(self, batch) -> GenerationBatchResult:
        """A round. The batch's fields that SGLang reads back after it are the scheduler's to restore."""
        sequences = [self.sequences(req) for req in batch.reqs]
        lengths = batch.seq_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        rows = batch.req_pool_indices
        for sequence, row, length in zip(sequences, rows.tolist(), lengths, strict=True):
            assert sequence.context_length == length, "all tokens but the last are committed"
            sequence.drafter_state = SlotContext(self.pool, table[row, :length])
        trees = self._build(sequences)
        packed = pack(trees, lengths, self.num_nodes)
        nodes = torch.arange(self.num_nodes, device=self.device)
        slots = table[rows[:, None], batch.seq_lens[:, None] + nodes].to(torch.int64)  # [B, N]
        result = self._verify(batch, packed, slots)
        logits = result.logits_output.next_token_logits.view(len(trees), self.num_nodes, -1)
        acceptances, target_tokens = self._accept(sequences, trees, logits)
        self._commit(batch, acceptances, slots, lengths, result.logits_output.hidden_states)
        self.trace.rounds(batch.reqs, trees, acceptances)
        accept_lengths = [each.acceptance_length for each in acceptances]
        emitted = np.zeros((len(trees), self.num_nodes), dtype=np.int64)
        for row, each in zip(emitted, acceptances, strict=True):
            row[: len(each.token_ids)] = each.token_ids
        if batch.return_logprob:
            predicted = torch.from_numpy(target_tokens).flatten().to(self.device)
            self._add_logprobs(batch, result.logits_output, predicted, self._accept_index(acceptances))
        batch.forward_mode = ForwardMode.DECODE
        tokens = torch.from_numpy(emitted).flatten().to(self.device)
        new_lengths = batch.seq_lens + torch.tensor(accept_lengths, device=self.device)
        return self._result(batch, result, tokens, accept_lengths, new_lengths)

    def _build(self, sequences) -> list[DraftTree]:
        """Every sequence's tree, the first rank's."""
        trees = [grow(*each) for each in zip(sequences, self.drafter.draft(sequences), strict=True)]
        if self.target.group.world_size == 1:
            return trees
        shared = np.full((len(trees), 3, self.num_nodes), NO_NODE - 1, dtype=np.int64)
        for row, tree in zip(shared, trees, strict=True):
            row[:, : tree.num_nodes] = tree.token_ids, tree.parents, tree.depths
        shared = self.target.agree(shared)
        return [_unpacked(row[:, row[2] >= 0]) for row in shared]

    def _verify(self, batch, packed: PackedTrees, slots: torch.Tensor) -> GenerationBatchResult:
        """SGLang's tree verify: one forward over all nodes, whose keys and values go to `slots` [B, N]."""
        # int32, as SGLang's graphs hold links: its recurrent layers' kernel is then compiled once, not once more for eager rounds.
        links = {
            name: torch.from_numpy(getattr(packed, name)).to(self.device, torch.int32) for name in ("next_token", "next_sibling")
        }
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = torch.from_numpy(packed.token_ids).flatten().to(self.device)
        batch.out_cache_loc = slots.flatten()
        prepare_mamba_track_for_verify(batch)
        verify = NgramVerifyInput(
            draft_token=batch.input_ids,
            custom_mask=torch.from_numpy(packed.mask).to(self.device),
            positions=torch.from_numpy(packed.positions).flatten().to(self.device),
            retrieve_index=torch.arange(slots.numel(), device=self.device).view(slots.shape),
            retrieve_next_token=links["next_token"],
            retrieve_next_sibling=links["next_sibling"],
            draft_token_num=self.num_nodes,
        )
        verify.capture_hidden_mode = CaptureHiddenMode.FULL
        batch.spec_info = verify
        return self._target_worker.forward_batch_generation(
            batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
        )

    def _accept(self, sequences, trees, logits: torch.Tensor) -> tuple[list[Acceptance], np.ndarray]:
        """Our own choice after each node, greedy or by the request's keyed noise, and our own walk; `logits` [B, N, V]."""
        chosen = np.zeros(logits.shape[:2], dtype=np.int64)
        for row, sequence, tree, each in zip(chosen, sequences, trees, logits, strict=True):
            row[: tree.num_nodes] = choose_tokens(
                sequence, tree, each[: tree.num_nodes], sequence.context_length + 1
            )
        chosen = self.target.agree(chosen)
        return [accept(tree, row[: tree.num_nodes]) for tree, row in zip(trees, chosen, strict=True)], chosen

    def _commit(self, batch, acceptances, slots: torch.Tensor, lengths: list[int], features: torch.Tensor) -> None:
        """The paths' rows become permanent: SGLang's recurrent states and KV rows, and the drafter's, of their features."""
        index = self._accept_index(acceptances)
        counts = torch.tensor([each.acceptance_length for each in acceptances], dtype=torch.int32, device=self.device)
        commit_mamba_states_after_verify(self._target_worker, batch, counts, index, self.num_nodes)
        sources = index[index >= 0]  # rows of the batch, path after path
        targets = slots[torch.arange(self.num_nodes, device=self.device) < counts[:, None]]
        self._move([each.path for each in acceptances], slots.flatten())
        positions = torch.cat(
            [torch.arange(length, length + len(each.path)) for length, each in zip(lengths, acceptances, strict=True)]
        )
        self.pool.absorb(features[sources], positions.to(self.device), targets)

    def _move(self, paths: list[np.ndarray], slots: torch.Tensor) -> None:
        """SGLang's keys and values of the paths' rows to the front; `slots` [B * N]."""
        cache = self.token_to_kv_pool_allocator.get_kvcache()
        for rows in moves(paths, self.num_nodes):
            targets, sources = (slots[torch.from_numpy(each).to(self.device)] for each in rows)
            cache.move_kv_cache(targets, sources)

    # What SGLang wants back

    def _accept_index(self, acceptances) -> torch.Tensor:
        """[B, N] int64: each path's nodes as rows of the batch, then -1."""
        index = np.full((len(acceptances), self.num_nodes), NO_NODE, dtype=np.int64)
        for number, each in enumerate(acceptances):
            index[number, : len(each.path)] = each.path + number * self.num_nodes
        return torch.from_numpy(index).to(self.device)

    def _add_logprobs(self, batch, logits_output, predicted: torch.Tensor, index: torch.Tensor) -> None:
        """SGLang's own arithmetic: of the target's logits at temperature, before filters and penalties."""
        compute = getattr(logprob_processor, "compute_spec_logprobs", None)
        if compute is not None:
            compute(batch, logits_output, predicted, accept_index=index)
        else:  # its name before 0.5.17, with the rows' width less one
            logprob_processor.compute_spec_v2_logprobs(batch, logits_output, predicted, index, index.shape[1] - 1)

    def _result(self, batch, result, tokens, accept_lengths: list[int], new_lengths) -> GenerationBatchResult:
        counts = torch.tensor(accept_lengths, dtype=torch.int32, device=self.device)
        kept = tokens
        if len(tokens) == len(accept_lengths):  # of a prefill: one token a request
            kept = torch.zeros(len(tokens), self.num_nodes, dtype=torch.int64, device=self.device)
            kept[:, 0] = tokens
            kept = kept.flatten()
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=counts,
            new_seq_lens=new_lengths,
            # Carried with the batch while requests join and leave; we read nothing from it.
            next_draft_input=NgramVerifyInput(
                draft_token_num=self.num_nodes, new_seq_lens=new_lengths, accept_tokens=kept, accept_lens=counts
            ),
            speculative_num_draft_tokens=self.num_nodes,
        )


def _unpacked(columns: np.ndarray) -> DraftTree:
    """A tree from its token ids, parents and depths [3, N]; scores are not needed any more."""
    token_ids, parents, depths = columns
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return DraftTree(token_ids, parents.astype(np.int32), depths.astype(np.int32), zeros)
