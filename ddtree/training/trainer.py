"""The training loop: frozen target features on the fly, mixed block sizes, a schedule driven by the clock.

A run may be cut into commands: each goes on where the last checkpoint stopped, and the schedule counts the seconds
spent training in all of them. Letters: S sequences, T tokens, K block size, A anchors.
"""

from __future__ import annotations

import copy
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ddtree.models.dflash import DFlash
from ddtree.training.blocks import Blocks, build_blocks, choose_anchors
from ddtree.training.config import TrainingConfig
from ddtree.training.data import Batch, Data, sequences_per_step
from ddtree.training.evaluate import evaluate
from ddtree.training.features import DenseTarget
from ddtree.training.loss import block_loss
from ddtree.training.optim import Optimizer, learning_rate, update_average
from ddtree.training.packed import PackedDrafter, drafter_config, initialise
from ddtree.training.warmup import settle

CHECKPOINT = "training.pt"


class Trainer:
    """One drafter in training, its optimiser, its average and the state of its random choices."""

    def __init__(self, packed: PackedDrafter, data: Data, config: TrainingConfig) -> None:
        """Starts from fresh weights, written into `packed.drafter`, whose compiled code stays."""
        self.packed, self.target, self.drafter = packed, packed.target, packed.drafter
        self.data, self.config = data, config
        initialise(self.drafter, self.target, config.seed)
        self.average = copy.deepcopy(self.drafter).requires_grad_(False)
        self.optimizer = Optimizer(self.drafter, config.optimizer, config)
        self.step_index, self.trained_seconds = 0, 0.0
        self.halvings, self.last_report = 0, time.monotonic()

    def draw_blocks(self, batch: Batch, rng: np.random.Generator) -> Blocks:
        """Blocks of one size for this step; the number of rows is the same at every size."""
        config, length = self.config, batch.tokens.shape[1]
        size = config.block_size
        if rng.random() >= config.full_block_share and config.min_block < config.block_size:
            size = int(rng.integers(config.min_block, config.block_size))
        num_rows = config.rows_per_token * length
        generator = torch.Generator(batch.tokens.device).manual_seed(int(rng.integers(2**31)))
        anchors = choose_anchors(batch.classes, min(num_rows // size, length), config.user_anchor_weight, generator)
        return build_blocks(
            batch.tokens, batch.classes, anchors, size, num_rows, config.mask_token_id, config.user_weight
        )

    def loss(self, batch: Batch, rng: np.random.Generator) -> torch.Tensor:
        """Weighted mean loss of one batch, 0-d."""
        blocks = self.draw_blocks(batch, rng)
        hidden = self.packed(self.target.features(batch.tokens, self.config.target_layer_ids), blocks)
        return block_loss(hidden, self.target.logits_head, blocks.labels, blocks.weights)[0]

    def step(self, fraction: float) -> torch.Tensor:
        """One update; returns the loss, 0-d on the device. The random choices depend on seed and step alone."""
        config = self.config
        rng = np.random.default_rng((config.seed, self.step_index))
        loss = self.loss(self.data.batch(rng, config.tokens_per_step >> self.halvings), rng)
        loss.backward()
        self.optimizer.step(learning_rate(config.learning_rate, self.step_index, fraction, config.warmup_steps))
        update_average(self.average, self.drafter, self.step_index, config.ema_decay)
        self.step_index += 1
        return loss.detach()

    def step_or_halve(self, fraction: float) -> torch.Tensor:
        """`step`, with half the sequences from then on whenever the device runs out of memory."""
        while True:
            try:
                return self.step(fraction)
            except torch.cuda.OutOfMemoryError:
                if self.config.tokens_per_step >> (self.halvings + 1) < max(self.data.lengths):
                    raise
            self.halvings += 1
            for parameter in self.drafter.parameters():
                parameter.grad = None
            torch.cuda.empty_cache()
            print(f"fit: out of memory, {self.config.tokens_per_step >> self.halvings} tokens a step now", flush=True)

    def held_out_loss(self, num_batches: int = 4) -> float:
        """Mean training loss over fixed held-out batches; with gradients, or the forward would be compiled anew."""
        losses = []
        for index in range(num_batches):
            rng = np.random.default_rng((99, index))
            shard = self.data.held_out[index % len(self.data.held_out)]
            # the shape of a training step, so that nothing is compiled anew
            count = sequences_per_step(self.config.tokens_per_step >> self.halvings, shard.tokens.shape[1])
            losses.append(self.loss(self.data.batch_of(shard, np.arange(count) % len(shard.tokens)), rng).item())
        return float(np.mean(losses))

    def save(self, folder: Path) -> None:
        """Write the checkpoint in one step, so a run that dies while writing keeps the last one."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "drafter": self.drafter.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step_index": self.step_index,
            "trained_seconds": self.trained_seconds,
            "choice": (self.config.optimizer, self.config.learning_rate),
        }
        partial = folder / (CHECKPOINT + ".partial")
        torch.save(state, partial)
        os.replace(partial, folder / CHECKPOINT)

    def load(self, folder: Path) -> None:
        """Go on from the checkpoint in `folder`."""
        state = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
        self.drafter.load_state_dict(state["drafter"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_index, self.trained_seconds = state["step_index"], state["trained_seconds"]


class Log:
    """JSON lines in a file, short lines on the screen."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.started = folder / "training.jsonl", time.monotonic()

    def __call__(self, text: str, **values) -> None:
        elapsed = time.monotonic() - self.started
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"elapsed_s": round(elapsed, 1), **values}) + "\n")
        print(f"fit: {elapsed:5.0f} s  {text}", flush=True)


