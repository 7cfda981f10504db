"""Other clients: LangChain's, npm's, and LiteLLM where it is installed (`make test-clients`: it takes 200 MB)."""

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.server.fakes import ScriptEngine, serving
from tests.server.live import live
from tests.server.scripted import ROOMY, byte_server
from tests.server.test_tools import CALL, TOOLS_TEMPLATE, WEATHER

# What these libraries warn about at import or inside is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


class Answer(BaseModel):
    """What the structured answers hold."""

    yes: bool


@pytest.fixture(scope="module")
def url():
    engine = ScriptEngine(f"Sure.\n{CALL}", 3)
    with serving(engine, TOOLS_TEMPLATE, facts=ROOMY) as client, live(client.app) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def wild_url():
    with byte_server("right") as client, live(client.app) as url:
        yield f"{url}/v1"


def absent(what, wanted_by):
    """A skip that says how to install it; a failure where that was to have been done."""
    message = f"{what}: not installed; make {wanted_by} does it"
    told = os.environ.get("CI") if wanted_by == "test" else os.environ.get("TEST_CLIENTS")
    pytest.fail(message) if told else pytest.skip(message)


def test_langchain(url, wild_url):
    langchain = importlib.import_module("langchain_openai")
    model = langchain.ChatOpenAI(base_url=url, api_key="none", model="toy", max_retries=0)
    answer = model.bind_tools([WEATHER]).invoke("hi")
    assert answer.content == "Sure." and answer.tool_calls[0]["args"] == {"city": "Rom", "unit": "c"}
    assert answer.usage_metadata["output_tokens"] > 0
    pieces = list(model.bind_tools([WEATHER]).stream("hi"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert whole.content == "Sure." and whole.tool_calls[0]["args"] == {"city": "Rom", "unit": "c"}
    wild = langchain.ChatOpenAI(base_url=wild_url, api_key="none", model="m", max_retries=0, max_tokens=300, seed=3)
    for method in ("json_schema", "function_calling"):
        assert isinstance(wild.with_structured_output(Answer, method=method).invoke("hi"), Answer)


def test_litellm(url, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network for prices, and waits
    if importlib.util.find_spec("litellm") is None:
        absent("litellm", "test-clients")
    litellm = importlib.import_module("litellm")
    fields = {
        "model": "openai/toy",
        "api_base": url,
        "api_key": "none",
        "messages": [{"role": "user", "content": "hi"}],
    }
    answer = litellm.completion(**fields, tools=[WEATHER])
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].message.content == "Sure." and json.loads(call.function.arguments)["city"] == "Rom"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**fields, stream=True))
    assert text == f"Sure.\n{CALL}"


def test_npm_clients(url):
    script = Path(__file__).parent / "npm" / "clients.mjs"
    if shutil.which("node") is None or not (script.parent / "node_modules" / "openai").is_dir():
        absent("node with the packages of tests/server/npm/package.json", "test")
    command = ["node", str(script), url.removesuffix("/v1")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop("error") == [400, "temperature"] and found.pop("counted") is True
    assert len(found) == 6
    for text, arguments in found.values():
        assert text == "Sure." and arguments == {"city": "Rom", "unit": "c"}
