"""Is the drafter given and does it compute what it was trained on? Faults here are lossless: only acceptance shows them.

Letters: T context tokens, K block slots, C model width, n path nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch

from ddtree.audit.adapter_twin import AdapterTwin
from ddtree.audit.compare import closest_row, row_errors, tolerance
from ddtree.audit.drafter_twin import DrafterTwin
from ddtree.audit.findings import DRAFTER, Fault
from ddtree.audit.observe import KEYS, VALUES, Forward, memory
from ddtree.audit.scoring import score_faults
from ddtree.audit.watch import Record

PARTS = {"o_proj": "attention", "mlp": "MLP"}


class DrafterAudit:
    """A served DFlash drafter beside its twin."""

    def __init__(self, drafter, target) -> None:
        self.drafter, self.model, self.target = drafter, drafter.model, target
        self.twin = DrafterTwin(drafter.model)
        self.num_layers = len(target.model.layers)
        self.limit = tolerance(next(drafter.model.parameters()).dtype)

    @cached_property
    def adapter_twin(self) -> AdapterTwin:
        return AdapterTwin(self.drafter.conditioning.adapter, self.target.model)

    @classmethod
    def of(cls, drafter, target) -> DrafterAudit | None:
        """None where the drafter is no DFlash model."""
        model = getattr(drafter, "model", None)
        if model is None or not hasattr(model, "checkpoint_tensors") or not getattr(model.config, "raw", None):
            return None
        return cls(drafter, target)

    def config_faults(self) -> Iterator[Fault]:
        """What is in force, against the published config."""
        config, twin = self.model.config, self.twin
        if tuple(self.target.feature_layers) != twin.layer_ids:
            yield Fault(
                DRAFTER,
                f"drafter taps: the target hands out layers {list(self.target.feature_layers)}, the drafter's config "
                f"names {list(twin.layer_ids)}",
            )
        if config.mask_token_id != twin.mask_token_id:
            yield Fault(DRAFTER, f"drafter mask token: {config.mask_token_id}, its config says {twin.mask_token_id}")
        if float(config.rope.theta) != float(twin.theta):
            yield Fault(DRAFTER, f"drafter RoPE: theta {config.rope.theta:g}, its config says {float(twin.theta):g}")

    def context_faults(self, record: Record, fresh: Forward) -> Iterator[Fault]:
        """Features and context after a step, from a fresh forward over the committed tokens."""
        if not record.absorbed:
            return
        due = torch.cat([fresh.layer_output(layer, self.num_layers) for layer in self.twin.layer_ids], dim=-1)
        first = 0 if record.tree is None else len(record.tokens_before) - 1
        given = torch.cat(record.absorbed)
        if len(given) != len(due) - first:
            yield Fault(DRAFTER, f"drafter features: {len(given)} rows were handed over for {len(due) - first} tokens")
            return
        if float(row_errors(given, due[first:]).max()) > self.limit:
            yield Fault(DRAFTER, self._features_fault(record, given, due[first:], fresh, first))
            return
        yield from self.cache_faults(record, due)

    def cache_faults(self, record: Record, features: torch.Tensor) -> Iterator[Fault]:
        """The drafter's keys and values of its context."""
        keys, values = self.twin.context(features)
        for layer, layer_cache in enumerate(record.drafter_cache.layers):
            held = memory(layer_cache)
            if len(held[KEYS]) != len(features):
                yield Fault(
                    DRAFTER, f"drafter layer {layer} context: {len(held[KEYS])} rows for {len(features)} committed tokens"
                )
                return
            value_error = row_errors(held[VALUES], values[layer])
            key_error = row_errors(held[KEYS], keys[layer])
            if float(value_error.max()) > self.limit:
                row = int((value_error > self.limit).nonzero()[0])
                yield Fault(DRAFTER, f"drafter layer {layer} context: the values of token {row} are not its features'")
                return
            if float(key_error.max()) > self.limit:
                yield Fault(DRAFTER, self._rope_fault(layer, held[KEYS], keys[layer], key_error))
                return

    def draft_faults(self, record: Record) -> Iterator[Fault]:
        """The block that went in, every part of every layer, and the candidates that came out."""
        drafted = record.drafted
        if drafted is None or drafted.block is None:
            return
        yield from self._block_faults(drafted)
        held = [memory(cache) for cache in record.drafter_cache.layers]
        start = drafted.context_length
        keys = [each[KEYS][:start] for each in held]
        values = [each[VALUES][:start] for each in held]
        hidden, parts = self.twin.block(drafted.block, keys, values)
        for (layer, part), expected in parts.items():
            actual = drafted.parts.get((layer, part))
            if actual is None or actual.shape != expected.shape:
                continue
            errors = row_errors(actual, expected)
            if float(errors.max()) > self.limit:
                slot = int((errors > self.limit).nonzero()[0])
                yield Fault(
                    DRAFTER,
                    f"drafter layer {layer} {PARTS[part]}: slot {slot} of the block is not what its config and tensors give",
                    measured=float(errors.max()),
                )
                return
        if float(row_errors(drafted.hidden, hidden).max()) > self.limit:
            yield Fault(DRAFTER, "drafter block: its final hidden states are not what its config and tensors give")
            return
        yield from self._candidate_faults(record, hidden)

    def _block_faults(self, drafted) -> Iterator[Fault]:
        num_slots = len(drafted.block)
        ids = torch.full((num_slots,), self.twin.mask_token_id, device=drafted.block.device)
        ids[0] = drafted.root_token
        due = self.target.model.embed(ids) * self.model.config.input_embedding_scale
        errors = row_errors(drafted.block, due)
        if float(errors.max()) <= self.limit:
            return
        slot = int((errors > self.limit).nonzero()[0])
        mask = self.target.model.embed(ids.new_tensor([self.twin.mask_token_id]))
        is_mask = closest_row(drafted.block[slot], mask * self.model.config.input_embedding_scale, self.limit) == 0
        if slot == 0:
            held = "the mask token" if is_mask else "another token"
            yield Fault(DRAFTER, f"drafter block: slot 0 embeds {held}, the root (token {drafted.root_token}) belongs there")
        else:
            yield Fault(DRAFTER, f"drafter block: slot {slot} does not embed mask token {self.twin.mask_token_id}")

    def _candidate_faults(self, record: Record, hidden: torch.Tensor) -> Iterator[Fault]:
        """Greedy only: the ranking's log-probabilities against slots 1, 2, … of the twin's block."""
        found = record.drafted.candidates
        own = getattr(self.drafter, "own_candidates", True)
        if found is None or not own or not record.request.sampling.greedy:
            return
        logits = self.model.logits(hidden, self.target.model).float().log_softmax(dim=-1).cpu()
        for depth, (token_ids, log_probs) in enumerate(zip(found.token_ids, found.marginals, strict=True), start=1):
            given = torch.from_numpy(log_probs.copy())
            apart = [float((logits[slot][token_ids] - given).abs().max()) for slot in range(len(logits))]
            if apart[depth] > 50 * self.limit:
                best = min(range(len(apart)), key=apart.__getitem__)
                other = f"they are slot {best}'s" if apart[best] <= 50 * self.limit else "they are no slot's"
                yield Fault(DRAFTER, f"drafter candidates: depth {depth} does not rank by slot {depth}'s logits; {other}")
                return

    def score_faults(self, record: Record) -> Iterator[Fault]:
        """The scores and shape of what is a tree, where the drafter's own candidates made it and nothing else had a say."""
        drafted, request, tree = record.drafted, record.request, record.tree
        found = None if drafted is None or drafted.hidden is None else drafted.candidates
        own = getattr(self.drafter, "own_candidates", True) and request.sampling.greedy and not request.sampling.adjusted
        if found is None or not own or request.grammar is not None or request.chain or isinstance(request.tree_budget, str):
            return
        scorer, marginals = getattr(found, "scorer", None), found.marginals
        if scorer is None:
            rows, scoring = (lambda tokens: (marginals[: len(tokens)], 0.0)), "its depth's candidates"
        else:
            scoring = "the adapter"
            rows = lambda tokens: self.adapter_twin.rows(drafted.hidden, tokens, found.token_ids, marginals)  # noqa: E731
        yield from score_faults(tree, record.tree_budget, found.token_ids, rows, scoring)

    def _features_fault(self, record: Record, given: torch.Tensor, due: torch.Tensor, fresh: Forward, first: int) -> str:
        """Whose features they are instead: another layer's, or other nodes'."""
        taps = given.chunk(len(self.twin.layer_ids), dim=-1)
        layers = [self._layer_of(tap, fresh, first) for tap in taps]
        wrong = [
            f"tap {i} is layer {layer}'s output, layer {due_layer}'s is due"
            for i, (layer, due_layer) in enumerate(zip(layers, self.twin.layer_ids, strict=True))
            if layer is not None and layer != due_layer
        ]
        if wrong:
            return f"drafter taps: {'; '.join(wrong)}"
        if record.tree is not None:
            layer = self.twin.layer_ids[0]
            rows = record.forward.layer_output(layer, self.num_layers)
            nodes = [closest_row(row, rows, self.limit) for row in taps[0]]
            if None not in nodes and nodes != record.path.tolist():
                return f"drafter features: those of nodes {nodes} were handed over, the path is {record.path.tolist()}"
        row = int((row_errors(given, due) > self.limit).nonzero()[0])
        return f"drafter features: row {row} is not the target's hidden state of token {first + row} at layers {list(self.twin.layer_ids)}"

    def _layer_of(self, tap: torch.Tensor, fresh: Forward, first: int) -> int | None:
        for layer in range(-1, self.num_layers):
            output = (
                self.target.model.embed(fresh.rows.token_ids) if layer < 0 else fresh.layer_output(layer, self.num_layers)
            )
            if float(row_errors(tap, output[first:]).max()) <= self.limit:
                return layer
        return None

    def _rope_fault(self, layer: int, held: torch.Tensor, due: torch.Tensor, errors: torch.Tensor) -> str:
        """Keys whose pairs have the right length and the wrong angle were turned by another theta, or position."""
        row = int((errors > self.limit).nonzero()[0])
        half = len(self.twin.frequencies)
        lengths = [torch.hypot(keys[..., :half].float(), keys[..., half : 2 * half].float()) for keys in (held, due)]
        if float(row_errors(lengths[0], lengths[1]).max()) > self.limit:
            return f"drafter layer {layer} context: the keys of token {row} are not its features'"
        return (
            f"drafter layer {layer} RoPE: the context's keys from token {row} on have the right length and the wrong angle; "
            f"theta in force {self.model.config.rope.theta:g}, published {float(self.twin.theta):g}{self._theta_of(held, due)}"
        )

    def _theta_of(self, held: torch.Tensor, due: torch.Tensor) -> str:
        """What theta the angles of the second frequency speak for, where the first token that turns shows it."""
        if len(held) < 2 or self.twin.config.rope.rope_type != "default":
            return ""
        half, width = len(self.twin.frequencies), self.twin.config.head_dim
        pairs = [torch.complex(keys[1, 0, :half].double(), keys[1, 0, half : 2 * half].double()) for keys in (held, due)]
        angle = float((pairs[0][1] / pairs[1][1]).angle()) + float(self.twin.frequencies[1])
        return f", the angles speak for {angle ** (-width / 2):.3g}" if 0 < angle < 3 else ""
