"""The adapter: a small head that tells a frozen drafter which token its guess follows (Weaver, arXiv 2607.06763).

A block drafter's distributions are factorised: slot k does not know which token slot k - 1 became. The adapter scores the
best M tokens of slot k ("candidates") anew for every parent: from the states of both slots, the parent's token, the root's,
and a summary of the path between them, of which the grandparent's token alone is the cheapest. Its scores are corrections in nats, added to the drafter's own log-probabilities.

Letters: B blocks, K slots (slot 0 is the root), D = K - 1 depths, M candidates, V vocabulary, C model width, H adapter
width, E rank of the token tables. "Depth k" is the depth of the children that are scored; their parent sits in slot k - 1.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ddtree.kernels.conditioning import LEAST_LOG_PROB

SUMMARIES = ("none", "grandparent", "recurrence", "attention")
PAIRWISE = ("none", "grandparent")  # all pairs of tokens can be scored before the tree is built
NUM_HEADS = 4  # of the summary by attention


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter's shape; `hidden_size` and `block_size` are the drafter's."""

    hidden_size: int
    block_size: int
    width: int = 512
    rank: int = 256
    summary: str = "none"  # of the path before the parent
    num_candidates: int = 256  # that it was trained on; fewer may be served

    def __post_init__(self) -> None:
        if self.summary not in SUMMARIES:
            raise ValueError(f"summary must be one of {', '.join(SUMMARIES)}, got {self.summary!r}")
        for name in ("hidden_size", "width", "rank", "num_candidates"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.block_size < 2:
            raise ValueError(f"block_size must be >= 2, got {self.block_size}")
        if self.width % NUM_HEADS:
            raise ValueError(f"width must be a multiple of {NUM_HEADS}, got {self.width}")

    def as_json(self) -> dict:
        return asdict(self)


def rename_former(tensors: dict[str, torch.Tensor], prefix: str = "") -> None:
    """Give the grandparents' tensors of files of before 2026-11-30, the shipped one among them, their names of now."""
    former = prefix + "older_"
    for name in [name for name in tensors if name.startswith(former)]:
        tensors[f"{prefix}grandparent_{name.removeprefix(former)}"] = tensors.pop(name)


class Adapter(nn.Module):
    """An adapter without values; zero corrections when fresh, so that training starts from the drafter itself."""

    def __init__(self, config: AdapterConfig, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        make = {"device": device, "dtype": dtype}
        size, width = config.hidden_size, config.width
        self.child_slot = nn.Linear(size, width, bias=False, **make)
        self.parent_slot = nn.Linear(size, width, bias=False, **make)
        self.parent_token = nn.Linear(size, width, bias=False, **make)
        self.root_token = nn.Linear(size, width, bias=False, **make)
        self.depth = nn.Parameter(torch.zeros(config.block_size, width, **make))
        self.mix = nn.Linear(width, width, **make)
        # Per parent: a query for the candidates, the weight of the drafter's own log-probability, and the correction
        # of everything that is not a candidate.
        self.out = nn.Linear(width, config.rank + 2, **make)
        self.candidate_token = nn.Linear(size, config.rank, bias=False, **make)
        if config.summary == "recurrence":
            self.recurrence = nn.GRU(width, width, batch_first=True, **make)
            self.from_summary = nn.Linear(width, width, bias=False, **make)
        elif config.summary == "attention":
            self.query = nn.Linear(width, width, bias=False, **make)
            self.key_value = nn.Linear(width, 2 * width, bias=False, **make)
            self.distance = nn.Parameter(torch.zeros(config.block_size, width, **make))
            self.from_summary = nn.Linear(width, width, bias=False, **make)
        elif config.summary == "grandparent":
            self.grandparent_slot = nn.Linear(size, width, bias=False, **make)
            self.grandparent_token = nn.Linear(size, width, bias=False, **make)
            self.grandparent_depth = nn.Parameter(torch.zeros(config.block_size, width, **make))
            self.grandparent_mix = nn.Linear(width, width, **make)
            self.grandparent_out = nn.Linear(width, config.rank + 2, **make)
        self.reset()

    def _load_from_state_dict(self, state_dict: dict[str, torch.Tensor], prefix: str, *rest) -> None:
        rename_former(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.no_grad()
    def reset(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                drawn = torch.empty(parameter.shape).normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
                parameter.copy_(drawn)
            else:
                parameter.zero_()
        for name in ("depth", "distance", "grandparent_depth"):
            if hasattr(self, name):
                getattr(self, name).zero_()
        self.out.weight.zero_()
        if self.config.summary == "grandparent":
            self.grandparent_out.weight.zero_()

    def places(self, slots: torch.Tensor, root_rows: torch.Tensor) -> torch.Tensor:
        """What all parents of a slot have in common: [B, D, H], added to their rows of `parent_token`.

        Args:
            slots: [B, K, C], the drafter's states after its final norm.
            root_rows: [B, C], the roots' embeddings.
        """
        from_slots = self.child_slot(slots[:, 1:]) + self.parent_slot(slots[:, :-1])
        return from_slots + self.depth[: slots.shape[1] - 1] + self.root_token(root_rows)[:, None]

    def grandparent_places(self, slots: torch.Tensor) -> torch.Tensor:
        """What all grandparents of a slot have in common: `slots` [B, K, C] -> [B, D, H], added to their rows of `grandparent_token`."""
        return self.grandparent_slot(slots[:, 1:]) + self.grandparent_depth[: slots.shape[1] - 1]

    def summarise(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """What a path adds to its last node's input: `inputs` [B, D, H] along one path -> [B, D, H]; None where nothing is."""
        if self.config.summary in PAIRWISE:
            return None
        if self.config.summary == "recurrence":
            return self.from_summary(self.recurrence(inputs)[0])
        depths, device = inputs.shape[1], inputs.device
        query = self.query(inputs)
        steps = torch.arange(depths, device=device)
        ago = (steps[:, None] - steps).clamp(min=0)
        keys, values = self.key_value(inputs).chunk(2, dim=-1)
        heads = lambda rows: rows.unflatten(-1, (NUM_HEADS, -1))  # noqa: E731
        scale = 1 / math.sqrt(query.shape[-1] / NUM_HEADS)
        logits = torch.einsum("bqhd,bkhd->bhqk", heads(query), heads(keys))
        logits = logits + torch.einsum("bqhd,qkhd->bhqk", heads(query), heads(self.distance[ago]))
        future = steps > steps[:, None]
        weights = (logits * scale).masked_fill(future, -math.inf).softmax(dim=-1)
        return self.from_summary(torch.einsum("bhqk,bkhd->bqhd", weights, heads(values)).flatten(-2))

    def extend(self, inputs: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`summarise` for the last nodes of n paths, one depth at a time.

        Args:
            inputs: [n, H] of the nodes.
            before: [n, ...], what the call for their parents returned for them; None at the root.

        Returns:
            [n, H], and what the nodes' children will need, [n, ...].
        """
        if self.config.summary == "recurrence":
            hidden = None if before is None else before[None].contiguous()
            hidden = self.recurrence(inputs[:, None], hidden)[1][0]
            return self.from_summary(hidden), hidden
        path = inputs[:, None] if before is None else torch.cat([before, inputs[:, None]], dim=1)
        return self.summarise(path)[:, -1], path

    def finish(self, inputs: torch.Tensor, summary: torch.Tensor | None = None) -> torch.Tensor:
        """`inputs` [..., H] and the summary alike -> [..., E + 2]: query, weight of the drafter's scores, elsewhere."""
        hidden = F.silu(inputs if summary is None else inputs + summary)
        return self.out(hidden + F.silu(self.mix(hidden)))

    def finish_grandparents(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the grandparents add to `finish`: `inputs` [..., H] -> [..., E + 2]. Corrections are linear in it, so those of
        parent and grandparent add up, and each is a function of one token and the candidates."""
        hidden = F.silu(inputs)
        return self.grandparent_out(hidden + F.silu(self.grandparent_mix(hidden)))

    @staticmethod
    def corrections(out: torch.Tensor, matches: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Nats to add to the candidates' scores and, last, to that of everything else.

        Args:
            out: [..., N, E + 2] of N parents that share candidates.
            matches: [..., N, M], each query's product with the candidates' rows.
            log_probs: [..., M], the drafter's own, at temperature 1 and without noise.

        Returns:
            [..., N, M + 1].
        """
        weight, elsewhere = out[..., -2:-1], out[..., -1:]
        scores = matches + weight * log_probs.clamp(min=LEAST_LOG_PROB)[..., None, :]
        return torch.cat([scores, elsewhere], dim=-1)

    def forward(self, slots, tokens, embedding, head, candidate_ids, log_probs) -> torch.Tensor:
        """Corrections along given paths, for training: `slots` [B, K, C]; `tokens` [B, K], the root and the path below it;
        `embedding`, `head` [V, C]; `candidate_ids`, `log_probs` [B, D, M] -> [B, D, M + 1]."""
        rows = F.embedding(tokens, embedding).to(slots.dtype)
        inputs = self.parent_token(rows[:, :-1]) + self.places(slots, rows[:, 0])
        out = self.finish(inputs, self.summarise(inputs))
        if self.config.summary == "grandparent":
            grandparents = self.finish_grandparents(self.grandparent_token(rows[:, :-2]) + self.grandparent_places(slots)[:, 1:])
            out = out + F.pad(grandparents, (0, 0, 1, 0))  # depth 1 has none
        # The head's rows are projected once a candidate; far fewer than rows of the vocabulary where B is small.
        candidates = self.candidate_token(head.to(slots.dtype))
        rows = F.embedding(candidate_ids, candidates)
        matches = (rows @ out[..., :-2, None])[..., 0]
        return self.corrections(out[..., None, :], matches[..., None, :], log_probs)[..., 0, :]
