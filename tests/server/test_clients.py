"""The official clients against a running server: what they parse is what the server meant."""

import asyncio
import json

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.server.fakes import EOS, ScriptEngine, serving, wait_for
from tests.server.live import live
from tests.server.scripted import ROOMY, byte_server
from tests.server.test_tools import CALL, TOOLS_TEMPLATE, WEATHER

# The clients' own models of answers warn where a field of ours is not theirs.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
HI = [{"role": "user", "content": "hi"}]
THOUGHT_TEXT_CALL = f"hm</think>\n\nnaïve 😀\n{CALL}"


@pytest.fixture(scope="module")
def scripted():
    """A model that thinks, speaks and calls, whatever it is asked; with a key."""
    with (
        serving(ScriptEngine(THOUGHT_TEXT_CALL, 3), TOOLS_TEMPLATE + "<think>\n", facts=ROOMY, api_key="k") as client,
        live(client.app) as url,
    ):
        yield client, url


@pytest.fixture(scope="module")
def wild():
    """A model of wild habits over bytes, with a drafter: what is orderly comes of a grammar."""
    with byte_server("right") as client, live(client.app) as url:
        yield url


@pytest.fixture(scope="module")
def gpt(scripted):
    with openai.OpenAI(base_url=f"{scripted[1]}/v1", api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(scripted):
    with anthropic.Anthropic(base_url=scripted[1], api_key="k", max_retries=0) as client:
        yield client


def test_openai_chat_whole_and_streamed(gpt):
    answer = gpt.chat.completions.create(
        model="toy", messages=HI, tools=[WEATHER], extra_body={"tree_budget": 4, "return_token_ids": True}
    )
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("naïve 😀", "hm")
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Rom", "unit": "c"}
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].token_ids[-1] == EOS
    assert answer.ddtree["tree_budget"] == 4 and answer.usage.completion_tokens == answer.ddtree["output_tokens"]
    with gpt.chat.completions.stream(
        model="toy", messages=HI, tools=[WEATHER], stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.choices[0].message.content == message.content and final.usage == answer.usage
    assert final.choices[0].message.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments


def test_openai_completions_models_and_errors(gpt, scripted):
    answer = gpt.completions.create(model="toy", prompt=["a", "b"], max_tokens=3, n=2)
    assert [choice.text for choice in answer.choices] == ["hm<"] * 4
    text = "".join(
        chunk.choices[0].text for chunk in gpt.completions.create(model="toy", prompt="a", max_tokens=5, stream=True)
    )
    assert text == "hm</t"
    assert [model.id for model in gpt.models.list()] == ["toy", "org/alias"]
    assert gpt.models.retrieve("org/alias").id == "org/alias"
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        gpt.chat.completions.create(model="toy", messages=HI, temperature=3)
    assert error.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        gpt.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        gpt.models.retrieve("other")


def test_openai_parses_json_schema(wild):
    class Flags(BaseModel):
        kind: bool
        level: bool

    with openai.OpenAI(base_url=f"{wild}/v1", api_key="none") as client:
        for budget in (0, 16):
            answer = client.chat.completions.parse(
                model="m",
                messages=HI,
                response_format=Flags,
                seed=4,
                max_tokens=300,
                extra_body={"tree_budget": budget},
            )
            assert isinstance(answer.choices[0].message.parsed, Flags)
        assert answer.ddtree["mode"] == "ddtree" and answer.ddtree["mean_acceptance_length"] > 1
        parsed = client.responses.parse(model="m", input="hi", text_format=Flags, max_output_tokens=300)
        assert isinstance(parsed.output_parsed, Flags)
        logprobs = client.chat.completions.create(model="m", messages=HI, max_tokens=3, logprobs=True, top_logprobs=2)
        assert len(logprobs.choices[0].logprobs.content) == logprobs.usage.completion_tokens


def test_openai_responses_whole_and_streamed(gpt):
    tool = {"type": "function", **WEATHER["function"]}
    answer = gpt.responses.create(model="toy", input="hi", instructions="be brief", tools=[tool], store=False)
    assert answer.output_text == "naïve 😀" and answer.status == "completed"
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    again = [*[item.model_dump(exclude_none=True) for item in answer.output]]
    again.append({"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "21"})
    assert gpt.responses.create(model="toy", input=[*HI, *again], tools=[tool]).status == "completed"
    with gpt.responses.stream(model="toy", input="hi", tools=[tool]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert final.output_text == answer.output_text and final.output[2].arguments == answer.output[2].arguments


def test_openai_async_cancel_frees_the_place(wild):
    async def start_and_leave():
        async with openai.AsyncOpenAI(base_url=f"{wild}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="m", messages=HI, stream=True, max_tokens=3000, extra_body={"ignore_eos": True, "tree_budget": 1}
            )
            async for _ in stream:
                break
            await stream.close()
            answer = await client.chat.completions.create(model="m", messages=HI, max_tokens=2)
            assert answer.usage.completion_tokens <= 2

    asyncio.run(start_and_leave())

    def running():
        import httpx

        return httpx.get(f"{wild}/stats").json()["running"]

    wait_for(lambda: running() == 0)


def test_anthropic_messages(claude):
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    answer = claude.messages.create(model="toy", max_tokens=300, messages=HI, tools=[tool], system="be brief")
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.content[2].input == {"city": "Rom", "unit": "c"} and answer.stop_reason == "tool_use"
    with claude.messages.stream(model="toy", max_tokens=300, messages=HI, tools=[tool], system="be brief") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "naïve 😀" == final.content[1].text and final.content[2].input == answer.content[2].input
    assert final.usage.output_tokens == answer.usage.output_tokens
    result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "21"}
    history = [
        *HI,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    counted = claude.messages.count_tokens(model="toy", messages=history, tools=[tool])
    again = claude.messages.create(model="toy", max_tokens=5, messages=history, tools=[tool])
    assert counted.input_tokens == again.usage.input_tokens and again.stop_reason == "max_tokens"


def test_anthropic_errors(claude):
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        claude.messages.create(model="toy", max_tokens=5, messages=[])
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(model="toy", max_tokens=5, messages=HI)
