"""The requests that once failed, over HTTP against the embedded pair (contract.md)."""

import pytest
from fastapi.testclient import TestClient

from ddtree.server.app import create_app
from ddtree.server.facts import facts_of
from ddtree.server.settings import ServerSettings
from ddtree.server.worker import Worker

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def client(pair):
    worker = Worker(lambda: (pair.engine, facts_of(pair.engine, 4)))
    settings = ServerSettings(served_names=("smollm2",), target="smollm2", drafter=str(pair.source.drafter))
    worker.start()
    try:
        with TestClient(create_app(worker, pair.tokenizer, settings)) as http:
            while http.get("/health").status_code != 200:
                pass
            yield http
    finally:
        worker.stop()


@pytest.mark.parametrize("prompt", ["Complete this sentence: The capital of France is", "The capital of France is"])
def test_raw_completion_is_the_targets_own(client, pair, transformers_greedy, prompt):
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "tree_budget": 64, "return_token_ids": True}
    choice = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
    expected = transformers_greedy(pair.tokenizer.encode(prompt), 8)
    assert choice["token_ids"] == expected
    assert choice["text"] == pair.tokenizer.decode(expected)
    assert "user:" not in choice["text"]
    assert "Paris" in choice["text"]


@pytest.mark.parametrize("budget", [16, 64])
def test_chat_answers_in_a_whole_sentence(client, budget):
    body = {
        "messages": [{"role": "user", "content": "Say hello in one short sentence."}],
        "temperature": 0,
        "tree_budget": budget,
        "max_tokens": 64,
    }
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    choice, report = answer["choices"][0], answer["ddtree"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"].rstrip().endswith((".", "!", "?"))
    assert answer["usage"]["completion_tokens"] == report["output_tokens"] > 5
    assert report["mode"] == "ddtree" and report["mean_acceptance_length"] > 1


def test_stream_concatenates_to_the_whole_answer(client):
    body = {"prompt": "List: apples, pears", "max_tokens": 16, "temperature": 0, "tree_budget": 16}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    import json

    text = ""
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                text += choices[0]["text"] if choices else ""
    assert text == whole
