"""Agents of other projects, unmodified, in loops of calls; pip install '.[clients]'.

The model has random weights, so a grammar makes it call, and chance makes it stop.
"""

import dataclasses
import json
import re

import pytest
from support import llama_cpp, served
from support.trained_tokenizers import train_byte_level

from dflash.text.chat_formats import table

PROMPT = "a"
# Published templates by the format that the server finds in them.
TEMPLATES = {
    "deepseek_v3": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek_v31": "deepseek-ai-DeepSeek-V3.1",
    "gemma4": "google-gemma-4-31B-it",
    "mistral_v13": "mistralai-Ministral-3-14B-Reasoning-2512",
    "qwen3_coder": "Qwen3.5-4B",
}
MARKER = re.compile(
    r"<[|｜][^<>{}'\n ]+[|｜]>|<[|][a-z_]+>|<[a-z_]+[|]>|\[/?[A-Z_]+\]|</?s>|</?think>"
)
END = "<end>"
# Biases that keep answers from reasoning, which ends by chance alone.
REASONING = {
    "<think>": -100, "</think>": 100, "[THINK]": -100, "[/THINK]": 100, "<|channel>": -100,
    "<channel|>": 100,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A served model of random weights.

    Attributes:
      url: With "/v1".
      extra: Fields of requests that keep answers from blanks and reasoning without end.
      alternates: Whether a user may not write beside the results of tools.
    """

    url: str
    extra: dict
    alternates: bool


@pytest.fixture(scope="module", params=["hermes", *TEMPLATES])
def endpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("agents")
    text = served.CONFIG.replace("max_length: 128", "max_length: 8192")
    text = text.replace("prefill_chunk: 16", "prefill_chunk: 256")
    text = text.replace("max_position_embeddings: 512", "max_position_embeddings: 8192")
    overrides, end = ["serve.tool_format=hermes"], 0
    bias = dict.fromkeys(map(ord, " \t\n"), -100)
    if request.param in TEMPLATES:
        files = llama_cpp.files("models/templates", f"{TEMPLATES[request.param]}.jinja")
        (template,) = (content.decode() for content in files.values())
        chat_format = table.format_of(template)
        assert chat_format.name == request.param
        model, bias, end = make_model(directory / "model", template)
        overrides = [f"target.checkpoint={model}"]
        if not chat_format.shows_tools:  # Then users describe them, and name the format.
            overrides += [f"serve.tool_format={request.param}"]
        text = re.sub(r", architecture: \{.*?\}", "", text, flags=re.DOTALL)
    with served.serving(directory, *overrides, config_text=text) as server:
        extra = {"logit_bias": bias, "stop_token_ids": [end]}
        yield Endpoint(f"{server.url}/v1", extra, request.param.startswith("mistral"))
        assert "Traceback" not in server.log.read_text()


def make_model(directory, template: str):
    """Writes a model with a chat template; returns it, a logit bias, and the end of its texts."""
    transformers = pytest.importorskip("transformers", reason="pip install '.[parity]'")
    directory.mkdir()
    specials = [END, *sorted(set(MARKER.findall(template)))]
    tokenizer = train_byte_level(directory, specials=specials)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {"bos_token": END, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    end = tokenizer.token_to_id(END)
    config = transformers.Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=8192, eos_token_id=end,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(directory)
    texts = {token: tokenizer.decode([token]) for token in range(config.vocab_size)}
    blanks = (token for token, text in texts.items() if text and not text.strip())
    marks = {
        tokenizer.token_to_id(mark): bias for mark, bias in REASONING.items() if mark in specials
    }
    return directory, dict.fromkeys(blanks, -100) | marks, end


def test_langchain(endpoint):
    langchain_openai = pytest.importorskip("langchain_openai", reason="pip install '.[clients]'")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def increase(amount: bool) -> str:
        """Increases the number."""
        return f"by {amount}"

    options = {
        "model": "tiny", "base_url": endpoint.url, "api_key": "x", "temperature": 1,
        "max_tokens": 200,
    }  # fmt: skip
    model = langchain_openai.ChatOpenAI(**options, extra_body=endpoint.extra)
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
def test_openai_agents(endpoint, api, streamed):
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
        client = openai.AsyncOpenAI(base_url=endpoint.url, api_key="x")
        kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
        settings = agents.ModelSettings(
            temperature=2.0, max_tokens=200, parallel_tool_calls=False, tool_choice="required",
            extra_body=endpoint.extra,
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


def test_pydantic_ai(endpoint):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pip install '.[clients]'")
    import pydantic
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Sum(pydantic.BaseModel):
        is_large: bool

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=endpoint.url, api_key="x"))
    settings = {"temperature": 2.0, "max_tokens": 200, "extra_body": endpoint.extra}
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
def test_anthropic(endpoint, streamed):
    """Claude Code's client: calls until the model stops, and the length of the conversation."""
    anthropic = pytest.importorskip("anthropic", reason="pip install '.[clients]'")
    client = anthropic.Anthropic(base_url=endpoint.url.removesuffix("/v1"), api_key="x")
    schema = {"type": "object", "properties": {"amount": {"type": "boolean"}}}
    schema |= {"required": ["amount"], "additionalProperties": False}
    tools = [{"name": name, "description": "d", "input_schema": schema} for name in ("add", "stop")]
    options = {
        "model": "tiny",
        "max_tokens": 200,
        "tools": tools,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
        "extra_body": endpoint.extra,
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
        text = [] if endpoint.alternates else [{"type": "text", "text": "b"}]
        messages += [{"role": "user", "content": [result, *text]}]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system="Add.")
    assert counted.input_tokens > answer.usage.input_tokens
    long = [{"role": "user", "content": "a" * 9000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="tiny", max_tokens=5, messages=long)
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude", max_tokens=5, messages=messages)
