"""Tokens per second of an SGLang server with the DDTREE plugin, by tree budget, and whether every budget says the same.

    python -m benchmarks.sglang_budgets http://127.0.0.1:30000 --budgets 0,16,64 --max-tokens 128 --prompts 8

Budgets are asked for by request (`custom_params.tree_budget`), so the padded tree of the server's size is verified whatever they are:
budget 0 here is not SGLang's plain decoding. For that, run this with `--budgets plain` against a server without the plugin.
Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from ddtree.bench.workloads import load_prompts

PLAIN = "plain"


def ask(url: str, text: str, max_tokens: int, budget: str) -> dict:
    """One greedy chat-less continuation through `/generate`."""
    params = {"temperature": 0, "max_new_tokens": max_tokens}
    if budget != PLAIN:
        params["custom_params"] = {"tree_budget": int(budget)}
    body = json.dumps({"text": text, "sampling_params": params}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=600))


def run(url: str, texts: list[str], max_tokens: int, budget: str) -> dict:
    """All prompts at once; tokens, seconds, and the acceptance length pooled over rounds."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: ask(url, text, max_tokens, budget), texts))
    seconds = time.perf_counter() - started
    tokens = sum(each["meta_info"]["completion_tokens"] for each in answers)
    rounds = sum(each["meta_info"].get("spec_verify_ct", 0) for each in answers)
    return {
        "budget": budget,
        "tokens_per_s": tokens / seconds,
        "acceptance_length": (tokens - len(texts)) / rounds if rounds else None,
        "answers": [each["output_ids"] for each in answers],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--budgets", default="0,16,64")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args()
    texts = [prompt.turns[0] for prompt in load_prompts("humaneval", args.prompts)]
    budgets = args.budgets.split(",")
    run(args.url, texts, 8, budgets[0])  # warm
    results = [run(args.url, texts, args.max_tokens, budget) for budget in budgets]
    first = results[0]["answers"]
    for each in results:
        each["same_as_first"] = each.pop("answers") == first
        length = "-" if each["acceptance_length"] is None else f"{each['acceptance_length']:.2f}"
        print(f"budget {each['budget']:>5}  {each['tokens_per_s']:9.1f} tokens/s  acceptance {length}  same {each['same_as_first']}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
