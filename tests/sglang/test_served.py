"""SmolLM2 and its drafter inside a real SGLang on a CPU (`make test-sglang`): its tokens are ours and Hugging Face's, and its
rounds accept what ours accept."""

import importlib.util
import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ddtree import load_engine
from ddtree.engine.request import Request
from ddtree.sampling.params import SamplingParams
from ddtree.sources import resolve
from ddtree.text import Tokenizer, render_chat
from tests.sglang import checkpoints
from tests.sglang.served import Server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="`make test-sglang` runs this, beside SGLang"),
    pytest.mark.timeout(1800),
]

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
MAX_TOKENS = 32
SERVERS = {"budget 16": (17, 1), "budget 64": (65, 1), "two ranks": (17, 2)}


class Reference:
    """Our own engine over the same pair, each answer computed once."""

    def __init__(self):
        self.files = resolve("smollm2")
        self.tokenizer = Tokenizer.load(self.files.target)
        self.engine = load_engine(self.files.target, self.files.drafter, device="cpu", dtype="float32")
        self.prompts = [
            self.tokenizer.encode(self.rendered(text), add_special_tokens=False) for text in TEXTS
        ]

    def rendered(self, text):
        return render_chat(self.tokenizer, [{"role": "user", "content": text}])

    def answers(self, budget, sampling=None, seed=0):
        eos = frozenset(self.tokenizer.eos_token_ids)
        requests = [
            Request(tuple(prompt), MAX_TOKENS, sampling or SamplingParams(), seed, tree_budget=budget, eos_token_ids=eos)
            for prompt in self.prompts
        ]
        return [self.engine.generate(request) for request in requests]


@pytest.fixture(scope="session")
def reference():
    return Reference()


@pytest.fixture(scope="session")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    return {1: checkpoints.write(folder / "whole"), 2: checkpoints.write(folder / "padded", more_groups=1)}


@pytest.fixture(scope="module", params=SERVERS, ids=str)
def served(request, targets, reference, tmp_path_factory):
    num_nodes, ranks = SERVERS[request.param]
    server = Server(targets[ranks], reference.files.drafter, tmp_path_factory.mktemp("server"), num_nodes, ranks)
    server.name, server.budget = request.param, num_nodes - 1
    try:
        yield server.wait()
    finally:
        server.stop()


def ask(server, prompt, **sampling):
    params = {"temperature": 0, "max_new_tokens": MAX_TOKENS, **sampling}
    return server.post("/generate", {"input_ids": prompt, "sampling_params": params})


def ask_all(server, prompts, **sampling):
    """All at once, so that they share rounds."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, **sampling), prompts))


def hugging_face(folder, prompts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=[2], pad_token_id=2
        )
        answers.append(found[0, len(prompt) :].tolist())
    return answers


def test_eight_at_once_say_what_our_engine_and_transformers_say(served, reference, targets):
    before = len(served.rounds())
    found = [answer["output_ids"] for answer in ask_all(served, reference.prompts)]
    ours = reference.answers(served.budget)
    assert found == [list(each.token_ids) for each in ours]
    assert found == hugging_face(targets[1], reference.prompts)

    rounds = served.rounds()[before:]
    assert len({each["request"] for each in rounds}) == len(TEXTS)
    length = sum(each["acceptance_length"] for each in rounds) / len(rounds)
    our_rounds = sum(each.stats.decode_rounds for each in ours)
    our_length = sum(each.stats.mean_acceptance_length * each.stats.decode_rounds for each in ours) / our_rounds
    print(f"acceptance length {length:.3f} in {len(rounds)} rounds, our engine {our_length:.3f} in {our_rounds}")
    assert length == pytest.approx(our_length, rel=0.02)
    branched = [each for each in rounds if not each["first_children"]]
    print(f"{len(branched)} paths through a child that is not its parent's first")
    assert branched


def test_chats_stream_the_same_text_through_the_openai_api(served, reference):
    def streamed(text):
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": MAX_TOKENS}
        events = served.stream("/v1/chat/completions", body)
        assert len(events) > 2
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])

    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = list(pool.map(streamed, TEXTS))
    decoded = [reference.tokenizer.pretrained.decode(list(each.token_ids), skip_special_tokens=True) for each in reference.answers(0)]
    assert found == decoded


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"temperature": 0.8, "top_p": 0.95}, SamplingParams(0.8, top_p=0.95)),
        ({"temperature": 1.0, "top_k": 20, "min_p": 0.02}, SamplingParams(1.0, top_k=20, min_p=0.02)),
        (
            {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_new_tokens": 20},
            SamplingParams(0.7, frequency_penalty=0.5, repetition_penalty=1.1, min_tokens=20),
        ),
    ],
    ids=("top-p", "top-k and min-p", "penalties"),
)
def test_a_seed_draws_what_it_draws_in_our_engine(served, reference, asked, sampling):
    if served.name != "budget 16":
        pytest.skip("seen at budget 16 on one rank")
    found = ask_all(served, reference.prompts, sampling_seed=11, **asked)
    assert [each["output_ids"] for each in found] == [list(each.token_ids) for each in reference.answers(0, sampling, 11)]


def test_a_request_may_choose_a_smaller_tree(served, reference):
    if served.name != "budget 16":
        pytest.skip("seen at budget 16 on one rank")
    whole = ask(served, reference.prompts[2])
    for budget in (0, 3):
        before = len(served.rounds())
        assert ask(served, reference.prompts[2], custom_params={"tree_budget": budget})["output_ids"] == whole["output_ids"]
        assert {each["num_drafted"] for each in served.rounds()[before:]} == {budget}


def test_a_known_prompt_is_not_computed_again_and_drafts_as_well(served, reference):
    if served.name != "budget 16":
        pytest.skip("seen at budget 16 on one rank")
    prompt = reference.prompts[3]
    first, again = ask(served, prompt), ask(served, prompt)
    assert again["meta_info"]["cached_tokens"] >= len(prompt) - 1
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["spec_verify_ct"] == first["meta_info"]["spec_verify_ct"]


def test_a_schema_holds_along_every_path(served):
    if served.name != "budget 16":
        pytest.skip("seen at budget 16 on one rank")
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    texts = []
    for budget in (0, 16):
        body = {
            "model": "m", "messages": [{"role": "user", "content": "Give a name as JSON."}], "temperature": 0, "max_tokens": 40,
            "response_format": form, "custom_params": {"tree_budget": budget},
        }  # fmt: skip
        texts.append(served.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])
    assert texts[0] == texts[1] and list(json.loads(texts[0])) == ["name"]


def test_log_probabilities_come_with_every_token(served, reference):
    if served.name != "budget 16":
        pytest.skip("seen at budget 16 on one rank")
    body = {"model": "m", "prompt": reference.rendered(TEXTS[0]), "temperature": 0, "max_tokens": 12, "logprobs": 1}
    choice = served.post("/v1/completions", body)["choices"][0]
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == 12 and all(-20 < value <= 0 for value in values)
    # Greedy: the chosen token is the most probable one.
    best = [max(each.values()) for each in choice["logprobs"]["top_logprobs"]]
    assert values == pytest.approx(best, abs=1e-4)


def test_what_cannot_be_honoured_is_a_400(served, reference):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(served, reference.prompts[0], custom_params={"tree_budget": -2})
    assert refused.value.code == 400 and "tree_budget must be an integer >= 0, got -2" in refused.value.read().decode()
    # The server goes on.
    assert ask(served, reference.prompts[0])["output_ids"]
