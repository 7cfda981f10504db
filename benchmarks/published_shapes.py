"""Qwen3.6-27B's true shapes with random weights: write the checkpoint, load it, prefill, decode rounds; time and memory.

    python -m benchmarks.published_shapes --folder /dev/shm/qwen --out shapes.json

The checkpoint is real: sharded safetensors under the published names, read by the loader that serves it. Random weights say nothing
about acceptance (it is 1: a random drafter is never right); what is measured is that everything fits and what a round takes.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = 64
TARGET = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (LAYERS // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "num_attention_heads": 24,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"],
    "max_position_embeddings": 262144,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": LAYERS,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": 248320,
}


def random_tensor(name: str, like: torch.Tensor, device: str) -> torch.Tensor:
    """Values that keep 64 layers alive, in the published dtypes."""
    fp32 = name.endswith(("A_log", "linear_attn.norm.weight"))
    tensor = torch.empty(like.shape, device=device, dtype=torch.float32 if fp32 else torch.bfloat16)
    if name.endswith("A_log"):
        return tensor.uniform_(-4, 1)
    if like.dim() == 1:
        return tensor.normal_(1 if "layers" not in name or "linear_attn" in name or name.startswith("layers") else 0, 0.1)
    return tensor.normal_(0, like.shape[-1] ** -0.5)


def write(folder: Path, config: dict, tensors, device: str, shard_bytes: int = 3 << 30) -> int:
    """Shards of about `shard_bytes` and their index; returns the bytes written."""
    folder.mkdir(parents=True)
    shards, size = [{}], 0
    for name, like in tensors:
        num_bytes = 2 * like.numel()
        if size and size + num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = like
        size += num_bytes
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        values = {name: random_tensor(name, like, device).cpu() for name, like in shard.items()}
        total += sum(value.nbytes for value in values.values())
        weight_map |= dict.fromkeys(shard, file)
        save_file(values, folder / file)
        print(f"wrote {file}, {total / 1e9:.1f} GB", flush=True)
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def write_pair(folder: Path, device: str, target: dict = TARGET, drafter: dict = DRAFTER) -> int:
    """Target and drafter under `folder`, every tensor that the models ask for, under its published name."""
    from ddtree.models.config import ModelConfig
    from ddtree.models.dflash import DFlash
    from ddtree.models.drafter_config import DrafterConfig
    from ddtree.models.published import Naming
    from ddtree.models.registry import TARGETS

    config = ModelConfig.from_hf(target)
    meta = TARGETS[config.architecture](config, "meta", torch.bfloat16)
    published = Naming(prefix="model.language_model.")
    total = write(folder / "target", target, published.tensors(meta.checkpoint_tensors()), device)
    meta = DFlash(DrafterConfig.from_hf(drafter, "drafter"), "meta", torch.bfloat16)
    return total + write(folder / "drafter", drafter, meta.checkpoint_tensors(), device)


def decode(engine, prompt: tuple[int, ...], budget: int, rounds: int) -> dict:
    """Prefill, then decode rounds; median-free plain sums, since the engine's clocks synchronise per stage."""
    from ddtree.engine.request import Request

    request_id = engine.add(Request(prompt, max_tokens=16 * rounds + 64, tree_budget=budget))
    started = time.perf_counter()
    emitted = []
    while not emitted:
        emitted = engine.step()
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    prefill_s = time.perf_counter() - started
    sequence = engine.running(request_id)
    times = []
    while sequence.stats.decode_rounds < rounds:
        begun = time.perf_counter()
        for emission in engine.step():
            if emission.error:
                raise RuntimeError(emission.error)
        times.append(time.perf_counter() - begun)
    stats = sequence.stats
    engine.abort(request_id)
    times = sorted(times[2:])
    stages = {name: round(1000 * getattr(stats, f"{name}_s") / rounds, 2) for name in ("draft", "build", "verify", "accept", "commit")}
    return {
        "budget": budget,
        "prompt_tokens": len(prompt),
        "prefill_s": round(prefill_s, 3),
        "rounds": stats.decode_rounds,
        "output_tokens": stats.output_tokens,
        "acceptance_length": round(stats.mean_acceptance_length, 3),
        "round_ms": {"median": round(1000 * times[len(times) // 2], 2), "min": round(1000 * times[0], 2), "max": round(1000 * times[-1], 2)},
        "stage_ms": stages,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the checkpoints go: 58 GB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=64)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from ddtree.engine.loading import load_engine

    torch.manual_seed(0)
    started = time.perf_counter()
    total = write_pair(args.folder, args.device)
    written = time.perf_counter() - started
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    engine = load_engine(args.folder / "target", args.folder / "drafter", device=args.device, dtype="bfloat16", max_context=8192)
    loaded = time.perf_counter() - started
    print(f"written in {written:.0f} s, loaded in {loaded:.0f} s", flush=True)
    weights = torch.cuda.memory_allocated() if torch.cuda.is_available() else None
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(0, 248000, (args.prompt_tokens,), generator=generator).tolist())
    runs = []
    for budget in (0, args.budget):
        decode(engine, prompt[:64], budget, 3)  # warms up
        runs.append(decode(engine, prompt, budget, args.rounds))
        print(runs[-1], flush=True)
    result = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "shapes": "Qwen3.6-27B and its DFlash drafter, bfloat16, random weights",
        "checkpoint_bytes": total,
        "write_s": round(written, 1),
        "load_s": round(loaded, 1),
        "weights_bytes": weights,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "runs": runs,
        "command": "python -m benchmarks.published_shapes " + " ".join(sys.argv[1:]),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