def fit(target: DenseTarget, data: Data, folder: Path, config: TrainingConfig) -> DFlash:
    """Train within `minutes_this_run` (everything in it counts), then export the average into `folder`."""
    log = Log(folder)
    deadline = log.started + config.minutes_this_run * 60
    log(f"{data.num_tokens:,} tokens, lengths {data.lengths}", num_tokens=data.num_tokens)
    resumed = (folder / CHECKPOINT).exists()
    packed = settle(target, data, config, log, Trainer)
    if resumed:
        choice = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)["choice"]
        config = replace(config, optimizer=choice[0], learning_rate=choice[1])
    elif config.race:
        config = race(packed, data, config, log)
    trainer = Trainer(packed, data, config)
    if resumed:
        trainer.load(folder)
        log(f"resumed at step {trainer.step_index}, {trainer.trained_seconds:.0f} s trained")
    train(trainer, folder, log, deadline)
    finish(trainer, folder, log)
    return trainer.average


def race(packed: PackedDrafter, data: Data, config: TrainingConfig, log: Log) -> TrainingConfig:
    """Train each `optimizer:rate` of `config.race` for `race_seconds` from the same start; the config of the best."""
    results = []
    for entry in config.race.split(","):
        kind, rate = entry.split(":")
        runner_config = replace(config, optimizer=kind.strip(), learning_rate=float(rate))
        trainer = Trainer(packed, data, runner_config)
        end = time.monotonic() + config.race_seconds
        while time.monotonic() < end:
            trainer.step_or_halve(0.0).item()
        loss = trainer.held_out_loss()
        results.append((loss if loss == loss else float("inf"), runner_config))
        log(f"race {entry}: held-out loss {loss:.4f} after {trainer.step_index} steps", race=entry, loss=loss)
    best = min(results, key=lambda result: result[0])[1]
    log(f"race won by {best.optimizer}:{best.learning_rate:g}", won=[best.optimizer, best.learning_rate])
    return best


def train(trainer: Trainer, folder: Path, log: Log, deadline: float) -> None:
    """Steps until the schedule or this run's time ends; logs, evaluates and saves on the way."""
    config, total = trainer.config, trainer.config.total_minutes * 60
    last_save = last_evaluation = time.monotonic()
    reserve = min(25.0, 0.05 * config.minutes_this_run * 60)  # for the last evaluation, checkpoint and export
    losses: list[torch.Tensor] = []
    trainer.last_report = time.monotonic()
    while trainer.trained_seconds < total and time.monotonic() < deadline - reserve:
        begun = time.monotonic()
        losses.append(trainer.step_or_halve(trainer.trained_seconds / total))
        if len(losses) % 4 == 0:
            losses[-4].item()  # keeps the host at most four steps ahead, so that the clock is the device's
        trainer.trained_seconds += time.monotonic() - begun
        if len(losses) >= config.log_steps:
            report(trainer, losses, log)
            losses = []
        if time.monotonic() - last_evaluation > config.evaluate_seconds:
            report_evaluation(trainer, config.eval_anchors, log)
            last_evaluation = time.monotonic()
        if time.monotonic() - last_save > config.checkpoint_seconds:
            trainer.save(folder)
            last_save = time.monotonic()
    trainer.save(folder)


def report(trainer: Trainer, losses: list[torch.Tensor], log: Log) -> None:
    """One progress line for the steps since the last."""
    loss = torch.stack(losses).mean().item()
    now, config = time.monotonic(), trainer.config
    seconds = (now - trainer.last_report) / len(losses)
    trainer.last_report = now
    rate = learning_rate(
        config.learning_rate, trainer.step_index, trainer.trained_seconds / (config.total_minutes * 60), config.warmup_steps
    )
    speed = (config.tokens_per_step >> trainer.halvings) / seconds
    log(
        f"step {trainer.step_index} loss {loss:.4f} lr {rate:.2e} {seconds * 1e3:.0f} ms/step {speed:,.0f} tokens/s",
        step=trainer.step_index, loss=loss, learning_rate=rate, step_s=seconds, trained_s=trainer.trained_seconds,
    )  # fmt: skip


def report_evaluation(trainer: Trainer, num_anchors: int, log: Log) -> None:
    """Acceptance of the averaged weights on held-out text; the plain attention needs no compilation here."""
    packed = PackedDrafter(trainer.average, trainer.target)
    try:
        result = evaluate(packed, trainer.data, trainer.config, num_anchors)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return log("evaluation skipped, out of memory")
    if result is None:
        return log("no held-out greedy text long enough to evaluate on")
    log(f"step {trainer.step_index} {result.line()}", step=trainer.step_index, evaluation=result.as_json())


def finish(trainer: Trainer, folder: Path, log: Log) -> None:
    """Export first, since that is what the run is for; then the long evaluation."""
    from ddtree.training.export import save_drafter

    path = save_drafter(trainer.average, folder, drafter_config(trainer.target, trainer.config), "Q8_0")
    log(f"exported {path.name}, {path.stat().st_size:,} bytes", exported_bytes=path.stat().st_size)
    report_evaluation(trainer, trainer.config.final_eval_anchors, log)


