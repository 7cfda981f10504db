"""What cannot be honoured inside SGLang, of a server's arguments and of a request's; said, never ignored."""

from __future__ import annotations

# Argument -> (value that is fine, why another is not).
SERVER = {
    "pp_size": (1, "features and tokens are wanted on one rank; use --tp-size"),
    "page_size": (1, "the paths of a tree are moved token by token"),
    "enable_dp_attention": (False, "every rank drafts for the whole batch; use --tp-size or replicas"),
    "enable_hierarchical_cache": (False, "the drafter's rows are not kept on the host"),
    "disaggregation_mode": ("null", "the drafter's rows do not travel from prefill to decode servers"),
    "speculative_adaptive": (False, "trees have the size of --speculative-num-draft-tokens"),
}


def server_fault(server_args) -> str | None:
    """The first argument that stands in the way, with value and remedy; None if none does. `page_size` may be open."""
    if not server_args.speculative_draft_model_path:
        return "--speculative-algorithm DDTREE needs --speculative-draft-model-path, the folder of a DFlash drafter"
    nodes = server_args.speculative_num_draft_tokens
    if nodes is not None and nodes < 2:
        return f"--speculative-num-draft-tokens must be >= 2 (the root and one node), got {nodes}"
    for name, (fine, reason) in SERVER.items():
        value = getattr(server_args, name, fine)
        if value not in (None, fine):
            flag = name.replace("_", "-")
            return f"--{flag} {value} does not go with --speculative-algorithm DDTREE: {reason}; leave it at {fine}"
    return None


def request_fault(req) -> str | None:
    """Why an SGLang request cannot be answered as it asks; None if it can."""
    params = req.sampling_params
    if getattr(req, "custom_logit_processor", None) is not None:
        return "custom_logit_processor is not applied along a tree's paths; leave it out"
    if getattr(req, "multimodal_inputs", None) is not None:
        return "DDTREE verifies trees of text alone; leave images, audio and video out"
    if req.return_hidden_states:
        return "return_hidden_states is not given with DDTREE, whose drafter takes them; leave it out"
    if (getattr(params, "beam_width", None) or 1) > 1:
        return f"beam_width {params.beam_width} does not go with DDTREE; leave it out"
    if getattr(params, "watermark", None) is not None:
        return "watermark is not applied along a tree's paths; leave it out"
    budget = (params.custom_params or {}).get("tree_budget")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        return f"custom_params.tree_budget must be an integer >= 0, got {budget!r}"
    return None
