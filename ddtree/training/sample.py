"""Self-generated training data: the target writes whole conversations, thousands at a time.

All sequences of a batch share their length and step, so one decode step needs no mask: sequence b at step t attends
to its own first t + 1 keys. What a sequence does next is decided on the device without a look from the host:

- while `t < prefix_length` its next token is the given prefix (template, opener);
- a stop token written in a turn forces the template's piece that opens the other speaker's turn;
- otherwise the token is drawn: user turns warm with min-p, assistant turns at the sequence's own temperature.

Every batch becomes one shard on disk, so a run that dies loses one batch and a second run goes on.
Letters: B sequences, T positions, G key-value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddtree.training.config import SamplingConfig
from ddtree.training.features import DenseTarget

USER, ASSISTANT, RAW = 0, 1, 2  # phases
FORCED, GENERATED, USER_TOKEN = 0, 1, 2  # classes in the saved mask; class 1 is an assistant or raw token

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Beginnings:
    """What the sequences of one batch start from; the arrays lie on the device."""

    tokens: torch.Tensor  # [B, T] int64, the prefix in front
    prefix_lengths: torch.Tensor  # [B] int64
    phases: torch.Tensor  # [B] int64: USER or RAW
    temperatures: torch.Tensor  # [B] float32, of assistant and raw text; 0 is greedy
    user_caps: torch.Tensor  # [B] int64, longest user turn
    is_stub: torch.Tensor  # [B] bool: the opener begins a docstring, and the user turn ends where that closes


def begin(openers: dict, batch: int, length: int, config: SamplingConfig, seed: int, device: torch.device) -> Beginnings:
    """Draw prefixes, temperatures and caps for `batch` sequences of `length` positions."""
    rng = np.random.default_rng(seed)
    categories = list(openers["shares"])
    shares = np.array([openers["shares"][name] for name in categories])
    tokens, lengths, phases = np.zeros((batch, length), np.int64), np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    is_stub, quotes = np.zeros(batch, bool), set(openers["docstring_ids"])
    for row, choice in enumerate(rng.choice(len(categories), size=batch, p=shares / shares.sum())):
        name = categories[choice]
        group = openers["openers"][name]
        empty = rng.random() < openers["empty_shares"].get(name, 0.0)
        opener = [] if empty else group[rng.integers(len(group))]
        prefix = [*openers["raw_prefix" if name == "raw" else "system_prefix"], *opener][:length]
        tokens[row, : len(prefix)], lengths[row] = prefix, len(prefix)
        phases[row], is_stub[row] = (RAW if name == "raw" else USER), not quotes.isdisjoint(opener)
    temperatures = rng.choice(config.temperatures, size=batch, p=config.temperature_shares).astype(np.float32)
    caps = rng.integers(config.user_cap[0], config.user_cap[1] + 1, size=batch)
    arrays = (tokens, lengths, phases, temperatures, caps, is_stub)
    return Beginnings(*(torch.from_numpy(array).to(device) for array in arrays))


class Conversation:
    """The state machine of a batch: which token comes next, and of which class it is."""

    def __init__(self, begin: Beginnings, openers: dict, config: SamplingConfig) -> None:
        device = begin.tokens.device
        self.begin, self.config = begin, config
        batch, length = begin.tokens.shape
        pieces = [openers["after_user"], openers["after_assistant"]]
        # piece p is read from column 0 until its -1; row 2 is "no piece"
        table = [piece + [-1] * (1 + max(map(len, pieces)) - len(piece)) for piece in pieces]
        self.table = torch.tensor([*table, [-1] * len(table[0])], device=device)
        self.piece = torch.full((batch,), 2, device=device)
        self.offset = torch.zeros(batch, dtype=torch.int64, device=device)
        self.phase = begin.phases.clone()
        self.turn_length = torch.zeros(batch, dtype=torch.int64, device=device)
        self.end_id, self.stop_ids = openers["end_id"], torch.tensor(openers["stop_ids"], device=device)
        self.docstring_ids = torch.tensor(openers["docstring_ids"], dtype=torch.int64, device=device)
        self.classes = torch.zeros(batch, length, dtype=torch.uint8, device=device)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """`[B, V]` logits to `[B]` tokens under each sequence's present rule."""
        config, is_user = self.config, self.phase == USER
        temperature = torch.where(is_user, config.user_temperature, self.begin.temperatures)
        is_greedy = temperature == 0
        inverse = torch.where(is_greedy, 1.0, 1.0 / temperature.clamp_min(1e-3))
        # exponential_ never returns 0, so the noise -log(e) is finite and 0 x noise is 0
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_().neg_()
        noise *= torch.where(is_greedy, 0.0, 1.0)[:, None]
        scores = noise.addcmul_(logits.float(), inverse[:, None])
        floor = torch.where(is_user, float(np.log(config.user_min_p)) * config.user_temperature, -torch.inf)
        threshold = logits.amax(dim=-1, keepdim=True).float() + floor[:, None]
        return scores.masked_fill_(logits < threshold, -torch.inf).argmax(dim=-1)

    def advance(self, step: int, drawn: torch.Tensor) -> torch.Tensor:
        """The tokens `[B]` of position `step`, given what would be drawn there; updates the state."""
        in_prefix = step < self.begin.prefix_lengths
        piece_token = self.table[self.piece, self.offset]
        in_piece = (piece_token >= 0) & ~in_prefix
        is_free = ~(in_prefix | in_piece)
        too_long = (self.phase == USER) & (self.turn_length >= self.begin.user_caps)
        drawn = torch.where(too_long, self.end_id, drawn)
        token = torch.where(in_prefix, self.begin.tokens[:, step], torch.where(in_piece, piece_token, drawn))
        stops = is_free & (self.phase != RAW) & torch.isin(token, self.stop_ids)
        # in a chat both stop tokens end the turn; what is written is always the template's own
        token = torch.where(stops, self.end_id, token)
        classes = torch.where(self.phase == USER, USER_TOKEN, GENERATED)
        self.classes[:, step] = torch.where(is_free & ~too_long, classes, FORCED).to(torch.uint8)
        self.begin.tokens[:, step] = token
        # user turns end with piece 0, assistant turns with piece 1; the phase turns at once
        self.piece = torch.where(stops, self.phase, torch.where(in_piece, self.piece, 2))
        self.offset = torch.where(stops, 0, torch.where(in_piece, self.offset + 1, 0))
        self.phase = torch.where(stops, 1 - self.phase, self.phase)
        self.turn_length = torch.where(is_free & ~stops, self.turn_length + 1, 0)
        closes = is_free & (self.phase == USER) & self.begin.is_stub & torch.isin(token, self.docstring_ids)
        self.turn_length = torch.where(closes, self.begin.user_caps, self.turn_length)
        return token


