"""Training an adapter on a frozen drafter, or jointly with it (Weaver, arXiv 2607.06763).

Teacher-forced: along the target's own text each slot's candidates are scored below the token that is really there, with the
path before it; the loss is the cross entropy over the candidates and "none of them". What is trained is what is served.
Letters: S sequences, A anchors each, B = S * A blocks, K block size, D = K - 1 depths, M candidates, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ddtree.models.adapter import Adapter, AdapterConfig
from ddtree.models.adapter_files import FOLDER, read_tensors, save_adapter
from ddtree.models.conditioning import Conditioning, conditioned
from ddtree.models.dflash import load_drafter
from ddtree.training.blocks import build_blocks, choose_anchors
from ddtree.training.config import AdapterTrainingConfig
from ddtree.training.data import Batch, Data, sequences_per_step
from ddtree.training.evaluate import evaluate
from ddtree.training.loss import block_loss
from ddtree.training.optim import learning_rate, update_average
from ddtree.training.packed import PackedDrafter
from ddtree.training.trainer import Log

CHECKPOINT = "adapter_training.pt"
CHUNK_ROWS = 8192  # whose logits exist at once


class Drafted(NamedTuple):
    """What the drafter made of some blocks, and the truth."""

    states: torch.Tensor  # [B, K, C]
    tokens: torch.Tensor  # [B, K] int64, the root and what the target wrote after it
    weights: torch.Tensor  # [B, D]
    candidate_ids: torch.Tensor  # [B, D, M]
    log_probs: torch.Tensor  # [B, D, M]


class AdapterTrainer:
    """One adapter in training, its optimiser, its average and the state of its random choices."""

    def __init__(self, packed: PackedDrafter, data: Data, config: AdapterTrainingConfig) -> None:
        self.packed, self.target, self.data, self.config = packed, packed.target, data, config
        self.drafter = packed.drafter
        shape = AdapterConfig(
            self.drafter.config.hidden_size, self.drafter.config.block_size, config.width, config.rank, config.summary,
            config.num_candidates,
        )  # fmt: skip
        self.adapter = Adapter(shape, self.target.device)
        self.adapter.reset(config.seed)
        if config.start:
            start_from(self.adapter, Path(config.start))
        learners = [self.adapter] + ([self.drafter.requires_grad_(True)] if config.jointly else [])
        self.models = torch.nn.ModuleList(learners)
        self.average = copy.deepcopy(self.models).requires_grad_(False)
        groups = [{"params": list(self.adapter.parameters()), "scale": 1.0}]
        if config.jointly:
            groups.append({"params": list(self.drafter.parameters()), "scale": config.drafter_rate})
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=config.weight_decay)
        self.step_index, self.trained_seconds = 0, 0.0

    def draw(self, batch: Batch, seed: int) -> tuple:
        """Whole blocks at random anchors of a batch."""
        config, size = self.config, self.drafter.config.block_size
        length = batch.tokens.shape[1]
        count = max(1, min(config.anchors_per_512 * length // 512, length - size))
        generator = torch.Generator(batch.tokens.device).manual_seed(seed)
        anchors = choose_anchors(batch.classes, count, config.user_anchor_weight, generator)
        return build_blocks(
            batch.tokens, batch.classes, anchors, size, count * size, self.drafter.config.mask_token_id, config.user_weight
        )

    def draft(self, batch: Batch, blocks) -> tuple[Drafted, torch.Tensor]:
        """Run the drafter; the second is its own loss where it learns, else 0."""
        size, num = self.drafter.config.block_size, min(self.config.num_candidates, self.target.config.vocab_size)
        own = torch.zeros((), device=self.target.device)
        with torch.set_grad_enabled(self.config.jointly and torch.is_grad_enabled()):
            states = self.packed(self.target.features(batch.tokens, self.drafter.config.target_layer_ids), blocks)
            if self.config.jointly:
                own = block_loss(states, self.target.logits_head, blocks.labels, blocks.weights)[0]

        def by_block(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(1, (-1, size)).flatten(0, 1)

        states = by_block(states)
        with torch.no_grad():
            ids, log_probs = best_tokens(states[:, 1:].flatten(0, 1), self.target, num)
        shape = (len(states), size - 1, num)
        drafted = Drafted(states, by_block(blocks.labels), by_block(blocks.weights)[:, 1:], ids.view(shape), log_probs.view(shape))
        return drafted, own

    def loss(self, batch: Batch, seed: int) -> torch.Tensor:
        """Weighted mean loss of one batch, 0-d."""
        drafted, own = self.draft(batch, self.draw(batch, seed))
        with torch.autocast("cuda", torch.bfloat16, enabled=self.target.device.type == "cuda"):
            corrections = self.adapter(
                drafted.states, drafted.tokens, self.target.embedding, self.target.head, drafted.candidate_ids, drafted.log_probs
            )
        return candidate_loss(drafted, corrections.float(), self.config.reach) + own

    def step(self, fraction: float) -> torch.Tensor:
        """One update; returns the loss, 0-d on the device. The random choices depend on seed and step alone."""
        config = self.config
        rng = np.random.default_rng((config.seed, self.step_index))
        shard = self.data.train[rng.choice(len(self.data.train), p=self.data.shares)]
        count = sequences_per_step(config.tokens_per_step, shard.tokens.shape[1])
        batch = self.data.batch_of(shard, rng.integers(len(shard.tokens), size=count))
        loss = self.loss(batch, int(rng.integers(2**31)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.models.parameters(), config.clip_norm)
        rate = learning_rate(config.learning_rate, self.step_index, fraction, config.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        update_average(self.average, self.models, self.step_index, config.ema_decay)
        self.step_index += 1
        return loss.detach()

    def save(self, folder: Path) -> None:
        """Write the checkpoint in one step."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "models": self.models.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step_index": self.step_index,
            "trained_seconds": self.trained_seconds,
        }
        partial = folder / (CHECKPOINT + ".partial")
        torch.save(state, partial)
        os.replace(partial, folder / CHECKPOINT)

    def load(self, folder: Path) -> None:
        """Go on from the checkpoint in `folder`."""
        state = torch.load(folder / CHECKPOINT, map_location=self.target.device, weights_only=True)
        self.models.load_state_dict(state["models"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_index, self.trained_seconds = state["step_index"], state["trained_seconds"]


def start_from(adapter: Adapter, folder: Path) -> None:
    """Take over an adapter's values; what one without a summary does not have about grandparents stays fresh, and silent.

    Raises ValueError where the two do not fit.
    """
    values, own = read_tensors(folder), adapter.state_dict()
    wrong = [name for name, value in values.items() if name not in own or own[name].shape != value.shape]
    wrong += [name for name in own if name not in values and not name.startswith("grandparent_")]
    if wrong:
        raise ValueError(f"start: {folder} has another shape ({', '.join(sorted(wrong))}); train with its width, rank and summary")
    adapter.load_state_dict(own | values)


def best_tokens(states: torch.Tensor, target, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` likeliest tokens of each row of `states` [n, C]: ids and log-probabilities [n, num], never all logits at once."""
    ids, log_probs = [], []
    for rows in states.split(CHUNK_ROWS):
        logits = target.logits(rows).float()
        best = logits.topk(num, dim=-1)
        ids.append(best.indices)
        log_probs.append(best.values - logits.logsumexp(dim=-1, keepdim=True))
    return torch.cat(ids), torch.cat(log_probs)


def candidate_loss(drafted: Drafted, corrections: torch.Tensor, reach: float = 0.0) -> torch.Tensor:
    """Weighted mean cross entropy over candidates and "none of them", 0-d; `corrections` [B, D, M + 1].

    With `reach`, a depth weighs min(1, reach * p), p being the probability of the path before it as it is scored now, and
    nothing below a token that was no candidate.
    """
    scores = conditioned(drafted.log_probs, corrections)
    hit = drafted.candidate_ids == drafted.tokens[:, 1:, None]
    label = torch.where(hit.any(dim=-1), hit.int().argmax(dim=-1), hit.shape[-1])
    losses = -scores.gather(2, label[..., None])[..., 0]
    weights = drafted.weights
    if reach:
        said = torch.where(label < hit.shape[-1], -losses.detach(), -torch.inf)
        before = torch.cat([torch.zeros_like(said[:, :1]), said.cumsum(dim=1)[:, :-1]], dim=1)
        weights = weights * (reach * before.exp()).clamp(max=1.0)
    return (losses * weights).sum() / weights.sum().clamp_min(1e-6)


def fit_adapter(target, drafter_path: Path, data: Data, folder: Path, config: AdapterTrainingConfig) -> Adapter:
    """Train within `minutes_this_run` (everything in it counts), then export the average into `folder`/adapter."""
    log = Log(folder)
    deadline = log.started + config.minutes_this_run * 60
    drafter = load_drafter(drafter_path, target.config, target.device, torch.float32)
    trainer = AdapterTrainer(PackedDrafter(drafter, target), data, config)
    size = sum(parameter.numel() for parameter in trainer.adapter.parameters())
    log(f"{size:,} parameters, {data.num_tokens:,} tokens", parameters=size, num_tokens=data.num_tokens, config=asdict(config))
    if (folder / CHECKPOINT).exists():
        trainer.load(folder)
        log(f"resumed at step {trainer.step_index}, {trainer.trained_seconds:.0f} s trained")
    _train(trainer, folder, log, deadline)
    if config.jointly:
        from ddtree.training.export import save_drafter

        published = json.loads((drafter_path / "config.json").read_text(encoding="utf-8"))
        drafter_path = save_drafter(trainer.average[1], folder, published, "Q8_0")
    path = save_adapter(trainer.average[0], folder / FOLDER, drafter_path)
    log(f"exported {path.name}, {path.stat().st_size:,} bytes", exported_bytes=path.stat().st_size)
    for name, adapter in (("factorised", None), ("conditioned", trainer.average[0])):
        conditioning = None if adapter is None else Conditioning(adapter, target_of(target), tables=True)
        packed = PackedDrafter(trainer.average[1] if config.jointly else drafter, target)
        result = evaluate(packed, data, drafter.config, config.eval_anchors, conditioning)
        if result is not None:
            log(f"{name}: {result.line()}", scoring=name, evaluation=result.as_json())
    return trainer.average[0]


def target_of(target):
    """The frozen target under the names by which `Conditioning` reads embedding and head, in the adapter's float32."""

    class Borrowed:
        config, device = target.config, target.device
        embed_tokens = target.embedding.float()

        class lm_head:
            weight = target.head.float()

        def embed(self, token_ids):
            return torch.nn.functional.embedding(token_ids, self.embed_tokens)

    return Borrowed()


def _train(trainer: AdapterTrainer, folder: Path, log: Log, deadline: float) -> None:
    """Steps until the schedule or this run's time ends; logs and saves on the way."""
    config, total = trainer.config, trainer.config.total_minutes * 60
    reserve = min(60.0, 0.2 * config.minutes_this_run * 60)  # for the evaluations, the checkpoint and the export
    losses: list[torch.Tensor] = []
    last_save = last_report = time.monotonic()
    while trainer.trained_seconds < total and time.monotonic() < deadline - reserve:
        begun = time.monotonic()
        losses.append(trainer.step(trainer.trained_seconds / total))
        if len(losses) % 4 == 0:
            losses[-4].item()  # keeps the host at most four steps ahead, so that the clock is the device's
        trainer.trained_seconds += time.monotonic() - begun
        if len(losses) >= config.log_steps:
            loss, seconds = torch.stack(losses).mean().item(), (time.monotonic() - last_report) / len(losses)
            log(f"step {trainer.step_index} loss {loss:.4f} {1e3 * seconds:.0f} ms/step", step=trainer.step_index, loss=loss,
                step_s=seconds, trained_s=trainer.trained_seconds)  # fmt: skip
            losses, last_report = [], time.monotonic()
        if time.monotonic() - last_save > config.checkpoint_seconds:
            trainer.save(folder)
            last_save = time.monotonic()
    trainer.save(folder)
