"""DDTREE as SGLang's scheduler sees it: a speculative algorithm with its rules for the server's arguments."""

from __future__ import annotations

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from ddtree.sglang.hooks import WORKER, missing, refusal
from ddtree.sglang.plugin import ATTENTION_BACKEND
from ddtree.sglang.refusals import server_fault

DEFAULT_NODES = 17  # root and 16 drafted nodes: what paid on most machines that we measured (README)
DEFAULT_RUNNING = 48  # SGLang's own default for its built-in algorithms


class DDTreeAlgorithm(CustomSpecAlgo):
    """SGLang's dispatch asks `is_ngram` where it means: trees of a node budget, verified under a full mask, whose
    drafts are no model runner of SGLang's. That is what ours are, so its CUDA graphs and KV sizing fit them.
    """

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False  # not in SGLang's sense: our drafter's rows lie in a pool of ours

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False):
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args) -> None:
        """Fill in what was left open and refuse what cannot be honoured, with ValueError."""
        absent = missing(WORKER)
        if absent:
            raise ValueError(refusal(absent))
        if fault := server_fault(server_args):
            raise ValueError(fault)
        if server_args.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = DEFAULT_NODES
        # Only for SGLang's sizing: nodes a step, and more than one child a node.
        server_args.speculative_num_steps = 1
        server_args.speculative_eagle_topk = max(2, server_args.speculative_num_draft_tokens - 1)
        server_args.disable_overlap_schedule = True  # the next round's root and trees need this round's tokens
        server_args.enable_mixed_chunk = False
        # Its CUDA graphs of a verify are captured with or without features, by this: ours are wanted in each.
        server_args.enable_return_hidden_states = True
        if hasattr(server_args, "return_hidden_states_mode"):
            server_args.return_hidden_states_mode = "full"
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_RUNNING
        if server_args.device == "cpu":
            server_args.attention_backend = ATTENTION_BACKEND
