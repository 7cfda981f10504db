"""Other clients where they are installed: LangChain, LiteLLM (`pip install langchain-openai litellm`, large), npm's."""

import json
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


def test_langchain(url, wild_url):
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
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


def test_litellm(url):
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
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
    """`npm install openai @anthropic-ai/sdk` in the checkout puts them where node looks."""
    script = Path(__file__).with_name("npm_clients.mjs")
    if shutil.which("node") is None or not (script.parents[2] / "node_modules" / "openai").is_dir():
        pytest.skip("node, or the packages openai and @anthropic-ai/sdk in node_modules, are not installed")
    command = ["node", str(script), url.removesuffix("/v1")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.pop("error") == [400, "temperature"] and found.pop("counted") is True
    assert len(found) == 6
    for text, arguments in found.values():
        assert text == "Sure." and arguments == {"city": "Rom", "unit": "c"}
