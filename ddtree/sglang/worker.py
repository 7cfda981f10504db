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

from ddtree.engine.drafter import Drafter
from ddtree.engine.loading import load_conditioning
from ddtree.engine.target import choose_tokens
from ddtree.models.dflash import load_drafter
from ddtree.sglang import masked_attention
from ddtree.sglang.features import capture
from ddtree.sglang.host_round import HostRound
from ddtree.sglang.nodes import Accepted, Nodes, Report
from ddtree.sglang.refusals import request_fault
from ddtree.sglang.sequences import Sequences
from ddtree.sglang.slot_round import SlotRound
from ddtree.sglang.slot_rounds import SlotRounds, decode_graphs
from ddtree.sglang.slots import PADDING_SLOT, SlotContext, SlotPool
from ddtree.sglang.target_face import TargetFace
from ddtree.sglang.trace import Trace
from ddtree.sglang.trees import moves
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
        self.graphs = decode_graphs(server_args) and self.target.group.world_size == 1
        self.most_running: int = server_args.max_running_requests
        self.pool: SlotPool | None = None
        self.rounds: SlotRounds | None = None

    @property
    def draft_worker(self):
        """No model runner of SGLang's drafts."""
        return None

    def alloc_memory_pool(self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None) -> None:
        """The drafter's rows, one for each slot of the target's pool and for SGLang's padding slot."""
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        staged = SlotRounds.staged_rows(self.most_running, self.drafter.block_size)
        self.pool = SlotPool(self.drafter.model, token_to_kv_pool_allocator.size + 1, staged)
        self.rounds = SlotRounds(
            self.drafter, self.pool, self.target, req_to_token_pool.req_to_token, self.num_nodes, self.most_running, graphs=self.graphs
        )
        logger.info(
            "DDTREE: block size %d, up to %d nodes a tree, drafter's rows take %.2f GiB",
            self.drafter.block_size, self.num_nodes - 1, self.pool.num_bytes / 2**30,
        )

    def init_cuda_graphs(self) -> None:
        """After SGLang has captured its own; and its copies of rows, which it would compile for each power of two when it first
        comes."""
        self.rounds.capture()
        if self.device.type != "cuda":
            return
        cache, most = self.token_to_kv_pool_allocator.get_kvcache(), self.most_running * (self.drafter.block_size - 1)
        for count in sorted({size for power in range(most.bit_length() + 1) for size in (1 << power, (1 << power) - 1)} - {0}):
            rows = torch.full((count,), PADDING_SLOT, dtype=torch.int64, device=self.device)
            cache.move_kv_cache(rows, rows)

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
        with self.trace.prefill("forward"):
            result = self._target_worker.forward_batch_generation(
                batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
            )
        if batch.forward_mode.is_idle():
            nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
            return self._result(batch, result, nothing, nothing.to(torch.int32), batch.seq_lens)
        with self.trace.prefill("absorb"):
            self._absorb_prompts(batch, result.logits_output.hidden_states)
        with self.trace.prefill("choose"):
            tokens = self._first_tokens(batch, result.logits_output.next_token_logits)
        if batch.return_logprob:
            self._add_logprobs(batch, result.logits_output, tokens, torch.arange(len(tokens), device=self.device)[:, None])
            result.logits_output.next_token_logprobs = result.logits_output.next_token_logprobs.flatten()
        return self._result(batch, result, tokens, torch.ones_like(tokens, dtype=torch.int32), batch.seq_lens)

    def _first_tokens(self, batch, logits: torch.Tensor) -> torch.Tensor:
        """[B] int64: the token after each chunk, from its last row's `logits` [B, V]; a request that cannot be honoured ends here."""
        lengths, chosen = batch.seq_lens.tolist(), []
        for req, length, row in zip(batch.reqs, lengths, logits, strict=True):
            if fault := request_fault(req):
                req.to_finish = FINISH_ABORT(fault, HTTPStatus.BAD_REQUEST, "BadRequestError")
                chosen.append(0)
                continue
            sequence = self.sequences(req)
            root = DraftTree.root_only(sequence.root_token)
            chosen.append(int(choose_tokens(sequence, root, row[None], length)[0]))
        return torch.from_numpy(self.target.agree(np.array(chosen, dtype=np.int64))).to(self.device)

    def _absorb_prompts(self, batch, features: torch.Tensor) -> None:
        """Features [T, F] of all chunks' rows, in the batch's order, into the drafter's pool."""
        positions = torch.cat(
            [torch.arange(start, start + count) for start, count in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        )
        self.pool.absorb(features, positions.to(self.device), batch.out_cache_loc)

    # Decoding

    def _decode(self, batch) -> GenerationBatchResult:
        """A round. The batch's fields that SGLang reads back after it are the scheduler's to restore."""
        self.trace.begin()
        with self.trace.stage("draft"):
            each_round = self._draft([self.sequences(req) for req in batch.reqs], batch)
        with self.trace.stage("build"):
            nodes = each_round.finish()
        with self.trace.stage("verify"):
            among = torch.arange(self.num_nodes, device=self.device)
            table = self.req_to_token_pool.req_to_token
            slots = table[batch.req_pool_indices[:, None], batch.seq_lens[:, None] + among].to(torch.int64)  # [B, N]
            result = self._verify(batch, nodes, slots)
        with self.trace.stage("accept"):
            accepted = each_round.accept_logits(result.logits_output.next_token_logits)
            report = Report(accepted)
        with self.trace.stage("commit"):
            self._commit(batch, accepted, slots, result.logits_output.hidden_states)
            paths = report.paths()
            self._move(paths, slots.flatten())
        if self.trace.path is not None:
            self.trace.end(batch.reqs, each_round.parents, paths)
        if batch.return_logprob:
            self._add_logprobs(batch, result.logits_output, accepted.target_tokens, accepted.index)
        batch.forward_mode = ForwardMode.DECODE
        return self._result(batch, result, accepted.token_ids.flatten(), accepted.lengths, batch.seq_lens + accepted.lengths)

    def _draft(self, sequences, batch) -> SlotRound | HostRound:
        """The round of these sequences, their drafts queued; on the device unless something is asked of the host."""
        rows = batch.req_pool_indices
        lengths = [sequence.context_length for sequence in sequences]
        known = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens
        assert lengths == known.tolist(), "all tokens but the last are committed"
        if self.rounds.takes(sequences):
            return self.rounds.begin(sequences, rows)
        for sequence, row, length in zip(sequences, rows.tolist(), lengths, strict=True):
            sequence.drafter_state = SlotContext(self.pool, self.req_to_token_pool.req_to_token[row, :length])
        return HostRound(self.drafter, self.target, sequences, self.num_nodes)

    def _verify(self, batch, nodes: Nodes, slots: torch.Tensor) -> GenerationBatchResult:
        """SGLang's tree verify: one forward over all nodes, whose keys and values go to `slots` [B, N]."""
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = nodes.token_ids.flatten()
        batch.out_cache_loc = slots.flatten()
        prepare_mamba_track_for_verify(batch)
        verify = NgramVerifyInput(
            draft_token=batch.input_ids,
            custom_mask=nodes.mask,
            positions=nodes.positions.flatten(),
            retrieve_index=torch.arange(slots.numel(), device=self.device).view(slots.shape),
            retrieve_next_token=nodes.next_token,
            retrieve_next_sibling=nodes.next_sibling,
            draft_token_num=self.num_nodes,
        )
        verify.capture_hidden_mode = CaptureHiddenMode.FULL
        batch.spec_info = verify
        return self._target_worker.forward_batch_generation(
            batch, is_verify=True, capture_hidden_mode=CaptureHiddenMode.FULL
        )

    def _commit(self, batch, accepted: Accepted, slots: torch.Tensor, features: torch.Tensor) -> None:
        """SGLang's recurrent states after the paths, and the drafter's rows of their features. Waits for nothing."""
        commit_mamba_states_after_verify(self._target_worker, batch, accepted.lengths, accepted.index, self.num_nodes)
        index = accepted.index[:, : self.drafter.block_size]
        positions = batch.seq_lens[:, None] + torch.arange(index.shape[1], device=self.device)
        targets = torch.where(index >= 0, slots[:, : index.shape[1]], PADDING_SLOT)
        self.pool.absorb(features[index.clamp(min=0).flatten()], positions.flatten(), targets.flatten())

    def _move(self, paths: list[np.ndarray], slots: torch.Tensor) -> None:
        """SGLang's keys and values of the paths' rows to the front; `slots` [B * N]."""
        cache = self.token_to_kv_pool_allocator.get_kvcache()
        steps = moves(paths, self.num_nodes)
        if not steps:
            return
        rows = slots[torch.from_numpy(np.concatenate(steps, axis=1)).to(self.device)]
        for targets, sources in zip(*(each.split([len(step[0]) for step in steps]) for each in rows), strict=True):
            cache.move_kv_cache(targets, sources)

    # What SGLang wants back

    def _add_logprobs(self, batch, logits_output, predicted: torch.Tensor, index: torch.Tensor) -> None:
        """SGLang's own arithmetic: of the target's logits at temperature, before filters and penalties."""
        compute = getattr(logprob_processor, "compute_spec_logprobs", None)
        if compute is not None:
            compute(batch, logits_output, predicted, accept_index=index)
        else:  # its name before 0.5.17, with the rows' width less one
            logprob_processor.compute_spec_v2_logprobs(batch, logits_output, predicted, index, index.shape[1] - 1)

    def _result(self, batch, result, tokens, accept_lengths: torch.Tensor, new_lengths) -> GenerationBatchResult:
        kept = tokens
        if len(tokens) == len(accept_lengths):  # of a prefill: one token a request
            kept = torch.zeros(len(tokens), self.num_nodes, dtype=torch.int64, device=self.device)
            kept[:, 0] = tokens
            kept = kept.flatten()
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=tokens,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=accept_lengths,
            new_seq_lens=new_lengths,
            # Carried with the batch while requests join and leave; we read nothing from it.
            next_draft_input=NgramVerifyInput(
                draft_token_num=self.num_nodes, new_seq_lens=new_lengths, accept_tokens=kept, accept_lens=accept_lengths
            ),
            speculative_num_draft_tokens=self.num_nodes,
        )
