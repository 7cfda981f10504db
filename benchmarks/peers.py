"""What a step costs elsewhere, on the same card and shapes: Hugging Face eager, and the reference DDTree's own loop.

    python -m benchmarks.peers hf --shapes qwen3.6-27b --out hf.json
    python -m benchmarks.peers ddtree --reference ~/ddtree --shapes qwen3-8b --out ddtree.json

`hf` times plain decoding of `transformers` (its Gated DeltaNet runs in plain torch where no kernel package is installed).
`ddtree` runs `ddtree_generate` of a checkout of liranringel/ddtree with random weights, whose acceptance length is 1; what is compared
is the time of a round. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import types
from pathlib import Path

import torch

from benchmarks.shapes import PAIRS


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def random_hf(config, device: str, cls):
    """A transformers model of random bf16 weights, made on the device."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = cls(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            tensor.normal_(1 if tensor.dim() == 1 else 0, 0.1 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5)
    for module in model.modules():
        # Rotary frequencies are made by the constructor, so on the meta device they are not.
        if hasattr(module, "inv_freq"):
            module.__init__(module.config)
            module.to(device)
    return model.eval()


def hf_model(shapes: str, device: str):
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

    published = PAIRS[shapes][0]
    if published["model_type"] == "qwen3":
        return random_hf(Qwen3Config(**published), device, Qwen3ForCausalLM)
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**published.get("text_config", published))
    config._attn_implementation = "sdpa"
    return random_hf(config, device, lambda c: AutoModelForCausalLM.from_config(c, dtype=torch.bfloat16))


@torch.inference_mode()
def time_hf(args) -> dict:
    model = hf_model(args.shapes, args.device)
    ids = torch.randint(0, model.config.vocab_size - 1, (1, args.context), device=args.device)
    output = model(ids, use_cache=True, logits_to_keep=1)
    cache, token, times = output.past_key_values, ids[:, -1:], []
    for number in range(args.rounds + 5):
        sync()
        started = time.perf_counter()
        output = model(token, past_key_values=cache, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
        sync()
        if number >= 5:
            times.append(1000 * (time.perf_counter() - started))
    return {"plain_ms": summary(times)}


def time_ddtree(args) -> dict:
    """Milliseconds between the time stamps that `ddtree_generate` takes after each round."""
    sys.path.insert(0, str(args.reference))
    for name in ("datasets", "loguru"):  # imported by the reference, not needed by its loop
        module = types.ModuleType(name)
        module.logger = types.SimpleNamespace(warning=print, info=print)
        module.load_dataset = module.Features = module.Sequence = module.Value = None
        sys.modules.setdefault(name, module)
    from transformers import DynamicCache

    crop = DynamicCache.crop

    def crop_to(self, length: int) -> None:
        # The reference says how many tokens to keep; recent transformers wants how many to drop.
        if length < self.get_seq_length():
            crop(self, length - self.get_seq_length())

    DynamicCache.crop = crop_to
    from model import DFlashDraftModel
    from transformers.models.qwen3 import Qwen3Config

    from ddtree import ddtree_generate

    target = hf_model(args.shapes, args.device)
    config = Qwen3Config(**PAIRS[args.shapes][1])
    config._attn_implementation = "sdpa"
    drafter = random_hf(config, args.device, DFlashDraftModel)
    ids = torch.randint(0, target.config.vocab_size - 1, (1, args.context), device=args.device)
    mask = config.dflash_config["mask_token_id"]
    results = {}
    for budget in args.budgets:
        ddtree_generate(drafter, target, ids, mask, 4, config.block_size, None, 0.0, budget)
        answer = ddtree_generate(drafter, target, ids, mask, args.rounds, config.block_size, None, 0.0, budget)
        stamps = answer.round_timestamps
        rounds = [1000 * (after - before) for before, after in zip(stamps[2:], stamps[3:], strict=False)]
        results[str(budget)] = summary(rounds)
        print(f"budget {budget}: {results[str(budget)]}", flush=True)
    return {"round_ms": results}


def summary(times: list[float]) -> dict:
    return {"median": round(statistics.median(times), 3), "spread": [round(min(times), 3), round(max(times), 3)]}


def main() -> int:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=["hf", "ddtree"])
    parser.add_argument("--shapes", choices=PAIRS, required=True)
    parser.add_argument("--reference", type=Path, help="a checkout of liranringel/ddtree")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--budgets", type=numbers, default=[16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    import transformers

    result = {
        "peer": args.peer,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shapes": f"{args.shapes}, bfloat16, random weights, context {args.context}",
        **(time_hf(args) if args.peer == "hf" else time_ddtree(args)),
        "command": "python -m benchmarks.peers " + " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