def attend_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One step: `query [B, G, group, D]` over `keys`, `values [B, G, t, D]`; the group plays the query length."""
    return F.scaled_dot_product_attention(query, keys, values)


def attend_flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, keys, values)


def attend_efficient(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(query, keys, values)


def attend_matmul(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(query * query.shape[-1] ** -0.5, keys.transpose(-1, -2))
    return torch.matmul(scores.softmax(dim=-1), values)


def fastest_attention(batch: int, shape: tuple[int, int, int], length: int, device: torch.device) -> Attend:
    """Time the candidates on one layer's shapes at half the length; `shape` is (G, group, D)."""
    if device.type != "cuda":
        return attend_sdpa
    kv_heads, group, head_dim = shape
    query = torch.randn(batch, kv_heads, group, head_dim, device=device, dtype=torch.bfloat16)
    cache = torch.randn(2, batch, kv_heads, length, head_dim, device=device, dtype=torch.bfloat16)
    keys, values = cache[0, :, :, : length // 2 + 3], cache[1, :, :, : length // 2 + 3]
    exact, best, best_ms = attend_matmul(query[:64].float(), keys[:64].float(), values[:64].float()), attend_sdpa, 1e9
    for attend in (attend_flash, attend_efficient, attend_matmul):
        try:
            error = (attend(query, keys, values)[:64].float() - exact).norm() / exact.norm()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(5):
                attend(query, keys, values)
            stop.record()
            stop.synchronize()
            elapsed = start.elapsed_time(stop) / 5
        except RuntimeError as failure:
            print(f"sample: {attend.__name__} unusable: {str(failure).splitlines()[0]}", flush=True)
            continue
        print(f"sample: {attend.__name__} {elapsed:.3f} ms a layer, error {error:.1e}", flush=True)
        if elapsed < best_ms and error < 0.03:
            best, best_ms = attend, elapsed
    return best


class Writer:
    """Writes batches of one target: static caches, one decode step per position."""

    def __init__(self, target: DenseTarget, batch: int, length: int) -> None:
        self.target, self.batch, self.length = target, batch, length
        group = target.num_heads // target.num_kv_heads
        self.shape = (target.num_kv_heads, group, target.head_dim)
        self.attend = fastest_attention(batch, self.shape, length, target.device)
        size = (len(target.layers), batch, target.num_kv_heads, length, target.head_dim)
        self.keys = torch.empty(size, dtype=target.dtype, device=target.device)
        self.values = torch.empty_like(self.keys)
        cos, sin = target.rotary(length)
        self.cos, self.sin = cos.to(target.dtype), sin.to(target.dtype)

    def step(self, token: torch.Tensor, step: int) -> torch.Tensor:
        """Hidden states `[B, C]` after the final norm for tokens `[B]` at position `step`."""
        target, x = self.target, self.target.embed(token)
        for index, layer in enumerate(target.layers):
            query, key, value = target.project(layer, x, self.cos[step], self.sin[step])
            self.keys[index, :, :, step] = key
            self.values[index, :, :, step] = value
            keys, values = self.keys[index, :, :, : step + 1], self.values[index, :, :, : step + 1]
            attended = self.attend(query.reshape(self.batch, *self.shape), keys, values)
            x = target.mix(layer, x, attended.reshape(self.batch, -1))
        return target.norm(x, target.final_norm)

    @torch.no_grad()
    def write(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Fill the conversation; returns tokens `[B, T]` uint16 and classes `[B, T]` uint8."""
        token = conversation.advance(0, conversation.begin.tokens[:, 0])
        first_free = int(conversation.begin.prefix_lengths.min())
        for step in range(1, self.length):
            hidden = self.step(token, step - 1)
            drawn = token if step < first_free else conversation.draw(self.target.logits(hidden))
            token = conversation.advance(step, drawn)
        return conversation.begin.tokens.cpu().numpy().astype(np.uint16), conversation.classes.cpu().numpy()


def sample(target: DenseTarget, openers: dict, folder: Path, config: SamplingConfig) -> int:
    """Write shards `tokens_`, `temperatures_` and (last) `classes_NNNN.npy` until the tokens or the minutes are used up.

    Returns the positions on disk. Shards that exist are counted and kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started, done, shard, scale = time.monotonic(), 0, 0, 1
    slowest = 0.0
    while done < config.tokens:
        path = folder / f"classes_{shard:04d}.npy"
        if path.exists():
            done, shard = done + np.load(path, mmap_mode="r").size, shard + 1
            continue
        elapsed = time.monotonic() - started
        if elapsed + slowest > config.minutes * 60 and slowest:
            break
        length = config.lengths[shard % len(config.lengths)]
        batch = max(1, min(config.batch_tokens, config.tokens - done) // length // scale)
        try:
            tokens, classes, temperatures = write_shard(target, openers, batch, length, config, shard)
        except torch.cuda.OutOfMemoryError:
            scale *= 2
            torch.cuda.empty_cache()
            print(f"sample: out of memory at {batch} sequences, halving", flush=True)
            continue
        np.save(folder / f"tokens_{shard:04d}.npy", tokens)
        np.save(folder / f"temperatures_{shard:04d}.npy", temperatures)
        np.save(path, classes)
        done, shard = done + tokens.size, shard + 1
        seconds = time.monotonic() - started - elapsed
        slowest = max(slowest, seconds)
        print(
            f"sample: shard {shard - 1} of {batch} x {length}, {tokens.size / seconds:,.0f} tokens/s, total {done:,}, "
            f"assistant {(classes == GENERATED).mean():.0%}, user {(classes == USER_TOKEN).mean():.0%}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    return done


def write_shard(
    target: DenseTarget, openers: dict, batch: int, length: int, config: SamplingConfig, shard: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One batch from its own seed: tokens and classes, each `[batch, length]`, and temperatures `[batch]`."""
    seed = config.seed * 1000 + shard
    torch.manual_seed(seed)
    beginnings = begin(openers, batch, length, config, seed, target.device)
    tokens, classes = Writer(target, batch, length).write(Conversation(beginnings, openers, config))
    return tokens, classes, beginnings.temperatures.cpu().numpy()
