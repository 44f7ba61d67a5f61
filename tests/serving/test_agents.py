"""Agents of other projects, unmodified, in loops of calls; pip install '.[clients]'.

The model has random weights, so a grammar makes it call, and chance makes it stop.
"""

import json

import pytest
from support import served

BIAS = {str(ord(one)): -100 for one in " \t\n"}  # JSON may have any number of them
EXTRA = {"logit_bias": BIAS, "stop_token_ids": [0]}
PROMPT = "a"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    text = served.CONFIG.replace("max_length: 128", "max_length: 512")
    directory = tmp_path_factory.mktemp("agents")
    with served.serving(directory, "serve.tool_format=hermes", config_text=text) as server:
        yield f"{server.url}/v1"
        assert "Traceback" not in server.log.read_text()


def test_langchain(url):
    langchain_openai = pytest.importorskip("langchain_openai", reason="pip install '.[clients]'")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def increase(amount: bool) -> str:
        """Increases the number."""
        return f"by {amount}"

    options = {
        "model": "tiny", "base_url": url, "api_key": "x", "temperature": 1, "max_tokens": 200,
    }  # fmt: skip
    model = langchain_openai.ChatOpenAI(**options, extra_body=EXTRA)
    bound = model.bind_tools([increase], tool_choice="any", parallel_tool_calls=False)
    messages = [HumanMessage(PROMPT)]
    for step in range(3):
        if step == 1:
            chunks = list(bound.stream(messages))
            answer = sum(chunks[1:], chunks[0])
        else:
            answer = bound.invoke(messages)
        (call,) = answer.tool_calls
        assert call["name"] == "increase"
        assert isinstance(call["args"]["amount"], bool)
        messages += [answer, ToolMessage(increase.invoke(call["args"]), tool_call_id=call["id"])]


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_openai_agents(url, api, streamed):
    agents = pytest.importorskip("agents", reason="pip install '.[clients]'")
    import asyncio

    import openai

    steps = []

    @agents.function_tool
    def add(amount: bool) -> str:
        """Adds to the number."""
        steps.append(amount)
        return "more"

    @agents.function_tool
    def stop(sure: bool) -> str:
        """Ends."""
        return f"done {sure}"

    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=url, api_key="x")
        kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
        settings = agents.ModelSettings(
            temperature=2.0, max_tokens=200, parallel_tool_calls=False, tool_choice="required",
            extra_body=EXTRA,
        )  # fmt: skip
        agent = agents.Agent(
            name="Adder", instructions="Add.", model=kind[api](model="tiny", openai_client=client),
            model_settings=settings, tools=[add, stop],
            tool_use_behavior=agents.StopAtTools(stop_at_tool_names=["stop"]),
            reset_tool_choice=False,
        )  # fmt: skip
        if streamed:
            result = agents.Runner.run_streamed(agent, PROMPT, max_turns=100)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, PROMPT, max_turns=100)
        return result.final_output

    agents.set_tracing_disabled(True)
    outputs = [asyncio.run(run()) for _ in range(2)]
    while len(steps) < 3:
        outputs.append(asyncio.run(run()))
    assert all(output.startswith("done ") for output in outputs)


def test_pydantic_ai(url):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pip install '.[clients]'")
    import pydantic
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Sum(pydantic.BaseModel):
        is_large: bool

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="x"))
    settings = {"temperature": 2.0, "max_tokens": 200, "extra_body": EXTRA}
    settings |= {"parallel_tool_calls": False}
    agent = pydantic_ai.Agent(model, output_type=Sum, model_settings=settings)
    steps = []

    @agent.tool_plain
    def add(amount: bool) -> str:
        """Adds to the number."""
        steps.append(amount)
        return "more"

    limits = pydantic_ai.UsageLimits(request_limit=100)
    while len(steps) < 3:
        result = agent.run_sync(PROMPT, usage_limits=limits)
        assert isinstance(result.output, Sum)
    called = [part for message in result.all_messages() for part in message.parts]
    assert all(isinstance(json.loads(p.args), dict) for p in called if p.part_kind == "tool-call")


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic(url, streamed):
    """Claude Code's client: calls until the model stops, and the length of the conversation."""
    anthropic = pytest.importorskip("anthropic", reason="pip install '.[clients]'")
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="x")
    schema = {"type": "object", "properties": {"amount": {"type": "boolean"}}}
    schema |= {"required": ["amount"], "additionalProperties": False}
    tools = [{"name": name, "description": "d", "input_schema": schema} for name in ("add", "stop")]
    options = {
        "model": "tiny",
        "max_tokens": 200,
        "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
        "extra_body": EXTRA,
    }
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(3):
        if streamed:
            with client.messages.stream(messages=messages, **options) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **options)
        (block,) = answer.content
        assert (answer.stop_reason, block.type) == ("tool_use", "tool_use")
        assert isinstance(block.input["amount"], bool)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "more"}
        messages += [{"role": "assistant", "content": answer.content}]
        messages += [{"role": "user", "content": [result, {"type": "text", "text": "b"}]}]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system="Add.")
    assert counted.input_tokens > answer.usage.input_tokens
    long = [{"role": "user", "content": "a" * 600}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="tiny", max_tokens=5, messages=long)
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude", max_tokens=5, messages=messages)
