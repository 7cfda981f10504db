"""Train `hybrid-tiny` from scratch on prepared samples, on one device or (torchrun) several.

    torchrun --nproc-per-node 4 -m recipes.hybrid_tiny.pretrain --data DATA --out RUN --minutes 5

A run may be cut into commands; each goes on from the checkpoint, and the learning rate follows the share of `--minutes` that is used
up. The average of the weights is written to RUN/target with the tokenizer beside it; RUN/pretrain.jsonl keeps the losses.
The last line is JSON. Letters: B sequences, T tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddtree.models.config import ModelConfig
from ddtree.training.hybrid import HybridTarget
from ddtree.training.optim import learning_rate
from recipes.hybrid_tiny import model

WEIGHTS = (0.0, 1.0, 0.15)  # of the loss, by class: forced, answer, the user's and earlier text
STEP_OF_LENGTH = 64
CHECKPOINT = "pretrain.pt"


class Samples:
    """All samples on the device, in buckets of similar length; the last of each bucket are held out."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.tokens = torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int16)).to(device)
        self.classes = torch.from_numpy(np.load(folder / "classes.npy")).to(device)
        offsets = np.load(folder / "offsets.npy")
        lengths = np.diff(offsets)
        self.starts = torch.from_numpy(offsets[:-1]).to(device)
        self.lengths = torch.from_numpy(lengths).to(device)
        buckets = -(-lengths // STEP_OF_LENGTH)
        self.buckets, self.held_out = {}, {}
        for bucket in np.unique(buckets):
            rows = np.flatnonzero(buckets == bucket)
            cut = len(rows) - len(rows) // 200
            self.buckets[int(bucket) * STEP_OF_LENGTH] = torch.from_numpy(rows[:cut]).to(device)
            self.held_out[int(bucket) * STEP_OF_LENGTH] = torch.from_numpy(rows[cut:]).to(device)
        sizes = np.array([lengths[rows.cpu().numpy()].sum() for rows in self.buckets.values()], dtype=np.float64)
        self.shares, self.num_tokens = sizes / sizes.sum(), int(lengths.sum())

    def batch(self, rows: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `[B, length]` int64 and loss weights of them `[B, length]`; behind a sample's end the weight is 0."""
        position = torch.arange(length, device=rows.device)
        inside = position < self.lengths[rows, None]
        places = torch.where(inside, self.starts[rows, None] + position, 0)
        weights = torch.tensor(WEIGHTS, device=rows.device)[self.classes[places].long()]
        return torch.where(inside, self.tokens[places].long(), 0), weights * inside

    def draw(self, rng: np.random.Generator, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A random batch of one bucket, `num_tokens` in all."""
        length = int(rng.choice(list(self.buckets), p=self.shares))
        rows = self.buckets[length]
        chosen = torch.from_numpy(rng.integers(len(rows), size=max(1, num_tokens // length))).to(rows.device)
        return self.batch(rows[chosen], length)


class Group:
    """The processes that train together; alone it is one."""

    def __init__(self) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("nccl" if self.cuda else "gloo")

    def mean(self, gradients: list[torch.Tensor], number: float) -> float:
        """Average the gradients in place, and `number` with them, in one all-reduce."""
        if self.size == 1:
            return number
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), torch.tensor([number], device=self.device)])
        dist.all_reduce(flat)
        flat /= self.size
        place = 0
        for gradient in gradients:
            gradient.copy_(flat[place : place + gradient.numel()].view_as(gradient))
            place += gradient.numel()
        return float(flat[-1])


class Trainer:
    """Weights, their average, and two optimisers: Muon for the layers' matrices, AdamW for the rest."""

    def __init__(self, args, group: Group, samples: Samples) -> None:
        self.args, self.group, self.samples = args, group, samples
        self.config = ModelConfig.from_hf(model.CONFIG)
        self.weights = {name: tensor.requires_grad_() for name, tensor in model.fresh(args.seed, group.device).items()}
        self.average = {name: tensor.detach().clone() for name, tensor in self.weights.items()}
        matrices = [name for name, tensor in self.weights.items() if tensor.ndim == 2 and ".layers." in name and min(tensor.shape) > 16]
        others = [tensor for name, tensor in self.weights.items() if name not in matrices]
        self.optimizers = [
            torch.optim.Muon([self.weights[name] for name in matrices], lr=0.0, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step_index, self.seconds = 0, 0.0

    def loss(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted mean cross entropy of the next tokens, 0-d."""
        dtype = torch.bfloat16 if self.group.cuda else torch.float32
        target = HybridTarget(self.config, self.weights, dtype)
        hidden = target.run(tokens, (), self.config.num_layers)[1][:, :-1]
        weights, labels = weights[:, 1:].flatten(), tokens[:, 1:].flatten()
        chosen = weights.nonzero()[:, 0]
        logits = F.linear(hidden.flatten(0, 1)[chosen], target.head.to(dtype)).float()
        losses = F.cross_entropy(logits, labels[chosen], reduction="none")
        return (losses * weights[chosen]).sum() / weights.sum().clamp_min(1.0)

    def step(self, fraction: float) -> tuple[torch.Tensor, float]:
        """One update; the loss of this process, 0-d, and the group's mean of `fraction`."""
        args = self.args
        rng = np.random.default_rng((args.seed, self.step_index, self.group.rank))
        loss = self.loss(*self.samples.draw(rng, args.tokens_per_step))
        loss.backward()
        parameters = list(self.weights.values())
        fraction = self.group.mean([parameter.grad for parameter in parameters], fraction)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rate = learning_rate(args.learning_rate, self.step_index, fraction, warmup_steps=200)
        for optimizer in self.optimizers:
            for parameters_of in optimizer.param_groups:
                parameters_of["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(0.998, (1 + self.step_index) / (10 + self.step_index))
        torch._foreach_lerp_(list(self.average.values()), [p.detach() for p in parameters], 1 - decay)
        self.step_index += 1
        return loss.detach(), fraction

    def held_out_loss(self) -> dict[str, float]:
        """Loss of the averaged weights on held-out samples, by bucket."""
        live, self.weights = self.weights, self.average
        losses = {}
        with torch.no_grad():
            for length, rows in self.samples.held_out.items():
                if len(rows):
                    losses[str(length)] = round(self.loss(*self.samples.batch(rows[: max(1, 32768 // length)], length)).item(), 4)
        self.weights = live
        return losses

    def save(self, path: Path) -> None:
        state = {
            "weights": {name: tensor.detach() for name, tensor in self.weights.items()},
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step_index": self.step_index,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.group.device, weights_only=True)
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(state["weights"][name])
                self.average[name].copy_(state["average"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step_index, self.seconds = state["step_index"], state["seconds"]


def train(trainer: Trainer, args, log) -> None:
    """Steps until the schedule or this command's time ends."""
    begun = last = time.monotonic()
    total, losses, fraction = args.minutes * 60, [], 0.0
    while fraction < 1 and (time.monotonic() - begun) < args.minutes_this_run * 60:
        started = time.monotonic()
        loss, fraction = trainer.step(trainer.seconds / total)
        losses.append(loss)
        if len(losses) % 4 == 0:
            losses[-4].item()  # keeps the host at most four steps ahead, so that the clock is the device's
        trainer.seconds += time.monotonic() - started
        if trainer.step_index % args.log_steps == 0:
            now = time.monotonic()
            log(step=trainer.step_index, loss=round(torch.stack(losses[-args.log_steps :]).mean().item(), 4),
                step_ms=round(1000 * (now - last) / args.log_steps, 1), fraction=round(fraction, 3))  # fmt: skip
            last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that `prepare` wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of all runs together; drives the schedule")
    parser.add_argument("--minutes-this-run", type=float, default=60.0)
    parser.add_argument("--tokens-per-step", type=int, default=49152, help="per process")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--log-steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    group, started = Group(), time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)

    def log(**values) -> None:
        if group.rank == 0:
            line = json.dumps({"elapsed_s": round(time.monotonic() - started, 1), **values})
            with (args.out / "pretrain.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            print(line, flush=True)

    samples = Samples(args.data, group.device)
    trainer = Trainer(args, group, samples)
    if (args.out / CHECKPOINT).exists():
        trainer.load(args.out / CHECKPOINT)
    log(devices=group.size, device=torch.cuda.get_device_name() if group.cuda else "cpu", samples=len(samples.lengths),
        tokens=samples.num_tokens, parameters=sum(w.numel() for w in trainer.weights.values()), step=trainer.step_index)  # fmt: skip
    train(trainer, args, log)
    if group.rank == 0:
        trainer.save(args.out / CHECKPOINT)
        num_bytes = model.save(args.out / "target", trainer.average)
        for file in (args.data / "tokenizer").iterdir():
            shutil.copy(file, args.out / "target" / file.name)
        log(step=trainer.step_index, trained_s=round(trainer.seconds, 1), held_out_loss=trainer.held_out_loss(), bytes=num_bytes)
    if group.size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
